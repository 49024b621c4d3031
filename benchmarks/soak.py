"""Read thousands of documents over a server that fails, while the reading process is killed again and again.

    python benchmarks/soak.py [--readings 10000] [--minutes 10] [--output FIGURES.json]

One call in twenty goes wrong: null, empty and invisible contents, 500, 429, replies that are cut, and stalls. The
reading process (256 in flight, sync and async by turns) is killed at random moments of the first half, and the next one
goes on from the journal. It ends when both numbers are reached. Each section of a document holds facts, which the
server notes without error; so an answer that lacks one lost it on the way. Exit code 1: a reading was silently wrong,
ended with an error that is not this package's, or the process crashed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from memagent_integrations import Journal, Limits, MemAgentError, Reader, Reading
from memagent_integrations.backends.openai import OpenAIBackend

SECTIONS, FACTS = 4, 2
FAULTS = ("null", "empty", "invisible", "500", "429", "cut", "stall")
STALLED = 60.0  # seconds: longer than any call may take
FACT = re.compile(r"\bf\d+_\d+is[0-9a-f]{6}\b")


# ---- the documents


def facts(number: int) -> list[str]:
    """Return the facts of a document."""
    values = (hashlib.sha256(f"{number} {fact}".encode()).hexdigest()[:6] for fact in range(SECTIONS * FACTS))
    return [f"f{number}_{fact}is{value}" for fact, value in enumerate(values)]


def job(number: int) -> tuple[str, str]:
    """Return a question and the document that answers it."""
    lines = (f"Here it is noted that {fact} and\n{'nothing else is said here.' * 3}\n" * 3 for fact in facts(number))
    return f"Which facts does document {number} hold?", "".join(lines)


def verdict(number: int, reading: Reading) -> str:
    """Return "right", the class of the error, or "wrong"."""
    if reading.error:
        is_ours = isinstance(reading.error, MemAgentError)
        return type(reading.error).__name__ if is_ours else f"foreign: {reading.error!r}"
    return "right" if sorted((reading.answer or "").split()) == sorted(facts(number)) else "wrong"


# ---- the server


async def serve(faults: float) -> None:
    """Run the server until it is killed; write its port first."""
    chance = random.Random(7)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                fault = chance.choice(FAULTS) if chance.random() < faults else None
                if fault == "stall":
                    await asyncio.sleep(STALLED)
                    break
                response = replied(json.loads(body), fault)
                writer.write(response[: len(response) // 2] if fault == "cut" else response)
                await writer.drain()
                if fault == "cut":
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def replied(request: dict[str, Any], fault: str | None) -> bytes:
    """Return a response: the facts that stand in the prompt, or one that is of no use."""
    found = FACT.findall("\n".join(message["content"] for message in request["messages"]))
    contents = {"null": None, "empty": "", "invisible": "\u200b\n\u2060"}
    content = contents[fault] if fault in contents else " ".join(dict.fromkeys(found)) or "No facts yet."
    message = {"role": "assistant", "content": content}
    body: dict[str, Any] = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 60, "total_tokens": 360},
    }
    status = fault if fault in ("500", "429") else "200"
    if status != "200":
        body = {"error": {"message": "not now"}}
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} .\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


# ---- the process that reads, and is killed


def read(url: str, folder: Path, options: argparse.Namespace) -> None:
    """Read what has no outcome yet, and note the outcomes."""
    backend = OpenAIBackend(
        "m", base_url=url, api_key="none", tokenizer="approximate", window=4000, concurrency=options.in_flight
    )
    limits = Limits(call_timeout=options.call_timeout)
    done = {outcome["number"] for outcome in outcomes(folder)}
    reader = Reader(backend, chunk_tokens=300, memory_tokens=300, journal=folder / "runs.db", limits=limits)
    with reader, (folder / "outcomes.jsonl").open("a", encoding="utf-8") as file:
        while (missing := options.readings - len(done)) > 0 or time.time() < options.until:
            size = min(2 * options.in_flight, missing if missing > 0 else options.in_flight)
            block = [n for n in range(max(done, default=0) + size + 1) if n not in done][:size]
            jobs = [job(number) for number in block]
            readings = reader.read_many(jobs) if options.sync else asyncio.run(reader.aread_many(jobs))
            for number, reading in zip(block, readings, strict=True):
                recorded = sum(step.reply.recorded for step in reading.steps)
                line = {"number": number, "verdict": verdict(number, reading), "recorded": recorded}
                line |= {"steps": len(reading.steps), "error": str(reading.error) if reading.error else None}
                file.write(f"\n{json.dumps(line)}\n")  # the line before may have been torn
            file.flush()
            done.update(block)


def outcomes(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the outcomes that were noted, without those that a kill has torn."""
    file = folder / "outcomes.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


# ---- what watches over it


class Watch:
    """Samples memory and descriptors of a process until it ends."""

    def __init__(self, process: int) -> None:
        self.memory: list[float] = []
        self.descriptors: list[int] = []
        self._thread = threading.Thread(target=self._sample, args=(psutil.Process(process),))
        self._thread.start()

    def _sample(self, process: psutil.Process) -> None:
        while True:
            try:
                memory, descriptors = process.memory_info().rss / 1e6, process.num_fds()
            except psutil.Error:
                return
            self.memory.append(memory)
            self.descriptors.append(descriptors)
            time.sleep(0.5)

    def figures(self) -> dict[str, Any]:
        """Return the peaks, and the medians of the second and the last quarter, once the process has ended."""
        self._thread.join()

        def summary(samples: list[Any]) -> dict[str, float]:
            quarter = max(len(samples) // 4, 1)
            second, last = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
            return {"second quarter": round(median(second)), "last quarter": round(median(last)), "peak": max(samples)}

        return {"memory, MB": summary([round(each) for each in self.memory]), "descriptors": summary(self.descriptors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readings", type=int, default=10_000, help="at least so many")
    parser.add_argument("--minutes", type=float, default=10, help="at least so long")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--faults", type=float, default=0.05, help="share of the calls that go wrong")
    parser.add_argument("--call-timeout", type=float, default=15, help="seconds after which a stalled call is given up")
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--output", type=Path, help="a JSON file")
    for hidden in ("--serve", "--sync"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=2, metavar=("URL", "DIR"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.faults))
    elif options.read:
        read(options.read[0], Path(options.read[1]), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            figures = soak(Path(folder), options)
        written = json.dumps(figures, indent=1)
        print(written)
        if options.output:
            options.output.write_text(written + "\n", encoding="utf-8")
        sys.exit(bool(figures["silently wrong"] or figures["foreign errors"] or figures["crashes"]))


def soak(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the server and, one after the other, the processes that read; return the figures."""
    begun, chance, lives, crashes = time.time(), random.Random(options.seed), [], []
    until = begun + 60 * options.minutes
    arguments = sys.argv[1:]
    server = subprocess.Popen([sys.executable, __file__, *arguments, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        command = [sys.executable, __file__, *arguments, "--read", url, str(folder), "--until", str(until)]
        longest = 60 * options.minutes / max(options.kills, 1)  # on average half of it: the kills are in the first half
        while True:
            life = subprocess.Popen(command + ["--sync"] * (len(lives) % 2), stderr=subprocess.PIPE, text=True)
            lives.append(Watch(life.pid))
            try:
                patience = chance.uniform(0.0, longest) if len(lives) <= options.kills else None
                _, said = life.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                life.kill()
                life.communicate()
                continue
            if life.returncode:
                crashes.append(said.strip().splitlines()[-1:])
            if not life.returncode or len(crashes) > options.kills:
                break
    finally:
        server.kill()
        server.wait()
    seconds = time.time() - begun
    every = list({outcome["number"]: outcome for outcome in outcomes(folder)}.values())
    verdicts = Counter(outcome["verdict"] for outcome in every)
    messages = Counter(f"{outcome['verdict']}: {outcome['error']}"[:160] for outcome in every if outcome["error"])
    kept = journal_verdicts(folder)
    return {
        "command": f"python benchmarks/soak.py --readings {options.readings} --minutes {options.minutes:g}",
        "readings": len(every),
        "silently wrong": max(verdicts["wrong"], kept["wrong"]),
        "foreign errors": sum(count for name, count in verdicts.items() if name.startswith("foreign")),
        "crashes": crashes,
        "outcomes": dict(verdicts),
        "in the journal": dict(kept),
        "kills": len(lives) - 1 - len(crashes),
        "in flight": options.in_flight,
        "share of calls that go wrong": options.faults,
        "steps": sum(outcome["steps"] for outcome in every),
        "steps that a process took from the journal": sum(outcome["recorded"] for outcome in every),
        "seconds": round(seconds),
        "most frequent errors": dict(messages.most_common(9)),
        "last process": lives[-1].figures(),
    }


def journal_verdicts(folder: Path) -> Counter[str]:
    """Count what the journal holds: each finished run has to be right."""
    counts: Counter[str] = Counter()
    with Journal(folder / "runs.db", readonly=True) as journal:
        for run in journal.runs():
            number = re.search(r"\d+", run.question)
            assert number
            counts[verdict(int(number[0]), journal.reading(run.name)) if run.finished else "unfinished"] += 1
    return counts


if __name__ == "__main__":
    main()

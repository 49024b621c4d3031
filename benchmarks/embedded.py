"""Measure how fast the embedded model reads: llama.cpp with its file in other quantisations, and transformers.

    python benchmarks/embedded.py [--ways WAY ...] [--repeat 3] [--chunks 6]

A way is a quantisation of llama.cpp's, with settings of llama.cpp's after it ("q4_0 n_ubatch=1024"), or "transformers".
`q4_1` is the file as it is pulled; the others are made from it with gguf's quantizers, all its matrices but the
embeddings. Each way reads the same text with the policy that ships ("smollm2"), in a process of its own, in turn.
Tokens a second are those of all prompts and replies, over the seconds of the whole reading, and over the seconds that
the processor worked on it; the model is loaded, and has read a chunk, before. Beside other work compare the latter,
with one thread ("q4_0 threads=1"): several threads work while they wait for each other. Needs the extras llamacpp and
transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from memagent_integrations import Reader
from memagent_integrations.backends import embedded
from memagent_integrations.backends.requantise import requantise

CHUNK_TOKENS = 384  # of the policy
CHARACTERS = 4 * CHUNK_TOKENS
QUESTION = "Which statements does the manual describe?"
WAYS = ("q4_1", "q4_0", "q8_0", "f16", "transformers")
TEXT = "\n\n".join(topics.values())


def reader_of(way: str, folder: Path) -> Reader:
    """Return a reader of the policy that ships, whose model runs in this way."""
    kind, *settings = way.split()
    if kind == "transformers":
        return Reader("transformers:smollm2")
    import xllamacpp

    made, values = xllamacpp.CommonParams, dict(setting.split("=") for setting in settings)
    threads = int(values.pop("threads", 0)) or None

    def params() -> Any:
        result = made()
        for name, value in values.items():
            kind_of = type(getattr(result, name))
            setattr(result, name, kind_of(int(value)))
        return result

    xllamacpp.CommonParams = params
    source, file = embedded.path("smollm2-raw"), folder / f"{kind}.gguf"
    if kind == "q4_1":
        file = source
    elif not file.exists():
        requantise(source, file, kind.upper())
    return Reader("smollm2", backend_options={"model": f"llamacpp:{file}", "threads": threads})


def measure(way: str, folder: Path, chunks: int) -> dict[str, float]:
    """Return the speeds of a reading, and the tokens of its prompts and replies."""
    with reader_of(way, folder) as reader:
        reader.read(QUESTION, TEXT[:1000])
        started, computed = time.perf_counter(), time.process_time()
        reading = reader.read(QUESTION, TEXT[3000 : 3000 + chunks * CHARACTERS])
        seconds, computed = time.perf_counter() - started, time.process_time() - computed
    prompt, written = reading.usage.prompt_tokens or 0, reading.usage.completion_tokens or 0
    speeds = {"tokens_per_second": (prompt + written) / seconds, "tokens_per_cpu_second": (prompt + written) / computed}
    return {**speeds, "prompt": prompt, "written": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.folder, options.chunks)))
        return
    embedded.pull("smollm2-raw")
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeat):  # in turn, so that other work on the machine meets all of them
            for way, found in runs.items():
                command = [sys.executable, __file__, "--one", way, "--folder", folder, "--chunks", str(options.chunks)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
                print(way, found[-1], file=sys.stderr, flush=True)
    medians = {way: medians_of(found) for way, found in runs.items()}
    first = medians[options.ways[0]]
    ratios = {
        way: {f"{name} ratio": round(value / first[name], 2) for name, value in speeds.items()}
        for way, speeds in medians.items()
    }
    print(json.dumps({way: medians[way] | ratios[way] for way in medians}, indent=1))


def medians_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of both speeds."""
    names = ("tokens_per_second", "tokens_per_cpu_second")
    return {name: round(statistics.median(run[name] for run in runs), 1) for name in names}


if __name__ == "__main__":
    main()

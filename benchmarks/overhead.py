"""Measure what a chunk costs besides the model: CPU and wall time of reading a long document over a loopback endpoint.

    python benchmarks/overhead.py [--chunks 700] [--delay 0] [--repeat 3] [--ways NAME ...]
    python benchmarks/overhead.py --linear [--delay 0.05]

The ways: a loop by hand (tiktoken, and httpx or one of the clients below), `Reader`, `MemAgentReader` and
`MemAgentSynthesizer` of a model that is named (`openai:NAME`, over httpx), `MemAgentReader` over `ChatOpenAI`,
`MemAgentSynthesizer` over `OpenAILike` (all of these with the same prompts), LangChain's refine chain and
LlamaIndex's Refine. Each is compared with the loop by hand over httpx, and with the one over its own client. Each
runs in a process of its own, which reads a few chunks of another text first; so does the server, which takes
`--delay` seconds for each 5,000 tokens of a prompt. Times include splitting and tokenizing, and are milliseconds for
5,000 tokens of the document. `--linear` reads 10, 100 and 1,000 chunks of a document that is made while it is read,
for time and memory by length, and prints what each chunk takes beyond those of the shorter document.
Needs the packages of the extras langchain, llama-index and eval, and llama-index-llms-openai-like.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, repeat
from multiprocessing.connection import Connection
from pydoc_data.topics import topics
from typing import Any

CHUNK_TOKENS = 5000
ENCODING = "o200k_base"
QUESTION = "Which statements does the manual describe, and what is each of them for?"
MODEL = "loopback"
KEY = "none"
SENTENCES = 12  # of a memory
CHARACTERS_PER_TOKEN = 4.24  # of the document
LINES = 100  # of a piece of the document
WARM_UP = 8  # chunks
SIZES = (10, 100, 1000)  # chunks


def serve(pipe: Connection, delay: float, changing: bool) -> None:
    """Run the server: send its URL through the pipe, and stop at the first message."""
    asyncio.run(_serve(pipe, delay, changing))


async def _serve(pipe: Connection, delay: float, changing: bool) -> None:
    numbers = count() if changing else repeat(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            request = await reader.readexactly(int(length[1]) if length else 0)
            await asyncio.sleep(delay * len(request) / CHUNK_TOKENS / CHARACTERS_PER_TOKEN)
            body = json.dumps(completion(memory(next(numbers)))).encode()
            lines = ["HTTP/1.1 200 OK", "Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", limit=2**20)
    pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    await asyncio.to_thread(pipe.recv)


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def memory(number: int) -> str:
    """Return the memory of a step, about 300 tokens: one sentence is new."""
    told = (
        f"Part {n} of the manual describes statement {n * 7919 % 1000}: how it is written, what it evaluates first, "
        "and which exception it raises."
        for n in range(number, number + SENTENCES)
    )
    return "\n".join(told)


def completion(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5500, "completion_tokens": 300, "total_tokens": 5800},
    }


def pieces(tokens: int, *, first: int = 0) -> Iterator[str]:
    """Yield a document of about so many tokens: Python's manual, again and again, its lines numbered from `first`."""
    lines = chain.from_iterable(repeat("\n".join(topics.values()).splitlines(keepends=True)))
    numbered = (f"{number} {line}" if line.strip() else line for number, line in enumerate(lines, first))
    left = tokens * CHARACTERS_PER_TOKEN
    while left > 0:
        piece = "".join(islice(numbered, LINES))
        yield piece
        left -= len(piece)


def by_hand(url: str) -> Callable[[str], object]:
    """Return a loop with nothing but the algorithm: no checks of sizes, no retries, no records."""
    import httpx

    client, headers = httpx.Client(timeout=600), {"Authorization": f"Bearer {KEY}"}

    def ask(prompt: str) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1024}
        reply = client.post(f"{url}/chat/completions", json=body, headers=headers).raise_for_status().json()
        return str(reply["choices"][0]["message"]["content"])

    return _loop(ask)


def by_hand_openai(url: str) -> Callable[[str], object]:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=KEY, max_retries=0)

    def ask(prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1024)
        return reply.choices[0].message.content or ""

    return _loop(ask)


def by_hand_langchain(url: str) -> Callable[[str], object]:
    model = _chat_openai(url)
    return _loop(lambda prompt: str(model.invoke(prompt, max_tokens=1024).content))


def by_hand_llama_index(url: str) -> Callable[[str], object]:
    from llama_index.core.llms import ChatMessage

    llm = _openai_like(url)
    return _loop(lambda prompt: llm.chat([ChatMessage(prompt)]).message.content or "")


def _loop(ask: Callable[[str], str]) -> Callable[[str], object]:
    import tiktoken

    from memagent_integrations.prompts import PromptSet

    encoding, prompts = tiktoken.get_encoding(ENCODING), PromptSet.default()
    update, answer = prompts.text("memory"), prompts.text("answer")

    def fill(template: str, **values: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], template)

    def read(document: str) -> str:
        tokens, memory = encoding.encode_ordinary(document), prompts.empty_memory
        for start in range(0, len(tokens), CHUNK_TOKENS):
            section = encoding.decode(tokens[start : start + CHUNK_TOKENS])
            memory = ask(fill(update, question=QUESTION, memory=memory, section=section, words="660"))
        return ask(fill(answer, question=QUESTION, memory=memory))

    return read


def reader(url: str) -> Callable[[Any], object]:
    from memagent_integrations import Reader

    ours = Reader(f"openai:{MODEL}", window=8192, backend_options=_named(url))
    return lambda document: ours.read(QUESTION, document)


def langchain_named(url: str) -> Callable[[str], object]:
    from memagent_integrations.langchain import MemAgentReader

    ours = MemAgentReader(f"openai:{MODEL}", window=8192, backend_options=_named(url))
    return lambda document: ours.invoke({"question": QUESTION, "context": document})


def llama_index_named(url: str) -> Callable[[str], object]:
    from llama_index.core.schema import NodeWithScore, TextNode

    from memagent_integrations.llama_index import MemAgentSynthesizer

    ours = MemAgentSynthesizer(f"openai:{MODEL}", window=8192, backend_options=_named(url))
    return lambda document: ours.synthesize(QUESTION, [NodeWithScore(node=TextNode(text=document))])


def _named(url: str) -> dict[str, Any]:
    return {"base_url": url, "api_key": KEY, "tokenizer": f"tiktoken:{ENCODING}"}


def langchain(url: str) -> Callable[[str], object]:
    from memagent_integrations.langchain import MemAgentReader

    ours = MemAgentReader(model=_chat_openai(url), window=8192, tokenizer=f"tiktoken:{ENCODING}")
    return lambda document: ours.invoke({"question": QUESTION, "context": document})


def llama_index(url: str) -> Callable[[str], object]:
    from llama_index.core.schema import NodeWithScore, TextNode

    from memagent_integrations.llama_index import MemAgentSynthesizer

    ours = MemAgentSynthesizer(_openai_like(url), window=8192, tokenizer=f"tiktoken:{ENCODING}")
    return lambda document: ours.synthesize(QUESTION, [NodeWithScore(node=TextNode(text=document))])


def langchain_refine(url: str) -> Callable[[str], object]:
    from langchain_classic.chains.question_answering import load_qa_chain
    from langchain_core.documents import Document
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    refine = load_qa_chain(_chat_openai(url), "refine")
    splitter = RecursiveCharacterTextSplitter.from_tiktoken_encoder(ENCODING, chunk_size=CHUNK_TOKENS, chunk_overlap=0)

    def read(document: str) -> object:
        parts = [Document(part) for part in splitter.split_text(document)]
        return refine.invoke({"input_documents": parts, "question": QUESTION})

    return read


def llama_index_refine(url: str) -> Callable[[str], object]:
    import tiktoken
    from llama_index.core import Settings
    from llama_index.core.node_parser import SentenceSplitter
    from llama_index.core.response_synthesizers import Refine
    from llama_index.core.schema import NodeWithScore, TextNode

    Settings.tokenizer = tiktoken.get_encoding(ENCODING).encode_ordinary
    splitter = SentenceSplitter(chunk_size=CHUNK_TOKENS, chunk_overlap=0)
    refine = Refine(llm=_openai_like(url))

    def read(document: str) -> object:
        nodes = [NodeWithScore(node=TextNode(text=part)) for part in splitter.split_text(document)]
        return refine.synthesize(QUESTION, nodes)

    return read


def _chat_openai(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, max_retries=0)


def _openai_like(url: str) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL, api_base=url, api_key=KEY, is_chat_model=True, context_window=8192, max_tokens=1024, max_retries=0
    )


WAYS: dict[str, Callable[[str], Callable[[Any], object]]] = {
    "loop by hand": by_hand,
    "by hand over openai": by_hand_openai,
    "by hand over ChatOpenAI": by_hand_langchain,
    "by hand over OpenAILike": by_hand_llama_index,
    "Reader": reader,
    "MemAgentReader": langchain_named,
    "MemAgentSynthesizer": llama_index_named,
    "MemAgentReader over ChatOpenAI": langchain,
    "MemAgentSynthesizer over OpenAILike": llama_index,
    "LangChain refine": langchain_refine,
    "LlamaIndex Refine": llama_index_refine,
}

SAME_CLIENT = {
    "Reader": "loop by hand",
    "MemAgentReader": "loop by hand",
    "MemAgentSynthesizer": "loop by hand",
    "MemAgentReader over ChatOpenAI": "by hand over ChatOpenAI",
    "MemAgentSynthesizer over OpenAILike": "by hand over OpenAILike",
    "LangChain refine": "by hand over ChatOpenAI",
    "LlamaIndex Refine": "by hand over OpenAILike",
}
"""For each way, the loop by hand over the client that it has."""


def measure(way: str, url: str, chunks: int, *, whole: bool) -> dict[str, float]:
    """Return milliseconds of CPU and wall time for 5,000 tokens, and the growth of the peak memory in MB."""
    read = WAYS[way](url)
    read("".join(pieces(WARM_UP * CHUNK_TOKENS, first=10**6)))  # another text: nothing of it may be remembered
    document: Any = "".join(pieces(chunks * CHUNK_TOKENS)) if whole else pieces(chunks * CHUNK_TOKENS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, wall = time.process_time(), time.perf_counter()
    read(document)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"cpu_ms": 1000 * cpu / chunks, "wall_ms": 1000 * wall / chunks, "mb": grown / 1024}


def in_a_process(way: str, url: str, chunks: int, *, whole: bool = True) -> dict[str, float]:
    """Return the figures of `measure` from a new process."""
    command = [sys.executable, __file__, "--one", way, "--url", url, "--chunks", str(chunks)]
    command += [] if whole else ["--linear"]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return result


def compare(url: str, ways: list[str], chunks: int, times: int) -> dict[str, Any]:
    """Return the median figures of each way, and how many times those of the loop by hand they are."""
    runs = {way: [] for way in ways}
    for _ in range(times):  # in turn, so that other work on the machine meets all of them
        for way in ways:
            runs[way].append(in_a_process(way, url, chunks))
    medians = {
        way: {name: statistics.median(run[name] for run in found) for name in ("cpu_ms", "wall_ms")}
        for way, found in runs.items()
    }
    base = medians[ways[0]]
    return {
        way: {name: round(value, 2) for name, value in median.items()}
        | {f"{name.removesuffix('_ms')}_ratio": round(value / base[name], 2) for name, value in median.items()}
        | {
            f"{name.removesuffix('_ms')}_ratio_same_client": round(value / medians[SAME_CLIENT[way]][name], 2)
            for name, value in median.items()
            if SAME_CLIENT.get(way) in medians
        }
        for way, median in medians.items()
    }


def by_length(url: str, times: int) -> dict[int, dict[str, float]]:
    """Return the median figures of `Reader` by the length of the document, and of each chunk beyond the last one."""
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(times):
        for size, found in runs.items():
            found.append(in_a_process("Reader", url, size, whole=False))
    figures: dict[int, dict[str, float]] = {}
    before, total_before = 0, 0.0
    for size, found in runs.items():
        median = {name: statistics.median(run[name] for run in found) for name in ("cpu_ms", "wall_ms", "mb")}
        total = median["cpu_ms"] * size
        figures[size] = median | {"cpu_ms_of_each_more": (total - total_before) / (size - before)}
        before, total_before = size, total
    return {size: {name: round(value, 2) for name, value in each.items()} for size, each in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=700)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that the server takes for 5,000 tokens")
    parser.add_argument("--changing", action="store_true", help="one sentence of each memory is new")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--linear", action="store_true", help="read 10, 100 and 1,000 chunks of a stream")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.url, options.chunks, whole=not options.linear)))
        return
    processes = multiprocessing.get_context("spawn")
    pipe, server_pipe = processes.Pipe()
    processes.Process(target=serve, args=(server_pipe, options.delay, options.changing), daemon=True).start()
    url = pipe.recv()
    if options.linear:
        figures: dict[Any, Any] = by_length(url, options.repeat)
    else:
        figures = compare(url, options.ways, options.chunks, options.repeat)
    pipe.send("end")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

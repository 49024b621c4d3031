"""Ask many questions about one document: how much is computed, and how long it takes, beside the ways without sharing.

    python benchmarks/many_questions.py --model transformers:smollm2-raw [--questions N] [--sections N] [--tokens N]
    python benchmarks/many_questions.py --model openai:NAME --base-url URL
    python benchmarks/many_questions.py --model transformers:smollm2-raw --prefill

Three ways, each with an empty cache and layout section-shared: one question alone; all of them together (`ask`); and
one after the other, of which `--alone` are read and the rest are estimated from these. Tokens are the engines' own
counts: those of the prompts less those from a cache. A reply ends at `--memory` tokens. With `--prefill` a single
section, and one token of each reply: the time of prefill alone, with and without sharing, and whether the replies of
transformers in float32 are the same. `shallow_model.py` writes a model whose replies say nothing, and which is read
sooner.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from memagent_integrations import Reader, Reading, load_backend
from memagent_integrations.backends import Backend
from memagent_integrations.records import Prompt

WORDS = [
    "harbour",
    "ledger",
    "tenant",
    "winter",
    "orchard",
    "copper",
    "signal",
    "granite",
    "meadow",
    "lantern",
    "river",
    "archive",
]
QUESTIONS = [f"What does the text say about the {first} and the {second}?" for first in WORDS for second in WORDS[::-1]]


def document(reader: Reader, sections: int, seed: int) -> str:
    """Return a text of so many sections, another one for each seed, so that no cache knows it."""

    def sentence(number: int) -> str:
        first, second, third = (WORDS[(number * step + seed) % len(WORDS)] for step in (5, 7, 11))
        return f"Entry {seed}-{number}: the {first} of the {second} was noted beside the {third}. "

    each = reader.count("".join(map(sentence, range(1000, 1100)))) / 100
    return "".join(map(sentence, range(1000, 1000 + int(reader.budgets.chunk_tokens * (sections - 0.1) / each))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="transformers:smollm2-raw")
    parser.add_argument("--base-url")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--sections", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048, help="of a section")
    parser.add_argument("--memory", type=int, default=32, help="tokens of the memory")
    parser.add_argument("--alone", type=int, default=1, help="questions to read one after the other")
    parser.add_argument(
        "--parallel", type=int, help="slots of llama.cpp (1 keeps one beginning for all), or calls at a time"
    )
    parser.add_argument("--prefill", action="store_true")
    options = parser.parse_args()
    with load_backend(options.model, **backend_options(options)) as backend:
        print(json.dumps(prefill(backend, options) if options.prefill else whole(backend, options), indent=1))


def backend_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the backend: float32, greedy, as many places as questions."""
    kind, places = options.model.partition(":")[0], options.parallel or options.questions
    if kind == "transformers":
        return {"dtype": "float32", "batch_size": min(places, 8)}
    if kind == "openai":
        return {"base_url": options.base_url, "concurrency": places, "temperature": 0.0, "window": 8192}
    return {"parallel": places} if kind == "llamacpp" else {}


def reader_over(backend: Backend, options: argparse.Namespace) -> Reader:
    sizes = {"chunk_tokens": options.tokens, "memory_tokens": options.memory, "output_tokens": options.memory}
    return Reader(backend, **sizes, question_tokens=64, on_lost_section="skip", layout="section-shared")


def whole(backend: Backend, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the three ways."""
    shared = reader_over(backend, options)
    questions = QUESTIONS[: options.questions]
    read(shared, questions[:1], document(shared, 1, seed=99))  # so that nothing is loaded while it is measured
    texts = [document(shared, options.sections, seed) for seed in range(3)]
    one = read(shared, questions[:1], texts[0])
    together = read(shared, questions, texts[1])
    alone = [read(shared, [question], texts[2]) for question in questions[1 : options.alone + 1]]
    rows = {
        "one question": one,
        "together": together,
        "one after the other": {
            name: sum(each[name] for each in alone) * len(questions) / len(alone) for name in ("prefill", "seconds")
        },
    }
    return {
        "model": options.model,
        "questions": len(questions),
        "sections": one["sections"],
        "section_tokens": options.tokens,
        "ways": {
            name: {
                "prefill": round(row["prefill"]),
                "prefill_ratio": round(row["prefill"] / one["prefill"], 2),
                "seconds": round(row["seconds"], 1),
                "seconds_ratio": round(row["seconds"] / one["seconds"], 2),
            }
            for name, row in rows.items()
        },
    }


def read(reader: Reader, questions: list[str], text: str) -> dict[str, float]:
    started = time.perf_counter()
    readings = reader.ask(questions, text)
    seconds = time.perf_counter() - started
    for reading in readings:
        if reading.error:
            raise reading.error
    print(f"{len(questions)} questions: {seconds:.0f} s", file=sys.stderr)
    steps = len(readings[0].steps) - 1
    return {"prefill": sum(map(computed, readings)), "seconds": seconds, "sections": steps}


def computed(reading: Reading) -> int:
    """Return the tokens of prompts that the engine computed."""
    usages = [step.reply.usage for step in reading.steps]
    return sum((usage.prompt_tokens or 0) - (usage.cached_tokens or 0) for usage in usages)


def prompt_about(reader: Reader, question: str, section: str) -> Prompt:
    """Return the first prompt about a section, whose reply is one token."""
    messages = reader.prompts.update_messages(question=question, memory="", section=section, memory_tokens=32)
    return Prompt(index=0, phase="memory", messages=messages, max_tokens=1)


def prefill(backend: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a section of transformers for all questions at once: with sharing and without."""
    reader = reader_over(backend, options)
    questions, seconds, replies = QUESTIONS[: options.questions], {}, {}
    read(reader, questions[:2], document(reader, 1, seed=99))
    for share in (False, True):
        backend.share = share
        text = document(reader, 1, seed=1)
        chunk = next(reader.chunks(text))
        prompts = [prompt_about(reader, question, chunk.text) for question in questions]
        started = time.perf_counter()
        replies[share] = backend.complete_batch(prompts)
        seconds[share] = time.perf_counter() - started
    tokens = {
        share: sum(reply.usage.prompt_tokens - reply.usage.cached_tokens for reply in each)
        for share, each in replies.items()
    }
    return {
        "questions": len(questions),
        "section_tokens": chunk.span.tokens,
        "seconds": {"apart": round(seconds[False], 2), "shared": round(seconds[True], 2)},
        "times_less": round(seconds[False] / seconds[True], 2),
        "tokens": {"apart": tokens[False], "shared": tokens[True]},
        "same_replies": [each.text for each in replies[False]] == [each.text for each in replies[True]],
    }


if __name__ == "__main__":
    main()

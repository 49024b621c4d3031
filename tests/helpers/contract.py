"""What every backend has to do: a test module subclasses `BackendContract` and defines a `backend` fixture."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from memagent_integrations import Backend, ContextOverflow, Reader, UsageError
from memagent_integrations.records import Message, Prompt, Reply, Role

SCRIPTS = "naïve 中文 مرحبا \u202eabc 🙂👩‍👩‍👧 tab\tend\r\n"

PLANET: dict[str, Any] = {
    "title": "Planet",
    "type": "object",
    "properties": {"name": {"enum": ["Jupiter", "Saturn"]}, "gas": {"type": "boolean"}},
    "required": ["name", "gas"],
    "additionalProperties": False,
}
"""The schema of a reply that a small model can write too."""


def ask(text: str, max_tokens: int = 12) -> Prompt:
    """Return a prompt with one message."""
    return Prompt(index=0, phase="answer", messages=(Message(role="user", content=text),), max_tokens=max_tokens)


def joined(pieces: Iterable[str | Reply]) -> tuple[str, Reply, int]:
    """Return the joined text of a stream, its reply, and the number of pieces."""
    *texts, reply = pieces
    assert isinstance(reply, Reply), "a stream ends with the whole reply"
    assert all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)), reply, len(texts)


class BackendContract:
    """Tests of a deterministic (greedy) backend that knows its window."""

    window = 8192

    def test_counts_tokens(self, backend: Backend) -> None:
        assert backend.count("") == 0
        assert backend.count("a") >= 1
        short, long = backend.count(SCRIPTS), backend.count(SCRIPTS * 10)
        assert 9 * short <= long <= 10 * short + 10

    def test_knows_its_window(self, backend: Backend) -> None:
        assert backend.window == self.window

    def test_completes(self, backend: Backend) -> None:
        reply = backend.complete(ask("Name three colours."))
        assert reply.text.strip()
        assert reply.finish_reason in ("stop", "length")
        assert reply.seconds >= 0
        assert reply.usage.prompt_tokens is not None
        assert reply.usage.prompt_tokens >= backend.count("Name three colours.")
        assert reply.usage.completion_tokens is not None
        assert 1 <= reply.usage.completion_tokens <= 12

    def test_says_when_the_output_limit_was_met(self, backend: Backend) -> None:
        reply = backend.complete(ask("Count from one to one hundred in words.", max_tokens=3))
        assert reply.finish_reason == "length"
        assert reply.usage.completion_tokens == 3

    def test_same_prompt_same_reply(self, backend: Backend) -> None:
        prompt = ask("The sky is")
        assert backend.complete(prompt).text == backend.complete(prompt).text

    def test_a_batch_keeps_its_order_and_its_failures_apart(self, backend: Backend) -> None:
        questions = ["Say one word.", "word " * (self.window + 100), "Count from one to fifty in words, please."]
        first, overflow, last = backend.complete_batch([ask(text, max_tokens=5) for text in questions])
        assert isinstance(first, Reply)
        assert isinstance(last, Reply)
        assert isinstance(overflow, ContextOverflow)
        assert last.usage.prompt_tokens is not None
        assert first.usage.prompt_tokens is not None
        assert last.usage.prompt_tokens > first.usage.prompt_tokens

    def test_a_prompt_beyond_the_window_is_an_overflow(self, backend: Backend) -> None:
        with pytest.raises(ContextOverflow, match=r"\d"):
            backend.complete(ask("word " * (self.window + 100)))

    def test_streams_what_it_completes(self, backend: Backend) -> None:
        text, reply, pieces = joined(backend.stream(ask("Name three colours.")))
        assert text == reply.text == backend.complete(ask("Name three colours.")).text
        assert pieces > 1
        assert reply.usage.completion_tokens is not None

    def test_a_stream_can_be_left(self, backend: Backend) -> None:
        pieces = iter(backend.stream(ask("Count from one to one hundred in words.", max_tokens=40)))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        assert backend.complete(ask("Name three colours.")).text

    async def test_async_gives_the_same(self, backend: Backend) -> None:
        prompt = ask("Name three colours.")
        replies = await asyncio.gather(*(backend.acomplete(prompt) for _ in range(3)))
        text, reply, _ = joined([piece async for piece in backend.astream(prompt)])
        assert {text, reply.text} | {each.text for each in replies} == {backend.complete(prompt).text}

    def test_takes_any_script(self, backend: Backend) -> None:
        assert backend.complete(ask(SCRIPTS)).usage.prompt_tokens

    def test_keeps_an_answer_to_a_schema_or_is_refused_with_one(self, backend: Backend) -> None:
        if not backend.structured:
            with pytest.raises(UsageError, match=r"cannot keep an answer to a schema .* answer_model"):
                Reader(backend, output=PLANET)
            return
        prompt = replace(ask("Which planet is the largest?", 40), schema=PLANET)
        text, reply, _ = joined(backend.stream(prompt))
        assert text == reply.text == backend.complete(prompt).text
        planet = json.loads(text)
        assert planet["name"] in ("Jupiter", "Saturn")
        assert planet["gas"] in (True, False)

    def test_takes_messages_of_the_system_and_earlier_turns(self, backend: Backend) -> None:
        def prompt(*turns: str) -> Prompt:
            roles: tuple[Role, ...] = ("system", "user", "assistant")
            messages = [Message(role=role, content=turn) for role, turn in zip(roles, turns, strict=True)]
            return replace(last, messages=(*messages, *last.messages))

        last, turns = ask("The capital of Italy?"), ["Answer in one word.", "The capital of France?", "Paris, it is"]
        reply = backend.complete(prompt(*turns))
        assert reply.text.strip()
        for place, turn in enumerate(turns):
            longer = [" ".join([text] * 20) if number == place else text for number, text in enumerate(turns)]
            size, before = backend.complete(prompt(*longer)).usage.prompt_tokens, reply.usage.prompt_tokens
            assert size is not None
            assert before is not None
            assert size - before >= 15 * backend.count(turn), "every message is part of the prompt"

    def test_reads_a_document(self, backend: Backend) -> None:
        document = "The harbour master noted the tide.\n\n" * 30 + "The code of the north gate is 7319.\n\n"
        reader = Reader(backend, chunk_tokens=120, memory_tokens=30, output_tokens=30)
        question, steps = "What is the code of the north gate?", []
        reading = reader.read(question, document, progress=lambda step: steps.append(step.index))
        assert reading.answer
        assert steps == list(range(reader.plan(question, document).calls))
        assert all(backend.count(step.memory) <= 30 for step in reading.steps)
        assert reading.usage.prompt_tokens is not None

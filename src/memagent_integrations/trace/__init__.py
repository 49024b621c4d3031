"""A reading as one page that a person can look through: every version of the memory, what changed, where it came from.

The page is a single file that needs no network. Everything in it that comes from a document or a model is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined, Template

from memagent_integrations import files
from memagent_integrations.changes import difference

if TYPE_CHECKING:
    from memagent_integrations.records import Reading, Step


def page(reading: Reading) -> str:
    """The page, as HTML."""
    return _rendered(
        reading.question, json.dumps(data(reading)).replace("<", "\\u003c")
    )  # no text can end the script element that holds it


def page_shell(title: str, *, script: str, style: str) -> str:
    """The same page without a reading, which `script` gets from the server that the page came from. It has the functions of `page.js`."""
    return _rendered(title, "", script, style)


def _rendered(title: str, reading: str, script: str = "", style: str = "") -> str:
    script, style = _part("page.js") + script, _part("page.css") + style
    return _template().render(
        title=title, data=reading, script=script, style=style, script_hash=_hash(script), style_hash=_hash(style)
    )


def save_trace(reading: Reading, path: str | Path) -> None:
    """Write a reading as a page that shows every version of the memory: what changed, and where it came from. It is one HTML file.

    Raises:
        UsageError: the file cannot be written.
    """
    files.write(path, page(reading))


def data(reading: Reading, *, start: int = 0) -> dict[str, Any]:
    """What the page shows of a reading, as JSON: of its steps those from number `start` on."""
    usage = reading.usage
    return {
        "question": reading.question,
        "answer": reading.answer,
        "error": str(reading.error) if reading.error else None,
        "model": reading.model,
        "seconds": reading.seconds,
        "tokens": [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens],
        "steps": [_step(step) for step in reading.steps[start:] if step.phase == "memory"],
        "sentences": [{"text": text, "step": step} for text, step in origins(reading)],
    }


def _step(step: Step) -> dict[str, Any]:
    span, usage = step.span, step.reply.usage
    return {
        "index": step.index,
        "outcome": step.outcome,
        "cut": step.cut,
        "edited": step.reply.edited is not None,
        "finish": step.reply.finish_reason,
        "seconds": step.reply.seconds,
        "tokens": [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens],
        "span": [span.start, span.end, span.tokens] if span else None,
        "sources": [[source.document_id, source.start, source.end] for source in span.sources] if span else [],
        "diff": list(difference(step.memory_before, step.memory)),
        "reply": step.reply.text if step.outcome == "kept" else None,
    }


def origins(reading: Reading) -> Iterator[tuple[str, int]]:
    """The sentences of the final memory, each with the step since which it has stood there."""
    memories = [(step.index, _plain(step.memory)) for step in reading.steps if step.phase == "memory"]
    for sentence in filter(str.strip, _SENTENCE.findall(reading.memory)):
        found = None
        for index, memory in reversed(memories):
            if _plain(sentence) not in memory:
                break
            found = index
        if found is not None:
            yield sentence.strip(), found


_SENTENCE = re.compile(r"[^.!?。！？\n]+(?:[.!?。！？]+|\n|$)")


def _plain(text: str) -> str:
    return " ".join(text.split())


def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _template() -> Template:
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(_part("page.html"))

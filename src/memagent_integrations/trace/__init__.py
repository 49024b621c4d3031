"""Show a reading as a web page: every version of the memory, what changed in it, and where it came from.

The page is a single file that needs no network. Text from a document or a model is never treated as markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from memagent_integrations import files
from memagent_integrations.changes import difference
from memagent_integrations.records import Reading, Step, Usage


def page(reading: Reading) -> str:
    """Return the page as HTML."""
    return build_page(reading.question, data=escaped_json(data(reading)))


def build_page(
    title: str, *, template: str = '{% extends "page.html" %}', script: str = "", style: str = "", **values: Any
) -> str:
    """Return a page that shows readings, as HTML.

    `template` is the text of a Jinja template that extends `page.html`; it gets `values`: `data` is the reading that
    the page holds, `served` whether it may fetch from the server that it came from. `script` may use the functions of
    `page.js`.
    """
    script, style = _resource("page.js") + script, _resource("page.css") + style
    values |= {"title": title, "script": script, "style": style}
    return _template(template).render(script_hash=_hash(script), style_hash=_hash(style), **values)


def escaped_json(value: Any) -> str:
    """Return the value as JSON that no text in it can lead out of a script element."""
    return json.dumps(value).replace("<", "\\u003c")


def save_trace(reading: Reading, path: str | Path) -> None:
    """Write a reading as one HTML file, which shows every version of the memory, what changed, and where it came from.

    Raises:
        UsageError: the file cannot be written.
    """
    files.write(path, page(reading))


def data(reading: Reading, *, start: int = 0) -> dict[str, Any]:
    """Return what the page shows of a reading, ready for JSON; of its steps, those from number `start` on."""
    return {
        "question": reading.question,
        "answer": reading.answer,
        "error": str(reading.error) if reading.error else None,
        "warnings": list(reading.warnings),
        "model": reading.model,
        "seconds": reading.seconds,
        "tokens": _token_counts(reading.usage),
        "steps": [_compared(step) for step in reading.steps[start:] if step.phase == "memory"],
        "statements": [{"text": text, "places": places} for text, places in _places(reading).items()],
    }


def _places(reading: Reading) -> dict[str, list[list[Any]]]:
    """Return the statements of the final memory, each with its places: step, document, page, start and end."""
    places: dict[str, list[list[Any]]] = {text: [] for text in reading.origins}
    for place in reading.citations:
        if place.statement in places:  # not of an answer that was looked up
            places[place.statement].append([place.step, place.document_id, place.page, place.start, place.end])
    return places


def _compared(step: Step) -> dict[str, Any]:
    return step_data(step) | {"diff": list(difference(step.memory_before, step.memory))}


def step_data(step: Step) -> dict[str, Any]:
    """Return what the page shows of a step besides its memory, ready for JSON."""
    span = step.span
    return {
        "index": step.index,
        "outcome": step.outcome,
        "cut": step.cut,
        "edited": step.reply.edited is not None,
        "finish": step.reply.finish_reason,
        "seconds": step.reply.seconds,
        "tokens": _token_counts(step.reply.usage),
        "span": [span.start, span.end, span.tokens] if span else None,
        "sources": [[each.document_id, each.page, each.start, each.end] for each in span.sources] if span else [],
        "reply": step.reply.text if step.outcome == "kept" else None,
    }


def _token_counts(usage: Usage) -> list[int | None]:
    return [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]


def _resource(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _template(text: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=FunctionLoader(_resource))
    return environment.from_string(text)

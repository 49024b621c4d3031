"""The settings of a run, as a journal records them; what a journal holds may have been written by anybody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter

from memagent_integrations.errors import UsageError
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets

_REQUIRED = {"question": str, "model": str, "backend": dict, "budgets": dict, "prompts": dict}
_OPTIONAL: dict[str, type] = {"answer_model": str, "answer_backend": dict, "output": dict, "memory": str}
_OPTIONAL |= {"lookup": int, "segments": int, "reread": int}
_PROMPTS = TypeAdapter(PromptSet)


def settings_of(
    question: str,
    model: str,
    identity: Mapping[str, Any],
    budgets: Budgets,
    prompts: PromptSet,
    *,
    memory: str = "",
    answer: tuple[str, Mapping[str, Any]] | None = None,
    schema: Mapping[str, Any] | None = None,
    lookup: int = 0,
    segments: int = 0,
    reread: int = 0,
) -> dict[str, Any]:
    """Return the settings that distinguish readings of one document.

    `memory` is the one that they start from, `answer` the name and the identity of another model that answers,
    `schema` the JSON Schema of the answer, `lookup` the number of passages that are looked up for it, `segments`
    how many are read side by side, `reread` how often the document may be read once more. What is not used has no key,
    as in runs that were recorded before it was there.
    """
    settings = {
        "question": question,
        "model": model,
        "backend": dict(identity),
        "budgets": asdict(budgets),
        "prompts": asdict(prompts),
    }
    if answer:
        settings |= {"answer_model": answer[0], "answer_backend": dict(answer[1])}
    used: dict[str, Any] = {"output": schema and dict(schema), "memory": memory}
    used |= {"lookup": lookup, "segments": segments, "reread": reread}
    return settings | {name: value for name, value in used.items() if value}


def settings_from_json(text: str) -> dict[str, Any]:
    """Return recorded settings, after checking that they have the form of `settings_of`.

    Raises:
        ValueError: they do not; the message says where.
    """
    try:
        settings = json.loads(text)
        _check(settings)
    except (UsageError, RecursionError) as error:
        raise ValueError(str(error)) from error
    checked: dict[str, Any] = settings
    return checked


def files_from_json(text: str) -> tuple[str, ...]:
    """Return the recorded names of a document's files.

    Raises:
        ValueError: they are not a list of texts.
    """
    try:
        names = json.loads(text)
    except RecursionError as error:
        raise ValueError("the files of a run are no list of names") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("the files of a run are no list of names")
    return tuple(names)


def _check(settings: Any) -> None:
    if not isinstance(settings, dict):
        raise ValueError("the settings of a run are no object")
    known = _REQUIRED | _OPTIONAL
    for name in [*_REQUIRED, *settings]:
        if name not in known:
            raise ValueError(f"the settings of a run have {name!r}, which no run has")
        if not isinstance(settings.get(name), known[name]):
            raise ValueError(f"the settings of a run have no {known[name].__name__} as {name!r}")
    if ("answer_model" in settings) != ("answer_backend" in settings):
        raise ValueError("the settings of a run have a part of the model that answers")
    for name, record in (("budgets", Budgets), ("prompts", PromptSet)):
        if unknown := settings[name].keys() - {field.name for field in fields(record)}:
            raise ValueError(f"the {name} of a run have {min(unknown)!r}, which they cannot have")
    Budgets(**settings["budgets"])
    _PROMPTS.validate_python(settings["prompts"])

"""Saved readings that somebody else made: records of this package or an error, and nothing else happens."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.fuzz import one_in
from helpers.hostile import CANARY, corrupted, watched
from hypothesis import given

from memagent_integrations import BackendError, MemAgentError, Reader, Reading, ScriptedBackend, UsageError
from memagent_integrations.trace import save_trace

READING = json.loads(Reader(ScriptedBackend(["m", "a"])).read("Who?", "The key is 7.").to_json())
FAILED = READING | {"answer": None}
NAMES = ("error", "type", "passages", "steps")


def failed(kind: Any, message: Any = "no", **more: Any) -> dict[str, Any]:
    return FAILED | {"error": {"type": kind, "message": message, "retryable": False} | more}


@pytest.mark.parametrize(
    "saved",
    [
        *(failed(kind) for kind in ("Path", "metadata", "quote", "annotations", "_unpickle", "TYPE_CHECKING", "json")),
        *(FAILED | {"error": error} for error in ("BackendError", 7, [], [["type", "UsageError"]], {})),
        failed("BackendError") | {"answer": "both"},
        FAILED,
        READING | {"steps": [{"index": 0}]},
        READING | {"budgets": {"chunk_tokens": -1}},
        READING | {"budgets": CANARY},
        READING["steps"],
        None,
    ],
    ids=str,
)
def test_a_saved_reading_does_no_harm(saved: Any) -> None:
    with watched() as deeds, pytest.raises(UsageError):
        Reading.from_json(json.dumps(saved))
    assert deeds == []


def test_a_saved_reading_without_end() -> None:
    for text in ("[" * 10**6, '{"a":' * 10**5, "9" * 10**5, "", b"\xff\xfe", '{"question": "\\ud800"}'):
        with pytest.raises(UsageError):
            Reading.from_json(text)


def test_an_error_is_one_of_this_package() -> None:
    error = Reading.from_json(json.dumps(failed("BackendError", "the server went away"))).error
    assert (type(error), str(error)) == (BackendError, "the server went away")
    assert type(Reading.from_json(json.dumps(failed("system"))).error) is MemAgentError


@pytest.mark.fuzz
@one_in(2)
@given(saved=corrupted(READING, NAMES), broken=corrupted(failed("BackendError"), NAMES))
def test_whatever_is_in_a_saved_reading(saved: Any, broken: Any, tmp_path: Path) -> None:
    with watched() as deeds:
        for value in (saved, broken):
            with suppress(MemAgentError):
                reading = Reading.from_json(json.dumps(value))
                save_trace(reading, tmp_path / "page.html")
                assert Reading.from_json(reading.to_json()).steps == reading.steps
    assert deeds == []

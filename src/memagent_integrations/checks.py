"""Check the settings that callers pass before anything is loaded: C code that gets a bad number crashes the process."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from memagent_integrations.errors import QuestionError, UsageError

MOST = 2**31 - 1
"""The largest number that every tokenizer and server accepts."""

_T = TypeVar("_T")


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", f"has to be a number, not {value}")
    return value


Number = Annotated[_T, BeforeValidator(_no_bool)]
"""A number in what pydantic validates, which would take True for 1: `Number[int]`, `Number[int | None]`."""

_OTHER_NAMES = {  # what other libraries call our settings
    "chunk_size": "chunk_tokens",
    "max_tokens": "output_tokens",
    "context_window": "window",
}


def check_int(least: int = 1, most: int = MOST, **settings: int) -> None:
    """Check that every setting is a whole number from `least` to `most`.

    Raises:
        UsageError: a setting is not.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bound = f" and at most {most}" if isinstance(value, int) and value > most else ""
            raise UsageError(f"{name} has to be a whole number of at least {least}{bound}, not {_short_repr(value)}")


def check_number(least: float = 0, most: float = math.inf, **settings: float) -> None:
    """Check that every setting is a finite number from `least` to `most`.

    Raises:
        UsageError: a setting is not.
    """
    for name, value in settings.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not is_number or not least <= value <= most:
            bound = "" if most == math.inf else f" and at most {most}"
            raise UsageError(f"{name} has to be a number of at least {least}{bound}, not {_short_repr(value)}")


def check_question(question: Any) -> None:
    """Check that a question is a text that is not empty.

    Raises:
        QuestionError: it is not.
    """
    if question and not isinstance(question, str):
        raise QuestionError(f"the question has to be a str, not {type(question).__name__}")
    if not question or not question.strip():
        raise QuestionError("the question is empty")


def check_names(names: Iterable[str], known: Collection[str]) -> None:
    """Check that every name is a known setting.

    Raises:
        UsageError: a name is not; the message suggests the setting that was probably meant.
    """
    for name in names:
        if name not in known:
            suggestions = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else get_close_matches(name, known, 1)
            hint = f"did you mean {suggestions[0]}?" if suggestions else f"there are: {', '.join(known)}"
            raise UsageError(f"there is no setting {name!r}; {hint}")


def drop_none(**values: Any) -> dict[str, Any]:
    """Return the values that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}


def _short_repr(value: Any) -> str:
    return "such a large number" if isinstance(value, int) and abs(value) > 10**30 else repr(value)

"""Checks of the numbers that callers set. They come before anything is loaded: C code that gets a bad one ends the process."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

from memagent_integrations.errors import UsageError

MOST = 2**31 - 1
"""The largest number that a tokenizer or a server is sure to take."""


_MEANT = {
    "chunk_size": ["chunk_tokens"],
    "max_tokens": ["output_tokens"],
    "context_window": ["window"],
}  # as others name it


def check_int(least: int = 1, most: int = MOST, **settings: int) -> None:
    """See that settings are whole numbers from `least` to `most`.

    Raises:
        UsageError: one of them is not.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bound = f" and at most {most}" if isinstance(value, int) and value > most else ""
            raise UsageError(f"{name} has to be a whole number of at least {least}{bound}, not {_shown(value)}")


def check_number(least: float = 0, most: float = math.inf, **settings: float) -> None:
    """See that settings are finite numbers from `least` to `most`.

    Raises:
        UsageError: one of them is not.
    """
    for name, value in settings.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not least <= value <= most
        ):
            bound = "" if most == math.inf else f" and at most {most}"
            raise UsageError(f"{name} has to be a number of at least {least}{bound}, not {_shown(value)}")


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """See that settings are some that there are.

    Raises:
        UsageError: one is not; the message names the one that was meant, if it can be told.
    """
    for name in given:
        if name not in known:
            meant = _MEANT.get(name) or get_close_matches(name, known, 1)
            hint = f"did you mean {meant[0]}?" if meant else f"there are: {', '.join(known)}"
            raise UsageError(f"there is no setting {name!r}; {hint}")


def drop_none(**values: Any) -> dict[str, Any]:
    """The values that are not None, by name."""
    return {name: value for name, value in values.items() if value is not None}


def _shown(value: Any) -> str:
    return "such a large number" if isinstance(value, int) and abs(value) > 10**30 else repr(value)

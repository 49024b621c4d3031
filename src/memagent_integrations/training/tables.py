"""A record in a TOML file, and everything that can be wrong with one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from memagent_integrations.errors import UsageError
from memagent_integrations.files import reason

Record = TypeVar("Record")


def load(path: str | Path, adapter: TypeAdapter[Record], what: str, beside: Sequence[str] = ()) -> Record:
    """The record in a file. The values of the keys `beside` are paths beside the file.

    Raises:
        UsageError: the file cannot be read, or is no `what`.
    """
    try:
        with Path(path).open("rb") as file:
            told = tomllib.load(file)
        for name in beside:
            if isinstance(told.get(name), str):
                told[name] = str(Path(path).parent / told[name])
        return adapter.validate_json(json.dumps(told, default=str))  # in JSON a list may stand for a tuple
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {reason(error)}") from error
    except ValidationError as error:
        raise UsageError(f"{path} is no {what}: {first(error)}") from error
    except (
        ValueError,
        UsageError,
        RecursionError,
    ) as error:  # not TOML, not UTF-8, a path with a NUL in it; or what the records say of their values
        raise UsageError(f"{path} is no {what}: {error}") from error


def first(error: ValidationError) -> str:
    """The first thing that does not fit, and where it stands."""
    found = error.errors()[0]
    place = [str(part + 1) if isinstance(part, int) else str(part) for part in found["loc"]]
    if found["type"] == "unexpected_keyword_argument":
        return f"there is no key {place[-1]!r}" + (f" in {' '.join(place[:-1])}" if place[1:] else "")
    return f"{' '.join(place)}: {found['msg']}"

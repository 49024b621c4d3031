"""Load a record from a TOML file, with errors that name the key."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from memagent_integrations import files
from memagent_integrations.errors import UsageError

Record = TypeVar("Record")


def load(path: str | Path, adapter: TypeAdapter[Record], what: str, beside: Sequence[str] = ()) -> Record:
    """Return the record in a file. The values of the keys in `beside` are paths relative to the file.

    Raises:
        UsageError: the file cannot be read, or is no `what`.
    """
    content = files.read_bytes(path)
    try:
        table = tomllib.loads(content.decode())
        for key in beside:
            if isinstance(table.get(key), str):
                table[key] = str(Path(path).parent / table[key])
        return adapter.validate_json(json.dumps(table, default=str))  # JSON, so that a list can become a tuple
    except ValidationError as error:
        raise UsageError(f"{path} is no {what}: {files.first_error(error)}") from error
    except (ValueError, UsageError, RecursionError) as error:  # no TOML, no UTF-8, or a check of the record failed
        raise UsageError(f"{path} is no {what}: {error}") from error

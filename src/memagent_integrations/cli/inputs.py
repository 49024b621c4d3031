"""The files of a command as a document."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memagent_integrations.cli.streams import STDIN, stdin_text
from memagent_integrations.errors import UsageError


def check(files: Sequence[str], *, twice: bool) -> None:
    """Check that the files can be read, before a model is loaded; with `twice`, again after that.

    Raises:
        UsageError: a file cannot be read, or standard input would be read a second time.
    """
    if files.count(STDIN) > 1 or (twice and STDIN in files):
        raise UsageError("standard input can be read once only" + ("; a plan needs a file" if twice else ""))
    for file in files:
        if file != STDIN and (not Path(file).exists() or Path(file).is_dir()):
            problem = "it is a directory" if Path(file).is_dir() else "there is no such file"
            raise UsageError(f"cannot read {file}: {problem}")
    if STDIN in files and sys.stdin is None:
        raise UsageError("standard input is closed")


def rereadable(files: Sequence[str]) -> bool:
    """Return whether the files can be read more than once: a pipe cannot."""
    return all(file != STDIN and Path(file).is_file() for file in files)


def document(files: Sequence[str]) -> Any:
    """Return the files as a document; several files are several documents."""
    parts = [stdin_text() if file == STDIN else Path(file) for file in files]
    return parts[0] if len(parts) == 1 else parts

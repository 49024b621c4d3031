"""Run files of published code, from a checkout, without the packages that they import and do not need here."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Replace packages by ones whose attributes are all the same object, which does nothing."""

    class Nothing(ModuleType):
        def __init__(self, name: str, *_: Any, **__: Any) -> None:  # also as the base of a class
            super().__init__(name)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Nothing(name)

        def __call__(self, *_: Any, **__: Any) -> Any:
            return self

        __or__ = __ror__ = __call__

    kept = dict(sys.modules)
    sys.modules.update({name: Nothing(name) for name in names})
    try:
        yield
    finally:
        for name in set(sys.modules) - set(kept):
            del sys.modules[name]
        sys.modules.update(kept)


def module(path: Path) -> ModuleType:
    """Run a file of the published code as a module."""
    spec = importlib.util.spec_from_file_location(f"reference_{path.stem}", path)
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def revision(folder: Path) -> str | None:
    """Return the commit of a checkout; None if it is none."""
    done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None

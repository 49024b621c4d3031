"""A journal in the browser: follow a run while it is read, pause it, edit its memory, continue from any step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memagent_integrations.serve.app import Server, application

__all__ = ["Server", "application"]


if not TYPE_CHECKING:  # with a `__getattr__` mypy would accept any name

    def __getattr__(name: str) -> Any:
        """Import the application when it is first used: it needs starlette and uvicorn."""
        if name in __all__:
            return getattr(importlib.import_module(f"{__name__}.app"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

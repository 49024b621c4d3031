"""A backend around another one."""

from __future__ import annotations

from typing import Any

from memagent_integrations.backends.base import Backend


class BackendAround(Backend):
    """A backend that makes its calls by another one, and tells of itself what that one tells."""

    _backend: Backend

    def _stand_for(self, backend: Backend) -> None:
        """Take the settings of a backend, and pass on what it is asked for later."""
        self._backend = backend
        self.batch_size, self.concurrency = backend.batch_size, backend.concurrency
        self.max_retries, self.template_tokens = backend.max_retries, backend.template_tokens
        self.takes_any_length = backend.takes_any_length

    @property
    def name(self) -> str:  # type: ignore[override]
        """The backend's name."""
        return self._backend.name

    @property
    def structured(self) -> bool:  # type: ignore[override]
        """Whether the backend keeps to a schema."""
        return self._backend.structured

    @property
    def identity(self) -> dict[str, Any]:
        """The backend's identity: a run that was recorded without what is around it is the same."""
        return self._backend.identity

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """The backend's window."""
        return self._backend.window

    def count(self, text: str) -> int:
        """Return the number of tokens in `text`."""
        return self._backend.count(text)

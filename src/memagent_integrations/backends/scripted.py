"""A backend without a model: it answers from a script. For tests, docs and dry runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterable

from memagent_integrations.backends.base import Backend
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import BackendError, MemAgentError, UsageError
from memagent_integrations.records import Prompt, Reply, Usage

Line = str | Reply | MemAgentError

_TOKEN = re.compile(r" ?\w+|[^\w]", re.DOTALL)


class ScriptedBackend(Backend):
    """Replies with the lines of `script` one after the other, or with what `script(prompt)` returns; raises its errors.

    `prompts` is the history: every prompt it received, with the `schema` of its reply; whether a reply fits it is up to
    the script. With `structured=False` it is a backend that takes no schema. Its tokens are words with the space before
    them, single signs, and single spaces, so that they can be counted by hand. A reply longer than `prompt.max_tokens`
    is cut, as a real model's would be.

    >>> backend = ScriptedBackend(["The key is 7.", "7"])

    Raises:
        UsageError: a setting is wrong, or the script is a single text.
    """

    name = "scripted"
    takes_any_length = True

    def __init__(
        self,
        script: Iterable[Line] | Callable[[Prompt], Line],
        *,
        window: int | None = None,
        batch_size: int = 1,
        concurrency: int = 4,
        structured: bool = True,
    ) -> None:
        check_int(batch_size=batch_size, concurrency=concurrency, **drop_none(window=window))
        if isinstance(script, str):
            raise UsageError(
                "script has to be a list of replies or a function, not a str, whose letters would be replies"
            )
        self._script = script if callable(script) else None
        self._lines = iter(()) if callable(script) else iter(script)
        self._lock = threading.Lock()
        self.prompts: list[Prompt] = []
        self.window = window
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.structured = structured

    def count(self, text: str) -> int:
        """Return the number of tokens, as this backend splits text."""
        return sum(1 for _ in _TOKEN.finditer(text))

    def complete(self, prompt: Prompt) -> Reply:
        """Return the next line of the script as a reply."""
        with self._lock:  # two threads must not advance the same generator at once
            self.prompts.append(prompt)
            line = None if self._script else next(self._lines, None)
        line = self._script(prompt) if self._script else line
        if line is None:
            raise BackendError(f"the script ended before call {len(self.prompts)}")
        if isinstance(line, MemAgentError):
            raise line
        return line if isinstance(line, Reply) else self._reply(prompt, line)

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the next line token by token, and the reply last."""
        reply = self.complete(prompt)
        yield from _TOKEN.findall(reply.text)
        yield reply

    def _reply(self, prompt: Prompt, text: str) -> Reply:
        tokens = _TOKEN.findall(text)
        written = tokens[: prompt.max_tokens]
        usage = Usage(
            prompt_tokens=sum(self.count(message.content) for message in prompt.messages),
            completion_tokens=len(written),
            cached_tokens=0,
        )
        reason = "stop" if len(written) == len(tokens) else "length"
        return Reply(text="".join(written), usage=usage, finish_reason=reason)

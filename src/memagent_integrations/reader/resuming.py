"""The arguments of a reader from a run of a journal: what a run may set by itself, and what the caller has to confirm.

A journal may come from anywhere, and a model's options load code, name files and say where texts and keys are sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memagent_integrations import ownership, policies
from memagent_integrations.backends import KINDS, embedded, load_backend
from memagent_integrations.checks import check_number, drop_none
from memagent_integrations.errors import JournalError, UsageError
from memagent_integrations.journal import Journal

_NUMBERS = ("temperature", "top_p", "seed")
_CONFIRMED = ("adapter", "base_url", "tokenizer")
"""Options that name a file, an address, or what is fetched."""
_IGNORED = ("extra_body", "file")
"""Of the first a run has only a digest, and the second is that which the model's name means."""
_DEFAULT_ADDRESS = "https://api.openai.com/v1"


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller says of one of a run's models: its name, and options of its backend."""

    model: str | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """What a run says of one of its models. `part` is "" or "answer_", the beginning of its arguments' names."""

    run: str
    model: str
    backend: Mapping[str, Any]
    own: bool
    part: str = ""

    def arguments(self, given: Given) -> tuple[str, dict[str, Any]]:
        """Return the model's name and the options of its backend.

        Raises:
            UsageError: the model was not given by a name; or the run is not the caller's own, and it names what has to
                be confirmed.
            JournalError: it has settings that no run has.
        """
        if self.model not in embedded.EMBEDDED and self.model.partition(":")[0] not in KINDS:
            raise UsageError(
                f"the run {self.run} was begun with {self.model}, a model that was made in Python; go on there: "
                f"give a Reader with that model the journal, and read with run={self.run!r}"
            )
        recorded = drop_none(**self._checked())
        model, options = given.model or self.model, dict(given.options or {})
        if policies.names_policy(model):  # which brings its own
            recorded.pop("adapter", None)
        if not self.own:
            self._check_confirmed(given, recorded.keys() - options.keys(), recorded)
        return model, recorded | options

    def _checked(self) -> dict[str, Any]:
        """Return the recorded options of the backend that a reader is made with."""
        options = {name: value for name, value in self.backend.items() if name not in _IGNORED}
        try:
            for name, value in drop_none(**options).items():
                if name in _NUMBERS:
                    check_number(least=-math.inf, **{name: value})
                elif name not in _CONFIRMED or not isinstance(value, str):
                    raise UsageError(f"{name} is {_shown(value)}, and no run records such an option of a backend")
        except UsageError as error:
            raise JournalError(
                f"the run {self.run} cannot be resumed from its journal: {error}. If you want it, read with a Reader "
                f"of your own settings (Reader(...), memagent read)"
            ) from error
        return options

    def _check_confirmed(self, given: Given, names: set[str], recorded: Mapping[str, Any]) -> None:
        """Check that the caller has named what the run names and might do harm."""
        missing = [name for name in _CONFIRMED if name in names and not _is_harmless(name, recorded[name])]
        python = [f"{self.part or 'backend_'}options={{{name!r}: {_shown(recorded[name])}}}" for name in missing]
        options = [f"--{self.part.replace('_', '-')}{name.replace('_', '-')}" for name in missing if name != "adapter"]
        if not given.model and not _is_harmless_model(self.model):
            python.insert(0, f"{self.part}model={_shown(self.model)}")
            options.insert(0, f"--{self.part.replace('_', '-')}model")
        if python:
            raise UsageError(
                f"of the run {self.run} {ownership.unknown()}, and it names what might do harm. If you want "
                f"these, give them again: Reader.from_run(..., {', '.join(python)})"
                + (f"; memagent runs resume {' '.join(options)}" if options else "")
                + ("; an adapter as --model policy:DIR" if "adapter" in missing else "")
            )


def arguments_of_run(journal: Journal, run: str, given: Given, given_answer: Given) -> dict[str, Any]:
    """Return the arguments of `Reader` with which a run was begun; what is given overrides what the journal has of it.

    Raises:
        UsageError: there is no such run, one of its models was not given by a name, or it names what has to be
            confirmed.
        JournalError: it has settings that no run has.
    """
    settings, own = journal.settings(run), journal.run(run).own
    recorded = _Recorded(run=run, model=settings["model"], backend=settings["backend"], own=own)
    model, options = recorded.arguments(given)
    arguments = {
        "model": model,
        "backend_options": options,
        "output": settings.get("output"),
        "prompts": journal.prompts(run),
        "lookup": settings.get("lookup", 0),
        "strategy": "parallel" if "segments" in settings else "sequential",
        "segments": settings.get("segments"),
        "reread": settings.get("reread", 0),
        **settings["budgets"],
    }
    if "answer_model" not in settings:
        return arguments | {"answer_model": given_answer.model, "answer_options": given_answer.options}
    recorded = _Recorded(
        run=run, model=settings["answer_model"], backend=settings["answer_backend"], own=own, part="answer_"
    )
    answer_model, options = recorded.arguments(given_answer)
    # a backend of its own, even if nothing distinguishes it from the other
    return arguments | {"answer_model": load_backend(answer_model, **options), "answer_options": None}


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether an option is what it would be if nothing was said."""
    if name == "base_url":
        return str(value).rstrip("/") == (os.environ.get("OPENAI_BASE_URL") or _DEFAULT_ADDRESS).rstrip("/")
    return name == "tokenizer" and value == "approximate"


def _is_harmless_model(name: str) -> bool:
    """Return whether a name is one of a server's models, or of an embedded one that is here."""
    return embedded.pulled(name) if name in embedded.EMBEDDED else name.startswith("openai:")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

"""Make the compared readers by name; all use the same model and the same window."""

from __future__ import annotations

import importlib
from dataclasses import replace

from memagent_integrations.backends import Backend
from memagent_integrations.calls import Calls, Limits
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import MemAgentError, MissingExtra, UsageError
from memagent_integrations.evaluation.baselines.base import Baseline, Contestant, Outcome
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader.model import Model
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Budgets

__all__ = ["NAMES", "Contestant", "Outcome", "make"]

_KINDS = {  # kind -> module, class, package to install
    "memagent": ("memagent", "MemAgent", None),
    "cut": ("cut", "Cut", None),
    "whole": ("whole", "Whole", None),
    "oracle": ("oracle", "Oracle", None),
    "bm25": ("bm25", "BM25", "bm25s"),
    "embedding": ("embedding", "Embedding", None),
    "refine": ("llama_index", "Refine", "llama-index-core"),
    "compact": ("llama_index", "CompactAndRefine", "llama-index-core"),
    "accumulate": ("llama_index", "Accumulate", "llama-index-core"),
    "tree-summarize": ("llama_index", "TreeSummarize", "llama-index-core"),
    "langgraph-map-reduce": ("langgraph", "MapReduce", "langgraph"),
    "langchain-refine": ("langchain", "Refine", "langchain-classic"),
    "langchain-map-reduce": ("langchain", "MapReduce", "langchain-classic"),
}
_MEMAGENT = ("memory-first", "section-shared", "no-change", "parallel", "reread")
_OPTIONS = {  # kind -> the names that it has with options
    "memagent": ("memagent", *(f"memagent:{name}" for name in _MEMAGENT)),
    "bm25": ("bm25:K",),
    "embedding": ("embedding:K",),
}
NAMES = tuple(name for kind in _KINDS for name in _OPTIONS.get(kind, (kind,)))
"""The names that `make` accepts. K is a number of passages, 5 where it is left out; commas separate memagent's options.
"""


def make(
    spec: str,
    backend: Backend,
    budgets: Budgets | None = None,
    window: int | None = None,
    prompts: PromptSet | None = None,
) -> Contestant:
    """Return the reader that a name stands for. Several threads may use it at the same time.

    Every reader keeps to `window` (default: the backend's, else 8,192) and to the output tokens of an answer in
    `budgets`; `whole` alone takes the backend's own window, where it has one. Only MemAgent uses the other budgets and
    the `prompts`; the other readers fill the window.

    Raises:
        UsageError: the name or an option is unknown, or the budgets do not fit the window.
        MissingExtra: the reader's package is not installed.
    """
    check_int(**drop_none(window=window))
    kind, _, options = spec.partition(":")
    if kind not in _KINDS:
        raise UsageError(f"unknown reader {spec!r}; use one of {', '.join(NAMES)}")
    module, name, package = _KINDS[kind]
    try:
        cls: type[Baseline] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except MemAgentError:
        raise
    except ImportError as error:
        raise MissingExtra.extra(package or str(error.name), "eval") from error
    model = Model(backend=backend, calls=Calls(Limits()), window=window)
    setup = Setup(
        model=replace(model, window=model.resolve_window()),  # one query, not one for every sample
        prompts=prompts or PromptSet.default(),
        budgets=budgets or Budgets(),
    )
    return cls(spec, options, setup)

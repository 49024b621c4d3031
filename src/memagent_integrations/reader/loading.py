"""The setup of a reader from the arguments of `Reader`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memagent_integrations import policies
from memagent_integrations.backends import Backend, embedded, load_backend
from memagent_integrations.calls import Calls, Limits
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.outputs import Output
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader.model import Model
from memagent_integrations.reader.setup import Setup
from memagent_integrations.records import Budgets, Layout, OnLostSection, Strategy

TWO_LAYOUTS = "pass prompts or layout, not both: a prompt set, like that of a policy, has its own layout"


def load_setup(
    model: str | Backend,
    *,
    prompts: PromptSet | None,
    layout: Layout | None,
    window: int | None,
    limits: Limits | None,
    backend_options: Mapping[str, Any] | None,
    answer_model: str | Backend | None = None,
    answer_options: Mapping[str, Any] | None = None,
    output: type[Any] | Mapping[str, Any] | None = None,
    on_lost_section: OnLostSection = "error",
    lookup: int = 0,
    strategy: Strategy = "sequential",
    segments: int | None = None,
    reread: int = 0,
    **budgets: int | None,
) -> Setup:
    """Return the setup for the arguments of `Reader`, with the prompts and budgets that a policy or a model brings.

    Raises:
        UsageError: a setting is wrong, or the model's name is unknown.
        MissingExtra: the model's package is not installed.
    """
    _check_model(model, backend_options, "model", "backend_options")
    _check_answer_model(answer_model, answer_options)
    if not isinstance(limits, Limits | None):
        raise UsageError(f"limits has to be a Limits, not {limits!r}")
    if not isinstance(prompts, PromptSet | None):
        raise UsageError(f"prompts has to be a PromptSet, not {type(prompts).__name__}")
    check_int(**drop_none(window=window))
    defaults = Budgets()
    if isinstance(model, str) and policies.names_policy(model):
        policy = policies.load_named(model, base=(backend_options or {}).get("model"))
        prompts, defaults = prompts or policy.prompts, policy.budgets
    elif isinstance(model, str) and model in embedded.EMBEDDED:
        defaults = embedded.EMBEDDED[model].budgets
    if prompts and layout:
        raise UsageError(TWO_LAYOUTS)
    limits = limits or Limits()
    setup = Setup(
        budgets=replace(defaults, **drop_none(**budgets)),
        prompts=prompts or PromptSet.default(layout=layout or "section-first"),
        model=Model(backend=_loaded(model, backend_options), calls=Calls(limits), window=window),
        on_lost_section=on_lost_section,
        lookup=lookup,
        strategy=strategy,
        segments=segments,
        reread=reread,
    )
    same_options = not answer_options or answer_options == backend_options
    if answer_model is not None and not (answer_model == model and same_options):
        answering = Model(backend=_loaded(answer_model, answer_options), calls=Calls(limits))
        setup = replace(setup, answer_model=answering)
    return replace(setup, output=None if output is None else Output(output))


def _loaded(model: str | Backend, options: Mapping[str, Any] | None) -> Backend:
    return model if isinstance(model, Backend) else load_backend(model, **(options or {}))


def _check_model(model: Any, options: Mapping[str, Any] | None, name: str, name_of_options: str) -> None:
    if not isinstance(model, (str, Backend)):
        raise UsageError(
            f"{name} has to be a name or a Backend, not {type(model).__name__}; for LangChain and LlamaIndex models "
            "use memagent_integrations.langchain and memagent_integrations.llama_index"
        )
    if options and isinstance(model, Backend):
        raise UsageError(f"{name_of_options} are for a model given by name; this backend has been made already")


def _check_answer_model(model: str | Backend | None, options: Mapping[str, Any] | None) -> None:
    if model is not None:
        _check_model(model, options, "answer_model", "answer_options")
    elif options:
        raise UsageError("answer_options are for an answer_model given by name; there is none")
    if policies.names_policy(model):
        raise UsageError(
            "answer_model cannot be a policy, which has prompts of its own; pass the policy as model, "
            "or name the model that it was trained from"
        )

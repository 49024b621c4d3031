"""The settings of the runnable: what they may be, how they are saved, and the `Reader` that they make."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import AIMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import ensure_config
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, PrivateAttr, ValidationError, model_validator

from memagent_integrations import files, policies
from memagent_integrations.backends import KINDS, Backend, ScriptedBackend
from memagent_integrations.backends.gate import Gate
from memagent_integrations.calls import Limits
from memagent_integrations.checks import Number, check_names, drop_none
from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.journal import Journal
from memagent_integrations.langchain.backend import ChatModelBackend
from memagent_integrations.langchain.inputs import ReaderInput, elided_input
from memagent_integrations.langchain.lazy import Lazy
from memagent_integrations.langchain.models import resolved
from memagent_integrations.langchain.runs import BackendInRuns
from memagent_integrations.langchain.templates import template_of
from memagent_integrations.langchain.traces import data_without_text, quiet_callbacks, quiet_model, without_text
from memagent_integrations.outputs import Output
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.reader.sharing import SharedDocuments
from memagent_integrations.records import Budgets, Layout, OnLostSection, Strategy
from memagent_integrations.redaction import cause_without, saved, secrets_in, shown, without_secrets
from memagent_integrations.tokens import Counter

_SETTINGS = (
    *(field.name for field in fields(Budgets)),
    *("layout", "prompts", "window", "output", "on_lost_section", "lookup", "strategy", "segments", "reread"),
)
_OPTIONS = ("backend_options", "answer_options")
RUN = ConfigurableFieldSpec(
    id="memagent_run", annotation=str, name="Run", description="The name of the reading in the journal", default=None
)
"""The field of a config that names the reading in the journal."""
MEMORY = ConfigurableFieldSpec(
    id="memagent_memory", annotation=str, name="Memory", description="The name of a memory in the journal", default=None
)
"""The field of a config that names a memory in the journal, which the reading carries on."""


def _checked_model(model: Any, name: str = "model") -> Any:
    if not isinstance(model, (str, Backend, Runnable)):
        raise UsageError(f"{name} has to be a LangChain model, a Backend or a name, not {type(model).__name__}")
    return model


def _checked_answer_model(model: Any) -> Any:
    return None if model is None else _checked_model(model, "answer_model")


def _checked_journal(journal: Any) -> Journal | str | None:
    if not isinstance(journal, Journal | str | Path | None):
        raise UsageError(f"journal has to be a file or a Journal, not {type(journal).__name__}")
    if journal == "":
        raise UsageError("journal has to be the name of a file, and this one is empty")
    return str(journal) if isinstance(journal, Path) else journal


def _checked_output(output: Any) -> Any:
    if output is not None:
        Output(output)
    return output


def _checked_template(template: Any) -> Any:
    if not isinstance(template, (str, BasePromptTemplate, type(None))):
        raise UsageError(
            "update_prompt and answer_prompt have to be texts or prompt templates of LangChain, "
            f"not {type(template).__name__}"
        )
    return template


def _with_templates(prompts: Any) -> Any:
    """Return prompts that are given as a dict with each template of LangChain's in this package's form."""
    if not isinstance(prompts, Mapping):
        return prompts
    templates = {
        name: prompts[name] for name in ("update", "answer") if isinstance(prompts.get(name), BasePromptTemplate)
    }
    return {**prompts, **{name: template_of(template, f"prompts {name}") for name, template in templates.items()}}


class ReaderSettings(RunnableSerializable[ReaderInput, AIMessage]):
    """The settings of a `MemAgentReader`, which documents them."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)

    model: Annotated[LanguageModelLike | Backend | str, PlainValidator(_checked_model)]
    tokenizer: str | Counter | None = None
    limit_parameter: str | None = None
    chunk_tokens: Number[int | None] = None
    memory_tokens: Number[int | None] = None
    question_tokens: Number[int | None] = None
    output_tokens: Number[int | None] = None
    overlap_tokens: Number[int | None] = None
    layout: Layout | None = None
    prompts: Annotated[PromptSet | None, BeforeValidator(_with_templates)] = None
    update_prompt: Annotated[str | BasePromptTemplate[Any] | None, PlainValidator(_checked_template)] = None
    answer_prompt: Annotated[str | BasePromptTemplate[Any] | None, PlainValidator(_checked_template)] = None
    window: Number[int | None] = None
    journal: Annotated[Journal | str | None, PlainValidator(_checked_journal)] = None
    limits: Limits | None = None
    backend_options: dict[str, Any] | None = None
    answer_model: Annotated[LanguageModelLike | Backend | str | None, PlainValidator(_checked_answer_model)] = None
    answer_options: dict[str, Any] | None = None
    output: Annotated[type[Any] | dict[str, Any] | None, PlainValidator(_checked_output)] = None
    on_lost_section: OnLostSection = "error"
    lookup: Number[int] = 0
    strategy: Strategy = "sequential"
    segments: Number[int | None] = None
    reread: Number[int] = 0
    trace_inputs: Literal["elided", "full", "none"] = "elided"
    # a field, so that `configurable_fields` passes it on
    loaded: Lazy = Field(default_factory=Lazy, exclude=True, repr=False)
    _gate: Gate | None = PrivateAttr(default=None)
    _shared: SharedDocuments | None = PrivateAttr(default=None)

    def __init__(self, model: LanguageModelLike | Backend | str, **settings: Any) -> None:
        check_names(settings.keys() - {"loaded"}, self.names())
        try:
            super().__init__(model=model, **settings)  # type: ignore[call-arg]
        except ValidationError as error:
            raise UsageError(files.first_error(error)) from error

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the settings."""
        return [name for name in cls.model_fields if name != "loaded"]

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        self._check_options("model", "backend_options", self.model, self.backend_options)
        models = [model for model in (self.model, self.answer_model) if model is not None]
        for name in ("tokenizer", "limit_parameter"):
            if getattr(self, name) and all(isinstance(model, Backend) for model in models):
                raise UsageError(f"{name} is for a LangChain model or a model given by name; a backend has its own")
        self._check_options("answer_model", "answer_options", self.answer_model, self.answer_options)
        is_policy = policies.names_policy(self.model)
        # a policy's budgets are known once it is loaded
        known = {"prompts": self.prompts} if is_policy else self._settings
        self._templates(Reader(ScriptedBackend([]), **known).prompts)
        return self

    @staticmethod
    def _check_options(name: str, name_of_options: str, model: Any, options: Mapping[str, Any] | None) -> None:
        if options and not isinstance(model, str):
            raise UsageError(
                f"{name_of_options} are for a model that this package makes by its name; "
                f"give a LangChain model its own where {'it' if model else name} is made"
            )

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: `dumpd` gives a constructor. What `load` needs is in docs/langchain.md."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the namespace in which `load` finds the class: the package, whatever file it is in."""
        return ["memagent_integrations", "langchain"]

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Prompts and limits as dicts, the class of an answer as its schema (for JSON), options without keys."""
        attributes = {
            name: asdict(value) for name, value in (("prompts", self.prompts), ("limits", self.limits)) if value
        }
        options = {name: saved(getattr(self, name)) for name in _OPTIONS if getattr(self, name)}
        return attributes | options | ({} if self.output is None else {"output": Output(self.output).schema})

    def __repr_args__(self) -> Any:
        """Show the settings, without keys and passwords."""
        return [(name, shown(value) if name in _OPTIONS else value) for name, value in super().__repr_args__()]

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """The fields that a config can set: those of the models, and with a journal the names in it."""
        return get_unique_config_specs([*self._model_specs, *([RUN, MEMORY] if self.journal is not None else [])])

    @property
    def _model_specs(self) -> list[ConfigurableFieldSpec]:
        models = [model for model in (self.model, self.answer_model) if isinstance(model, Runnable)]
        return [spec for model in models for spec in model.config_specs]

    def variant(self, config: RunnableConfig) -> Hashable:
        """Return what decides, beside these settings, how a document is cut: what the config chooses of the models."""
        values = config.get("configurable", {})
        return tuple(repr(values.get(spec.id)) for spec in self._model_specs)

    def lent(self, context: Any, document: Any, config: RunnableConfig) -> AbstractContextManager[Any]:
        """Return the context in which to read the document, with those of a batch that have it too.

        What a retriever finds is read for its question alone.
        """
        if self._shared is None or isinstance(context, Runnable):
            return nullcontext(document)
        return self._shared.lent(document, self.variant(config))

    def under(self, config: RunnableConfig) -> Reader:
        """Return a `Reader` with these settings whose calls are children of the run of `config`.

        The models are loaded at the first call. Where a setting is None, the model's own prompts and budgets (a
        policy's) apply.
        """
        reader = self.loaded_reader()
        answering = reader.answer_backend if reader.answer_backend is not reader.backend else None
        reader = reader.changed(
            backend=self._in_runs(reader.backend, config),
            answer_backend=answering and self._in_runs(answering, config),
            **{name: value for name, value in self._settings.items() if name != "output"},
        )
        return reader.changed(prompts=self._templates(reader.prompts))

    def loaded_reader(self) -> Reader:
        """Return the `Reader` whose models are loaded: once, and anew if a setting of them changes."""
        key: tuple[Any, ...] = (
            self.model,
            self.tokenizer,
            self.limit_parameter,
            self.journal,
            self.limits,
            self.backend_options,
            self.answer_model,
            self.answer_options,
            self.output,
        )
        reader: Reader = self.loaded.get(key, self._load)
        return reader

    def _load(self) -> Reader:
        answering = None if self.answer_model is None else self._made(self.answer_model, self.answer_options)
        return Reader(
            self._made(self.model, self.backend_options),
            journal=self.journal,
            limits=self.limits,
            backend_options=self._options(self.model, self.backend_options),
            answer_model=answering,
            answer_options=self._options(self.answer_model, self.answer_options),
            output=self.output,
        )

    def _made(self, model: LanguageModelLike | Backend | str, options: Mapping[str, Any] | None) -> Backend | str:
        """Return the backend of a model; a name that `load_backend` knows stays a name."""
        if isinstance(model, str) and _is_langchains(model):
            model = _chat_model(model, options or {})
        if isinstance(model, Runnable):
            return ChatModelBackend(model, tokenizer=self.tokenizer, limit_parameter=self.limit_parameter)
        return model

    def _options(self, model: Any, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the options of a model that `load_backend` makes."""
        if not isinstance(model, str) or _is_langchains(model):
            return None
        own = drop_none(tokenizer=self.tokenizer, limit_parameter=self.limit_parameter)
        return {**(options or {}), **own}

    def _in_runs(self, backend: Backend, config: RunnableConfig) -> Backend:
        """Return the backend with its calls as runs below the run of `config`, and at the gate of a batch."""
        if isinstance(backend, ChatModelBackend):
            backend = backend.under(config)
            if self.trace_inputs == "none":
                backend.model = quiet_model(resolved(backend.model, config))
            return self._gate.gathered(backend) if self._gate else backend
        return BackendInRuns(self._gate.gathered(backend) if self._gate else backend, config)

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _templates(self, prompts: PromptSet) -> PromptSet | None:
        """Return the prompts with the templates that were set, None if none were."""
        templates = {"update": self.update_prompt, "answer": self.answer_prompt}
        made = {name: template_of(template, f"{name}_prompt") for name, template in templates.items() if template}
        return prompts.changed(**made) if made else None

    @contextmanager
    def tracing(self, config: RunnableConfig | None) -> Iterator[RunnableConfig]:
        """Yield the config for the runs of the block: with `trace_inputs="none"`, one whose traces hold no text.

        A generator must not yield inside the block.
        """
        if self.trace_inputs != "none":
            yield ensure_config(config)
            return
        with without_text(config) as quiet:
            yield quiet

    def traced_callbacks(self, callbacks: Any) -> Any:
        """Return callbacks that see what traces show."""
        return quiet_callbacks(callbacks) if self.trace_inputs == "none" else callbacks

    def traced(self, value: Any, bound: Mapping[str, Any] | None = None) -> Any:
        """Return the input as traces show it."""
        return value if self.trace_inputs == "full" else elided_input(value, bound or {})

    def shown_event(self, event: Any, input: Any, bound: Mapping[str, Any]) -> Any:
        """Return an event of the reader's own run, from an event stream, as traces show it."""
        data = {**event["data"]}
        if data.get("input") is input:
            data["input"] = self.traced(input, bound)
        return {**event, "data": data if self.trace_inputs != "none" else data_without_text(data)}


def _is_langchains(name: str) -> bool:
    """Return whether this names a model of `init_chat_model`: it has a provider that this package does not know."""
    return ":" in name and name.partition(":")[0] not in KINDS


def _chat_model(spec: str, options: Mapping[str, Any]) -> Any:
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise MissingExtra.extra("langchain", "langchain") from error
    try:
        return init_chat_model(spec, **options)
    except ImportError as error:
        command = re.search(r"pip install (?:-U )?[\w.\[\]-]+", str(error))
        hint = command[0] if command else "see the message above"
        raise MissingExtra(f"the package of {spec}", command=hint) from error
    except Exception as error:  # an unknown provider, a missing key, or anything else that the model's class raises
        secrets = secrets_in(options)
        message = f"LangChain cannot make the model {spec!r}: {without_secrets(str(error), secrets)}"
        raise UsageError(message) from cause_without(error, secrets)

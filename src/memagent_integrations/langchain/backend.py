"""A backend over any LangChain model, wrapped or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing
from copy import copy
from typing import Any, cast

from langchain_core.language_models import BaseLanguageModel, LanguageModelInput, LanguageModelLike
from langchain_core.runnables import Runnable, RunnableConfig
from pydantic import SecretStr

from memagent_integrations.backends import Backend, load_backend
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.langchain.lazy import Lazy
from memagent_integrations.langchain.limits import Limiter, counter_of_model, window_of
from memagent_integrations.langchain.models import (
    all_models_in,
    identity_of,
    models_in,
    rebuilt,
    resolved,
    takes_schema,
)
from memagent_integrations.langchain.muted import muted, within
from memagent_integrations.langchain.rendering import model_input
from memagent_integrations.langchain.replies import MessageReply
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.redaction import Secrets, secrets_in
from memagent_integrations.tokens import Counter, counter_of, load_counter


class ChatModelBackend(Backend):
    """A backend that calls a LangChain model, wrapped or not (`.with_retry()`, `.bind()`, `.with_fallbacks()`).

    Each call is a run of its own, `memagent_memory` or `memagent_answer`, and a child of the run of `config`; those
    that write the memory carry the tag "nostream".

    The output limit is passed to each model as its class takes it, or set on a copy; for others name the keyword
    argument with `limit_parameter`, else a warning is logged. `window` defaults to the smallest that the models, their
    profiles or their servers tell. An Ollama model without `num_ctx` gets one that holds the prompts.

    `tokenizer` counts tokens: a counter, or a name that `load_counter` knows. By default OpenAI's models are
    counted with tiktoken, a model with an `openai_api_base` as `OpenAIBackend` counts; those of any other are
    estimated, rather too high, with a warning.
    """

    def __init__(
        self,
        model: LanguageModelLike,
        config: RunnableConfig | None = None,
        *,
        tokenizer: str | Counter | None = None,
        window: int | None = None,
        limit_parameter: str | None = None,
        concurrency: int = 8,
    ) -> None:
        check_int(concurrency=concurrency, **drop_none(window=window))
        if not isinstance(model, Runnable):
            raise UsageError(f"model has to be a LangChain model, not {type(model).__name__}")
        self.model: Runnable[LanguageModelInput, Any] = model
        self.concurrency = concurrency
        self._config = config or RunnableConfig()
        self._tokenizer, self._window = tokenizer, window
        self._limiter, self._counting, self._sizing = Limiter(limit_parameter), Lazy(), Lazy()
        self._endpoints: dict[tuple[str, str], Backend] = {}
        self._cached: dict[str, Any] = {}

    @property
    def name(self) -> str:  # type: ignore[override]
        """The class and the name of the model, of several the first one's."""
        return _name(self._first())

    def name_of(self, reported: str | None) -> str:
        """Return the name of the model that has answered, given what its server calls it: perhaps it is a fallback."""
        if reported is None or len(self._models) == 1:
            return self.name
        for model in self._models:
            own = getattr(model, "model_name", None) or getattr(model, "model", None)
            if isinstance(own, str) and (own in reported or reported in own):
                return _name(model)
        return f"langchain:{reported}"

    @property
    def structured(self) -> bool:  # type: ignore[override]
        """Whether the model, and each of its fallbacks, can keep to a schema."""
        try:
            return takes_schema(self._resolved)
        except UsageError:  # it is known once the config of a call says which model it is
            return True

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of what decides the model's text: no keys, no addresses in memory, nothing about retries or runs."""
        return {"settings": self._once("identity", lambda: identity_of(self._resolved))}

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """The context window: the `window` argument, else the smallest that the models or their servers tell."""
        size: int | None = self._window or self._sizing.get((self._once("key", self._key),), self._find_window)
        return size

    def under(self, config: RunnableConfig) -> ChatModelBackend:
        """Return this backend with its calls as children of the run of `config`."""
        other = copy(self)
        other._config, other._cached = config, {}
        return other

    @property
    def answer_id(self) -> str | None:
        """The id of the message that was the last answer under the config: LangGraph may have streamed it."""
        id: str | None = self._cached.get("answer_id")
        return id

    def count(self, text: str) -> int:
        """Return the number of tokens in `text`."""
        count: Counter = self._counting.get((self._once("key", self._key),), self._find_counter)
        return count(text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """Return the model's reply."""
        builder, config = MessageReply(prompt.schema), self._run(prompt)
        model, value = self._call(prompt)
        with builder.call(self.name, secrets=self._secrets), within(config):
            builder.add(model.invoke(value, config))
        return self._reply(prompt, builder)

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        builder, config = MessageReply(prompt.schema), self._run(prompt)
        model, value = await asyncio.to_thread(self._call, prompt)
        with builder.call(self.name, secrets=self._secrets), within(config):
            builder.add(await model.ainvoke(value, config))
        return self._reply(prompt, builder)

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the model streams it; whole if it is structured, or may be no answer: listeners see it."""
        if prompt.schema or prompt.rereads:
            yield from super().stream(prompt)
            return
        builder, (model, value) = MessageReply(), self._call(prompt, stream=True)
        with builder.call(self.name, secrets=self._secrets):
            for part in model.stream(value, self._run(prompt)):
                if text := builder.add(part):
                    yield text
        yield self._reply(prompt, builder)

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        if prompt.schema or prompt.rereads:
            reply = await self.acomplete(prompt)
            yield reply.text
            yield reply
            return
        builder, (model, value) = MessageReply(), await asyncio.to_thread(self._call, prompt, stream=True)
        with builder.call(self.name, secrets=self._secrets):
            stream = model.astream(value, self._run(prompt))
            async with aclosing(cast("AsyncGenerator[Any]", stream)) as parts:
                async for part in parts:
                    if text := builder.add(part):
                        yield text
        yield self._reply(prompt, builder)

    def _reply(self, prompt: Prompt, builder: MessageReply) -> Reply:
        """Return the whole reply; remember the id of the message, if it is the answer."""
        if prompt.phase == "answer":
            self._cached["answer_id"] = builder.message_id
        return builder.reply()

    @property
    def _secrets(self) -> Secrets:
        return Secrets(lambda: secrets_in([_settings(model) for model in self._models]))

    def _call(self, prompt: Prompt, *, stream: bool = False) -> tuple[Runnable[LanguageModelInput, Any], Any]:
        """Return the model, with what this prompt needs bound to each of its parts, and its input."""

        def change(model: Any, bound: Mapping[str, Any]) -> Any:
            if stream and _omits_stream_usage(model):
                bound = {**bound, "stream_usage": True}
            if prompt.again and isinstance(model, BaseLanguageModel):
                model = model.model_copy(update={"cache": False})
            return self._limiter.limited(model, bound, prompt.max_tokens, lambda: self._size(prompt))

        def structured(model: Any, bound: Mapping[str, Any]) -> Any:
            try:
                whole = model.with_structured_output(_titled(prompt.schema or {}), include_raw=True)
            except (NotImplementedError, TypeError, ValueError) as error:
                raise UsageError(f"{_name(model)} cannot keep to this schema (output): {error}") from error
            return rebuilt(whole, change, bound)

        model = rebuilt(self._resolved, structured if prompt.schema else change)
        return model, model_input(prompt.messages, models_in(self._resolved))

    def _size(self, prompt: Prompt) -> int:
        return prompt.max_tokens + sum(self.count(each.content) + self.template_tokens for each in prompt.messages)

    def _run(self, prompt: Prompt) -> RunnableConfig:
        """Return the config of this call's run: its name, tags and metadata in traces."""
        config, tags = self._config, [f"memagent:{prompt.phase}"]
        if prompt.phase == "memory" or prompt.rereads:  # what may turn out to be no answer
            config = muted(config)
            tags.append("nostream")  # LangGraph streams no messages under this tag
        step = {"memagent_step": prompt.index, "memagent_phase": prompt.phase}
        return {
            **config,
            "run_name": f"memagent_{prompt.phase}",
            "tags": [*config.get("tags", []), *tags],
            "metadata": {**config.get("metadata", {}), **step},
        }

    @property
    def _resolved(self) -> Any:
        """The model that the config chooses."""
        return self._once("resolved", lambda: resolved(self.model, self._config))

    @property
    def _models(self) -> list[Any]:
        """The models that it consists of, the first choice first."""
        models: list[Any] = self._once("models", lambda: all_models_in(self._resolved))
        return models

    def _key(self) -> str:
        """Return what distinguishes the counters and windows of models that a config may choose."""
        names = ("openai_api_base", "base_url", "num_ctx", "n_ctx")
        return repr([(_name(model), *(getattr(model, name, None) for name in names)) for model in self._models])

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what depends on the config only, and is computed once for it."""
        if name not in self._cached:
            self._cached[name] = compute()
        return self._cached[name]

    def _first(self) -> Any:
        try:
            return self._models[0]
        except UsageError:  # a call will raise it; a name has to be there before
            return self.model

    def _find_counter(self) -> Counter:
        model = self._models[0]
        if self._tokenizer is not None:
            return load_counter(self._tokenizer)
        if count := counter_of_model(model):
            return count
        if endpoint := self._endpoint(model):
            return endpoint.count
        return counter_of(getattr(model, "model_name", None) or _name(model))

    def _find_window(self) -> int | None:
        return min(filter(None, map(self._window_of, self._models)), default=None)

    def _window_of(self, model: Any) -> int | None:
        endpoint = None if self._tokenizer is not None else self._endpoint(model)
        return (endpoint.window if endpoint else None) or window_of(model)

    def _endpoint(self, model: Any) -> Backend | None:
        """Return the backend of a model's OpenAI-compatible server, which may count and tell its window."""
        name, address = getattr(model, "model_name", None), getattr(model, "openai_api_base", None)
        if not (name and address):
            return None
        if (name, address) not in self._endpoints:
            key = getattr(model, "openai_api_key", None)
            secret = key.get_secret_value() if isinstance(key, SecretStr) else None
            self._endpoints[name, address] = load_backend(f"openai:{name}", base_url=address, api_key=secret)
        return self._endpoints[name, address]


def _settings(model: Any) -> dict[str, Any]:
    """Return the settings of a model, without the form that LangChain keeps for its traces: there secrets are names."""
    return {name: value for name, value in vars(model).items() if name != "_serialized"}


def _omits_stream_usage(model: Any) -> bool:
    """Return whether this is a ChatOpenAI that requests no usage in streams because its server is not OpenAI's."""
    return getattr(model, "stream_usage", False) is None and bool(getattr(model, "openai_api_base", None))


def _name(model: Any) -> str:
    name = getattr(model, "model_name", None) or getattr(model, "model", None) or getattr(model, "model_id", None)
    return f"langchain:{type(model).__name__}" + (f":{name}" if isinstance(name, str) else "")


def _titled(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with the title that LangChain takes for the name of the tool."""
    return {"title": "Answer", **schema}

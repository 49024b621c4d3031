"""A backend over any LangChain model, wrapped or not."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from copy import copy
from typing import Any, cast

from langchain_core.language_models import BaseLLM, LanguageModelInput, LanguageModelLike
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import RunnableConfigurableFields
from pydantic import SecretStr

from memagent_integrations.backends import Backend, load_backend
from memagent_integrations.backends.base import digest
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.langchain.lazy import Lazy
from memagent_integrations.langchain.muted import muted, within
from memagent_integrations.langchain.replies import MessageReply
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.tokens import Counter, counter_of, load_counter

_LIMITS = dict.fromkeys(("BaseChatOpenAI", "BaseOpenAI", "ChatAnthropic", "ChatGroq", "ChatMistralAI"), "max_tokens")
_LIMITS["ChatGoogleGenerativeAI"] = "max_output_tokens"
_MESSAGES: dict[str, type[BaseMessage]] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}


class ChatModelBackend(Backend):
    """A backend that calls a LangChain model, wrapped or not (`.with_retry()`, `.bind()`, `.with_fallbacks()`).

    Each call is a run of its own, `memagent_memory` or `memagent_answer`, and a child of the run of `config`; those
    that write the memory carry the tag "nostream".

    The output limit is passed to the model classes known to take one; for others name the keyword argument with
    `limit_parameter`. `window` defaults to what the model's profile or its endpoint reports.

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
        self.model = model
        self.concurrency = concurrency
        self._config = config or RunnableConfig()
        self._tokenizer, self._window, self._limit = tokenizer, window, limit_parameter
        self._models = _wrapped(model)
        self._counting = Lazy()

    @property
    def name(self) -> str:  # type: ignore[override]
        """The model's class and name."""
        name = getattr(self._models[0], "model_name", None) or getattr(self._models[0], "model", None)
        return f"langchain:{type(self._models[0]).__name__}" + (f":{name}" if isinstance(name, str) else "")

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the model's settings as LangChain serialises them, without memory addresses."""
        return {"settings": digest(re.sub(r"0x[0-9a-f]+", "", dumps(self.model)))}

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """The context window: the `window` argument, else what the model's profile or its endpoint reports."""
        return self._window or self._counter_and_window()[1]

    def under(self, config: RunnableConfig) -> ChatModelBackend:
        """Return this backend with its calls as children of the run of `config`."""
        other = copy(self)
        other._config = config
        return other

    def count(self, text: str) -> int:
        """Return the number of tokens in `text`."""
        return self._counter_and_window()[0](text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """Return the model's reply."""
        builder, config = MessageReply(), self._run(prompt)
        with builder.call(self.name, secrets=self._secrets()), within(config):
            builder.add(self.model.invoke(self._input(prompt), config, **self._options(prompt)))
        return builder.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        builder, config = MessageReply(), self._run(prompt)
        with builder.call(self.name, secrets=self._secrets()), within(config):
            builder.add(await self.model.ainvoke(self._input(prompt), config, **self._options(prompt)))
        return builder.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the model streams it."""
        builder = MessageReply()
        with builder.call(self.name, secrets=self._secrets()):
            for part in self.model.stream(self._input(prompt), self._run(prompt), **self._options(prompt, stream=True)):
                if text := builder.add(part):
                    yield text
        yield builder.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        builder = MessageReply()
        with builder.call(self.name, secrets=self._secrets()):
            stream = self.model.astream(self._input(prompt), self._run(prompt), **self._options(prompt, stream=True))
            async with aclosing(cast("AsyncGenerator[Any]", stream)) as parts:
                async for part in parts:
                    if text := builder.add(part):
                        yield text
        yield builder.reply()

    def _secrets(self) -> list[str]:
        names = ("openai_api_key", "anthropic_api_key", "api_key")
        keys = (getattr(model, name, None) for model in self._models for name in names)
        return [key.get_secret_value() for key in keys if isinstance(key, SecretStr)]

    def _input(self, prompt: Prompt) -> LanguageModelInput:
        if len(prompt.messages) == 1 and all(isinstance(model, BaseLLM) for model in self._models):
            return prompt.messages[0].content  # a BaseLLM writes "Human:" before a message: one text needs none
        return [_MESSAGES[message.role](content=message.content) for message in prompt.messages]

    def _run(self, prompt: Prompt) -> RunnableConfig:
        """Return the config of this call's run: its name, tags and metadata in traces."""
        config, tags = self._config, [f"memagent:{prompt.phase}"]
        if prompt.phase == "memory":
            config = muted(config)
            tags.append("nostream")  # LangGraph streams no messages under this tag
        step = {"memagent_step": prompt.index, "memagent_phase": prompt.phase}
        return {
            **config,
            "run_name": f"memagent_{prompt.phase}",
            "tags": [*config.get("tags", []), *tags],
            "metadata": {**config.get("metadata", {}), **step},
        }

    def _options(self, prompt: Prompt, *, stream: bool = False) -> dict[str, Any]:
        """Return keyword arguments that every one of the models is known to take."""
        limits = {_limit_parameter(model) for model in self._models}
        limit = self._limit or (limits.pop() if len(limits) == 1 else None)
        options: dict[str, Any] = {limit: prompt.max_tokens} if limit else {}
        if stream and all(_omits_stream_usage(model) for model in self._models):
            options["stream_usage"] = True
        return options

    def _counter_and_window(self) -> tuple[Counter, int | None]:
        return cast("tuple[Counter, int | None]", self._counting.get((), self._find_counter))

    def _find_counter(self) -> tuple[Counter, int | None]:
        model = self._models[0]
        window = (getattr(model, "profile", None) or {}).get("max_input_tokens")
        if self._tokenizer is not None:
            return load_counter(self._tokenizer), window
        name, address = getattr(model, "model_name", None), getattr(model, "openai_api_base", None)
        if name and address:
            key = getattr(model, "openai_api_key", None)
            endpoint = load_backend(
                f"openai:{name}",
                base_url=address,
                api_key=key.get_secret_value() if isinstance(key, SecretStr) else None,
            )
            return endpoint.count, endpoint.window or window
        return counter_of(name or self.name), window


def _wrapped(model: Any) -> list[Any]:
    """Return the models inside retries, bindings and fallbacks, the first choice first."""
    if isinstance(model, RunnableBindingBase):
        return _wrapped(model.bound)
    if isinstance(model, RunnableConfigurableFields):
        return _wrapped(model.default)
    if isinstance(model, RunnableWithFallbacks):
        return [inner for runnable in model.runnables for inner in _wrapped(runnable)]
    return [model]


def _limit_parameter(model: Any) -> str | None:
    """Return the name by which the model's class takes the output limit, if known."""
    return next((_LIMITS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _LIMITS), None)


def _omits_stream_usage(model: Any) -> bool:
    """Return whether this is a ChatOpenAI that requests no usage in streams because its server is not OpenAI's."""
    return getattr(model, "stream_usage", False) is None and bool(getattr(model, "openai_api_base", None))

"""A backend of this package as a LangChain model, so that its calls are traced, counted and cached as a model's are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing
from copy import copy
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManager, CallbackManagerForLLMRun
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import ConfigDict, Field, PrivateAttr

from memagent_integrations.backends import Backend
from memagent_integrations.backends.around import BackendAround
from memagent_integrations.backends.base import digest
from memagent_integrations.langchain.backend import ChatModelBackend
from memagent_integrations.langchain.messages import usage_metadata
from memagent_integrations.langchain.rendering import model_input
from memagent_integrations.langchain.replies import MessageReply
from memagent_integrations.records import Prompt, Reply


class BackendInRuns(BackendAround, ChatModelBackend):
    """A backend whose calls are runs of a chat model, children of the run of `config`.

    So tracers, usage handlers, `set_llm_cache` and LangGraph's stream of messages see them as they see any other
    model's. A reply from LangChain's cache makes no call.
    """

    def __init__(self, backend: Backend, config: RunnableConfig | None = None) -> None:
        super().__init__(_BackendModel(backend=backend), config)
        self._stand_for(backend)

    def name_of(self, reported: str | None) -> str:
        """Return the backend's name."""
        return self.name

    def complete(self, prompt: Prompt) -> Reply:
        """Return the backend's reply."""
        if not self._is_watched:
            withheld = MessageReply()  # which it is if the call ends without a reply and without an error
            with withheld.call(self.name, secrets=self._secrets):
                return self._backend.complete(prompt)
            return withheld.reply()
        call = self._for_prompt(prompt)
        reply = super(BackendInRuns, call).complete(prompt)
        return call.model.reply or reply

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async."""
        if not self._is_watched:
            withheld = MessageReply()  # which it is if the call ends without a reply and without an error
            with withheld.call(self.name, secrets=self._secrets):
                return await self._backend.acomplete(prompt)
            return withheld.reply()
        call = self._for_prompt(prompt)
        reply = await super(BackendInRuns, call).acomplete(prompt)
        return call.model.reply or reply

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the backend streams it."""
        call = self._for_prompt(prompt)
        try:
            for piece in super(BackendInRuns, call).stream(prompt):
                yield (call.model.reply or piece) if isinstance(piece, Reply) else piece
        finally:
            call.model.pieces.close()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        call = self._for_prompt(prompt)
        try:
            async with aclosing(super(BackendInRuns, call).astream(prompt)) as pieces:
                async for piece in pieces:
                    yield (call.model.reply or piece) if isinstance(piece, Reply) else piece
        finally:
            await call.model.apieces.aclose()

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    @property
    def _is_watched(self) -> bool:
        """Whether LangChain has handlers for a call, or a cache."""
        callbacks = ensure_config(self._config).get("callbacks")
        return get_llm_cache() is not None or bool(CallbackManager.configure(callbacks).handlers)

    def _for_prompt(self, prompt: Prompt) -> Any:
        """Return this backend for one call, whose model knows the whole prompt and not its messages alone."""
        other: Any = copy(self)
        other.model = _BackendModel(backend=self._backend, prompt=prompt, cache=False if prompt.again else None)
        return other

    def _call(self, prompt: Prompt, *, stream: bool = False) -> tuple[Runnable[LanguageModelInput, Any], Any]:
        """Return the model and its input; bound is what decides the reply besides, which LangChain's cache compares."""
        schema = {"schema": digest(repr(prompt.schema))} if prompt.schema else {}
        return self.model.bind(max_tokens=prompt.max_tokens, **schema), model_input(prompt.messages, [self.model])


class _BackendModel(BaseChatModel):
    """A backend as a chat model for one prompt; `reply` is the backend's reply to it, None if a cache had one."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    backend: Backend = Field(repr=False)
    prompt: Prompt | None = Field(default=None, repr=False)  # LangChain writes the representation for each call
    _reply: Reply | None = PrivateAttr(default=None)
    _pieces: Generator[str | Reply] = PrivateAttr(default_factory=lambda: _nothing())
    _apieces: AsyncGenerator[str | Reply] = PrivateAttr(default_factory=lambda: _anothing())

    @property
    def reply(self) -> Reply | None:
        return self._reply

    @property
    def pieces(self) -> Generator[str | Reply]:
        """The stream of the backend, to be closed: LangChain leaves it to the garbage collector."""
        return self._pieces

    @property
    def apieces(self) -> AsyncGenerator[str | Reply]:
        """`pieces`, async."""
        return self._apieces

    @property
    def _llm_type(self) -> str:
        return "memagent"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.backend.name, **self.backend.identity}

    @property
    def _model_name(self) -> str:
        return self.backend.name.partition(":")[2] or self.backend.name

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = self.backend.name.partition(":")[0]
        params["ls_model_name"] = self._model_name
        return params

    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        """Return whether to stream: where LangChain asks for it, and for an answer of a model that can."""
        can = self.prompt is not None and self.prompt.phase == "answer" and self.backend.batch_size == 1
        return can and super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(self.backend.complete(self._own_prompt))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(await self.backend.acomplete(self._own_prompt))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        self._pieces = self.backend.stream(self._own_prompt)
        for piece in self._pieces:
            yield self._chunk(piece)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        self._apieces = self.backend.astream(self._own_prompt)
        async for piece in self._apieces:
            yield self._chunk(piece)

    @property
    def _own_prompt(self) -> Prompt:
        assert self.prompt is not None, "a model of no prompt is only a name"
        return self.prompt

    def _result(self, reply: Reply) -> ChatResult:
        self._reply = reply
        message = AIMessage(content=reply.text, **self._message_fields(reply))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk(self, piece: str | Reply) -> ChatGenerationChunk:
        if isinstance(piece, str):
            return ChatGenerationChunk(message=AIMessageChunk(content=piece))
        self._reply = piece
        message = AIMessageChunk(content="", chunk_position="last", **self._message_fields(piece))
        return ChatGenerationChunk(message=message)

    def _message_fields(self, reply: Reply) -> dict[str, Any]:
        return {
            "usage_metadata": usage_metadata(reply.usage),
            "response_metadata": {"model_name": self._model_name, "finish_reason": reply.finish_reason},
            "additional_kwargs": {"reasoning_content": reply.reasoning} if reply.reasoning else {},
        }


def _nothing() -> Generator[str | Reply]:
    yield from ()


async def _anothing() -> AsyncGenerator[str | Reply]:
    return
    yield

"""A backend over any LlamaIndex LLM."""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.settings import Settings
from pydantic import BaseModel

from memagent_integrations.backends.base import Backend, digest
from memagent_integrations.backends.failures import translated
from memagent_integrations.checks import check_int, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.llama_index import llms, structured
from memagent_integrations.llama_index.identity import secrets_of, settings_of
from memagent_integrations.llama_index.limits import limited, streams_usage, window_of
from memagent_integrations.llama_index.rendering import chat_messages, completion_prompt, template_text
from memagent_integrations.llama_index.replies import LLMReply, aclosable, closable
from memagent_integrations.records import Prompt, Reply
from memagent_integrations.redaction import Secrets
from memagent_integrations.tokens import Counter, estimated, load_counter

_log = logging.getLogger(__name__)


class LLMBackend(Backend):
    """A backend that calls a LlamaIndex LLM; by default `Settings.llm`, looked up for each reading.

    The LLM itself is never changed: where a callback manager or the output limit has to be set, a copy is called,
    which shares its client. Every prompt begins with the LLM's `system_prompt`. An LLM that is no chat model gets its
    prompts by `complete`, in its own template.

    The output limit is set on the classes of LlamaIndex's integrations, and where the LLM has a field for it. For
    others name the keyword argument with `limit_parameter`; a warning is logged for an LLM that gets no limit.

    `tokenizer` counts tokens: a counter, or a name that `load_counter` knows. The default is LlamaIndex's global
    tokenizer (`Settings.tokenizer`; unless set, that of GPT-3.5, which comes with llama-index-core); for exact chunk
    sizes pass the model's own. `window` defaults to what the LLM knows of its context window.

    Raises:
        UsageError: the tokenizer cannot be loaded; at the first call: there is no LLM, or it does not know its model.
    """

    structured = True

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        tokenizer: str | Counter | None = None,
        window: int | None = None,
        limit_parameter: str | None = None,
        callback_manager: CallbackManager | None = None,
        concurrency: int = 8,
    ) -> None:
        check_int(concurrency=concurrency, **drop_none(window=window))
        if not isinstance(llm, LLM | None):
            raise UsageError(f"llm has to be a LlamaIndex LLM, not {type(llm).__name__}")
        self._given, self._llm = llm, llm and llms.reporting_to(llm, callback_manager)
        self._window, self._limit, self._callbacks = window, limit_parameter, callback_manager
        self._tokenizer, self._count = tokenizer, _counter(tokenizer)
        self._warned: set[str] = set()
        self._bound: LLMBackend | None = None
        self.concurrency = concurrency

    @property
    def llm(self) -> LLM:
        """The LLM that is called: the one that was given, else the one that `Settings` has now."""
        return self._llm or self.for_reading().llm

    def for_reading(self) -> LLMBackend:
        """Return the backend for one reading, which keeps the LLM that `Settings` has now.

        Raises:
            UsageError: there is none.
        """
        if self._llm is not None:
            return self
        try:
            llm = Settings.llm
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"no model was given, and Settings.llm cannot be made; pass llm=... or set Settings.llm ({error})"
            ) from error
        bound = self._bound
        if bound is None or bound._given is not llm:
            bound = copy(self)
            bound._given, bound._llm = llm, llms.reporting_to(llm, self._callbacks)
            bound._bound = None
            self._bound = bound
        return bound

    @property
    def name(self) -> str:  # type: ignore[override]
        """The LLM's class and model."""
        llm = self.llm
        model = self._metadata(llm).model_name
        return f"llama-index:{llm.class_name()}" + ("" if model == "unknown" else f":{model}")

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the LLM's settings and templates, without memory addresses; see `identity.settings_of`."""
        settings = json.dumps(settings_of(self.llm), sort_keys=True)
        return {"settings": digest(re.sub(r"0x[0-9a-f]+", "", settings))}

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """The context window: the `window` argument, else what the LLM knows of it; None if it does not know it."""
        if self._window:
            return self._window
        llm = self.llm
        return window_of(llm, self._metadata(llm))

    @property
    def template_tokens(self) -> int:  # type: ignore[override]
        """Tokens that the chat template, or the LLM's own templates, and its system prompt add to a prompt."""
        llm = self.llm
        return Backend.template_tokens + self.count(template_text(llm, self._metadata(llm)))

    def count(self, text: str) -> int:
        """Return the number of tokens in `text`."""
        return self._count(text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """Return the LLM's reply."""
        call = self._call(prompt)
        with call.reply.call(call.name, secrets=call.secrets):
            call.reply.add_whole(call.make("chat", "complete"))
        return call.reply.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """`complete`, async; in a thread if the LLM is only synchronous, or has been used in another event loop."""
        call = self._call(prompt)
        if call.is_synchronous("achat", "acomplete") or llms.is_elsewhere(call.given):
            return await super().acomplete(prompt)
        with call.reply.call(call.name, secrets=call.secrets):
            call.reply.add_whole(await call.make("achat", "acomplete"))
        return call.reply.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply as the LLM streams it; an object comes in one piece."""
        call = self._call(prompt, stream=True)
        if call.output:
            yield from super().stream(prompt)
            return
        with (
            call.reply.call(call.name, secrets=call.secrets),
            closing(closable(call.make("stream_chat", "stream_complete"))) as responses,
        ):
            for response in responses:
                if text := call.reply.add(response):
                    yield text
        yield call.reply.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async; in threads as `acomplete`."""
        call = self._call(prompt, stream=True)
        if call.output:
            reply = await self.acomplete(prompt)
            yield reply.text
            yield reply
            return
        if call.is_synchronous("astream_chat", "astream_complete") or llms.is_elsewhere(call.given):
            async with aclosing(super().astream(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        with call.reply.call(call.name, secrets=call.secrets):
            async with aclosing(aclosable(await call.make("astream_chat", "astream_complete"))) as responses:
                async for response in responses:
                    if text := call.reply.add(response):
                        yield text
        yield call.reply.reply()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a pickle holds: as LlamaIndex's LLMs do, it leaves behind what cannot be pickled."""
        args, options = self._arguments
        try:
            pickle.dumps(options.get("callback_manager"))
        except Exception:
            _log.warning("%s is pickled without its callback manager, which cannot be pickled", type(self).__name__)
            options = options | {"callback_manager": None}
        return partial(type(self), *args, **options), ()

    def _metadata(self, llm: LLM) -> LLMMetadata:
        """Return what the LLM says of its model, for which some classes ask their server."""
        name = f"llama-index:{llm.class_name()}"
        try:
            with translated(name, secrets=Secrets(partial(secrets_of, llm))):
                return llm.metadata
        except ValueError as error:  # LlamaIndex's OpenAI class raises it for an unknown model
            raise UsageError(
                f"{llm.class_name()} has no metadata of its model; use OpenAILike for such a model ({error})"
            ) from error

    def _warn(self, message: str) -> None:
        """Log a warning, once."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message)

    def _call(self, prompt: Prompt, *, stream: bool = False) -> _Call:
        """Return the call to make for a prompt."""
        llm = self.llm
        given = self.for_reading()._given or llm
        output = structured.output_of(llm, prompt)
        llm = llm.llm if isinstance(llm, StructuredLLM) else llm
        metadata = self._metadata(llm)
        limit = limited(llm, prompt.max_tokens, self._limit)
        if limit is None:
            self._warn(
                f"{self.name} gets no output limit, its replies may be longer than output_tokens: name the keyword "
                "argument that limits them, LLMBackend(llm, limit_parameter=...)"
            )
        target, options = limit or (llm, {})
        if stream and streams_usage(llm):
            options["stream_options"] = {"include_usage": True}
        call = _Call(
            llm=target,
            given=given.llm if isinstance(given, StructuredLLM) else given,
            name=self.name,
            secrets=Secrets(partial(secrets_of, llm)),
            options=options,
            output=output,
        )
        if output:
            # the system prompt is one of the messages: LlamaIndex's programs add it in some of their methods only
            call.llm = structured.writing(llms.changed(target, system_prompt=None), output, call.reply)
        elif llms.completes(llm, metadata):
            call.completion = completion_prompt(llm, metadata, prompt.messages)
        call.messages = chat_messages(llm.system_prompt, prompt.messages)
        return call


@dataclass
class _Call:
    """A call of an LLM: the one that is called, the one that the caller gave, what it is asked, and its reply.

    `completion` is the prompt as a text, for an LLM that completes; `output` is the class of a structured answer.
    """

    llm: LLM
    given: LLM
    name: str
    secrets: Secrets
    options: dict[str, Any]
    output: type[BaseModel] | None
    messages: list[ChatMessage] = field(default_factory=list)
    completion: str | None = None

    def __post_init__(self) -> None:
        self.reply = LLMReply(self.output)

    def make(self, chat: str, complete: str) -> Any:
        """Call the method of one of these names, and return what it returns."""
        if self.completion is None:
            return getattr(self.llm, chat)(self.messages, **self.options)
        return getattr(self.llm, complete)(self.completion, formatted=True, **self.options)

    def is_synchronous(self, chat: str, complete: str) -> bool:
        """Return whether that method would block the event loop."""
        return llms.is_synchronous(self.llm, chat if self.completion is None else complete)


def _counter(tokenizer: str | Counter | None) -> Counter:
    if tokenizer is not None:
        return load_counter(tokenizer)
    try:
        encode = Settings.tokenizer
    except Exception as error:  # a failed import or download
        reason = f"LlamaIndex's own tokenizer cannot be loaded ({type(error).__name__}: {error})"
        return estimated("the LLM", reason)
    return lambda text: len(encode(text))

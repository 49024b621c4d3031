"""The door to LangChain: a backend over any of its models, and a runnable that reads a document for a question.

The reading itself is `Reader`; here its events become messages, chunks, runs and custom events.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import ConfigDict, Field, PlainValidator, SecretStr, ValidationError, model_validator
from typing_extensions import TypedDict

from memagent_integrations.backends import Backend, ScriptedBackend, load_backend
from memagent_integrations.backends.failures import translated
from memagent_integrations.errors import BackendError, MissingExtra, UsageError
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.records import Layout, Prompt, Reading, Reply, Step, Usage
from memagent_integrations.tokens import WAYS_OUT, Counter, load_counter, openai_counter

try:
    from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun, adispatch_custom_event, dispatch_custom_event
    from langchain_core.documents.base import Blob
    from langchain_core.language_models import BaseLLM, LanguageModelInput, LanguageModelLike
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
    from langchain_core.messages.ai import UsageMetadata, add_usage
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable, RunnableWithFallbacks
    from langchain_core.runnables.base import RunnableBindingBase
    from langchain_core.runnables.config import patch_config
    from langchain_core.runnables.configurable import RunnableConfigurableFields
    from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
except ImportError as error:
    raise MissingExtra.extra("langchain-core", "langchain") from error

STEP = "memagent_step"
"""Name of the custom event that follows each memory update."""

_OURS = ("openai", "llamacpp", "transformers", "vllm", "policy")  # kinds of model names that `load_backend` knows
_LIMITS = dict.fromkeys(("BaseChatOpenAI", "BaseOpenAI", "ChatAnthropic", "ChatGroq", "ChatMistralAI"), "max_tokens")
_LIMITS["ChatGoogleGenerativeAI"] = "max_output_tokens"
_FINISH = dict.fromkeys(("end_turn", "stop_sequence"), "stop") | dict.fromkeys(("max_tokens", "max_output_tokens", "model_length"), "length")
_FINISH |= dict.fromkeys(("safety", "refusal"), "content_filter")
_MESSAGES: dict[str, type[BaseMessage]] = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
_BUDGETS = ("chunk_tokens", "memory_tokens", "question_tokens", "output_tokens", "overlap_tokens")


class ChatModelBackend(Backend):
    """A backend that calls a LangChain model, or anything wrapped around one: `.with_retry()`, `.bind()`, `.with_fallbacks()`.

    `config` is that of the run the calls belong to. Each call is a run of its own, `memagent_memory` or `memagent_answer`; those of the
    memory carry the tag "nostream". The output limit is passed to the model classes known to take one; for others give the name of the keyword
    argument as `limit_parameter`. `window` defaults to what the model's profile or its endpoint says.

    Tokens are counted by `tokenizer`, a counter or a name that `load_counter` knows. Without one they are counted, for OpenAI's models, by
    tiktoken, and for a model with an `openai_api_base` as `OpenAIBackend` counts them; for others `count` raises `UsageError`.
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
        if not isinstance(model, Runnable):
            raise UsageError(f"model has to be a LangChain model, not {type(model).__name__}")
        self.model = model
        self.concurrency = concurrency
        self._config = config or RunnableConfig()
        self._tokenizer, self._window, self._limit = tokenizer, window, limit_parameter
        self._models = _wrapped(model)
        self._counting = _Once()
        self._streams = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """The class of the model and its own name."""
        name = getattr(self._models[0], "model_name", None) or getattr(self._models[0], "model", None)
        return f"langchain:{type(self._models[0]).__name__}" + (f":{name}" if isinstance(name, str) else "")

    @property
    def window(self) -> int | None:  # type: ignore[override]
        """Context window as given, or as the model's profile or its endpoint tells it."""
        return self._window or self._counter_and_window()[1]

    def under(self, config: RunnableConfig, *, streams: bool) -> ChatModelBackend:
        """This backend, its calls as children of the run of `config`; without `streams`, `stream` gives the reply in one piece."""
        other = copy(self)
        other._config, other._streams = config, streams
        return other

    def count(self, text: str) -> int:
        """Tokens of the text."""
        return self._counter_and_window()[0](text) if text else 0

    def complete(self, prompt: Prompt) -> Reply:
        """One call of the model."""
        received = _Received()
        with translated(self.name):
            received.add(self.model.invoke(self._input(prompt), self._run(prompt), **self._options(prompt)))
        return received.reply()

    async def acomplete(self, prompt: Prompt) -> Reply:
        """One call of the model, async."""
        received = _Received()
        with translated(self.name):
            received.add(await self.model.ainvoke(self._input(prompt), self._run(prompt), **self._options(prompt)))
        return received.reply()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """One call of the model, streamed."""
        if not self._streams:
            yield from super().stream(prompt)
            return
        received = _Received()
        with translated(self.name):
            for part in self.model.stream(self._input(prompt), self._run(prompt), **self._options(prompt, stream=True)):
                if text := received.add(part):
                    yield text
        yield received.reply()

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """One call of the model, streamed, async."""
        if not self._streams:
            reply = await self.acomplete(prompt)
            yield reply.text
            yield reply
            return
        received = _Received()
        with translated(self.name):
            stream = self.model.astream(self._input(prompt), self._run(prompt), **self._options(prompt, stream=True))
            async with aclosing(cast("AsyncGenerator[Any]", stream)) as parts:
                async for part in parts:
                    if text := received.add(part):
                        yield text
        yield received.reply()

    def _input(self, prompt: Prompt) -> LanguageModelInput:
        if all(isinstance(model, BaseLLM) for model in self._models):  # it would write "Human:" before a message
            return "\n\n".join(message.content for message in prompt.messages)
        return [_MESSAGES[message.role](content=message.content) for message in prompt.messages]

    def _run(self, prompt: Prompt) -> RunnableConfig:
        """What the run of this call shows in traces."""
        tags = [f"memagent:{prompt.phase}", *(["nostream"] if prompt.phase == "memory" else [])]  # LangGraph streams no tokens under this tag
        return {
            **self._config,
            "run_name": f"memagent_{prompt.phase}",
            "tags": [*self._config.get("tags", []), *tags],
            "metadata": {**self._config.get("metadata", {}), "memagent_step": prompt.index, "memagent_phase": prompt.phase},
        }

    def _options(self, prompt: Prompt, *, stream: bool = False) -> dict[str, Any]:
        """Keyword arguments that every one of the models is known to take."""
        limits = {next((_LIMITS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _LIMITS), None) for model in self._models}
        limit = self._limit or (limits.pop() if len(limits) == 1 else None)
        options: dict[str, Any] = {limit: prompt.max_tokens} if limit else {}
        if stream and all(_tells_no_usage(model) for model in self._models):
            options["stream_usage"] = True
        return options

    def _counter_and_window(self) -> tuple[Counter, int | None]:
        return cast("tuple[Counter, int | None]", self._counting.get((), self._find_counter))

    def _find_counter(self) -> tuple[Counter, int | None]:
        model = self._models[0]
        window = (getattr(model, "profile", None) or {}).get("max_input_tokens")
        if self._tokenizer is not None:
            return load_counter(self._tokenizer) if isinstance(self._tokenizer, str) else self._tokenizer, window
        name, address = getattr(model, "model_name", None), getattr(model, "openai_api_base", None)
        if name and address:
            key = getattr(model, "openai_api_key", None)
            endpoint = load_backend(f"openai:{name}", base_url=address, api_key=key.get_secret_value() if isinstance(key, SecretStr) else None)
            return endpoint.count, endpoint.window or window
        if name:
            return openai_counter(name), window
        raise UsageError(f"nothing is known that counts the tokens of {self.name}; {WAYS_OUT}")


class _Received:
    """One reply, put together from what the model gives."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._usage: UsageMetadata | None = None
        self._finish: str | None = None

    def add(self, part: Any) -> str:
        """Take a message, a chunk of one, or a text; return its text."""
        if not isinstance(part, (str, BaseMessage)):
            raise UsageError(f"a model answers with a message or a text; this one gave {type(part).__name__}")
        text = part if isinstance(part, str) else str(part.text)
        self._texts.append(text)
        if isinstance(part, AIMessage):
            self._usage = add_usage(self._usage, part.usage_metadata) if part.usage_metadata else self._usage
            self._finish = _finish_reason(part) or self._finish
            self._reasoning += [str(block.get("reasoning", "")) for block in part.content_blocks if block["type"] == "reasoning"]
        return text

    def reply(self) -> Reply:
        """The whole reply."""
        if not self._texts:
            raise BackendError("the model ended without a reply", retryable=True)
        text, reasoning, seconds = "".join(self._texts), "".join(self._reasoning), time.perf_counter() - self._started
        return Reply(text=text, reasoning=reasoning, usage=_usage(self._usage), finish_reason=self._finish, seconds=seconds)


class _Once:
    """A value that is made at its first use, by one thread, and again for another key. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: tuple[tuple[Any, ...], Any] | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The value that `make` made for `key`."""
        with self._lock:
            if self._made is None or not all(map(_same, self._made[0], key)):
                self._made = key, make()
            return self._made[1]

    def __reduce__(self) -> tuple[type[_Once], tuple[()]]:
        return _Once, ()


class ReaderInput(TypedDict):
    """What `MemAgentReader` takes: a question, and a document of any length to answer it from.

    `context` is what `documents.pieces` takes (text, a `Path`, `Document`s, a loader, an iterator, in async calls an async one), a retriever,
    which is asked the question, or a `Blob`.
    """

    question: str
    context: Any


def _model_checked(model: Any) -> Any:
    if not isinstance(model, (str, Backend, Runnable)):
        raise UsageError(f"model has to be a LangChain model, a Backend or a name, not {type(model).__name__}")
    return model


class MemAgentReader(RunnableSerializable[ReaderInput, AIMessage]):
    """A runnable that reads a document of any length with a fixed window and answers a question from it.

    `model` is a LangChain model or anything wrapped around one, a `Backend`, or a name: one that `load_backend` knows ("smollm2",
    "openai:NAME", "policy:DIR", ...), any other "provider:name" is LangChain's `init_chat_model`'s. A named model is loaded at the first use,
    once. A retry belongs to the model (`model.with_retry()`): around the reader it begins the document anew.

    `tokenizer` counts the tokens (see `ChatModelBackend`); the other settings are those of `Reader`. `trace_inputs="full"` lets traces hold
    the document; by default they say only how long it is.

    The answer is an `AIMessage`: `usage_metadata` sums all calls (None where a server did not tell), `response_metadata["memagent"]` says how
    it was read. Streams give the answer as it is written, and then an empty chunk with these two. Each memory update is followed by the
    custom event "memagent_step", which LangGraph's `stream_mode="custom"` shows too. `reader.bind(question=...)` makes the input the context.

    Raises:
        UsageError: a setting is wrong, or the input is; `Reader.read` lists what else a call may raise.
        MissingExtra: the package of a named model is not installed.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: Annotated[LanguageModelLike | Backend | str, PlainValidator(_model_checked)]
    tokenizer: str | Counter | None = None
    chunk_tokens: int | None = None
    memory_tokens: int | None = None
    question_tokens: int | None = None
    output_tokens: int | None = None
    overlap_tokens: int | None = None
    layout: Layout | None = None
    prompts: PromptSet | None = None
    window: int | None = None
    trace_inputs: Literal["elided", "full"] = "elided"
    loaded: _Once = Field(default_factory=_Once, exclude=True, repr=False)  # a field, so that `configurable_fields` hands it on

    def __init__(self, model: LanguageModelLike | Backend | str, **settings: Any) -> None:
        try:
            super().__init__(model=model, **settings)  # type: ignore[call-arg]
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    @model_validator(mode="after")
    def _settings_checked(self) -> Self:
        if not (isinstance(self.model, str) and self.model.startswith("policy:")):  # its budgets are known when it is loaded
            Reader(ScriptedBackend([]), **self._settings)
        return self

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: `dumpd` gives a constructor. For `load`, pass this class and the model's as `allowed_objects`."""
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """The prompts as a dict, which JSON can hold."""
        return {"prompts": asdict(self.prompts)} if self.prompts else {}

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """What of the model can be configured at run time."""
        return get_unique_config_specs(self.model.config_specs) if isinstance(self.model, Runnable) else []

    def invoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Read the document, answer the question."""

        def read(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> AIMessage:
            child = patch_config(config, callbacks=run_manager.get_child())
            *_, reading = self._events(_job(input, kwargs), child, streams=False)
            return _message(cast("Reading", reading))

        return self._call_with_config(read, self._traced(input), config)

    async def ainvoke(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """`invoke`, async."""

        async def read(_: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> AIMessage:
            child = patch_config(config, callbacks=run_manager.get_child())
            async with aclosing(self._aevents(_job(input, kwargs), child, streams=False)) as events:
                *_, reading = [event async for event in events]
            return _message(cast("Reading", reading))

        return await self._acall_with_config(read, self._traced(input), config)

    def stream(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[AIMessageChunk]:
        """`invoke`, with the answer in chunks as it is written; the last is empty and tells usage and details."""

        def read(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> Iterator[AIMessage]:
            yield from map(_chunk, self._events(_job(input, kwargs), config, streams=True))

        chunks = self._transform_stream_with_config(iter([self._traced(input)]), read, config)
        yield from cast("Iterator[AIMessageChunk]", chunks)

    async def astream(self, input: ReaderInput, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncGenerator[AIMessageChunk]:
        """`stream`, async."""

        async def read(_: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> AsyncGenerator[AIMessage]:
            async with aclosing(self._aevents(_job(input, kwargs), config, streams=True)) as events:
                async for event in events:
                    yield _chunk(event)

        chunks = self._atransform_stream_with_config(_achain([self._traced(input)]), read, config)
        async with aclosing(cast("AsyncGenerator[AIMessageChunk]", chunks)) as stream:
            async for chunk in stream:
                yield chunk

    def transform(self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[AIMessageChunk]:
        """`stream`, of an input that comes in pieces: dicts that together hold the question and the context.

        With `bind(question=...)` the pieces are the context, and are read as they come.
        """
        if not kwargs:
            value = _merged(list(input))
        else:
            head = list(itertools.islice(input, 2))
            value = head[0] if len(head) == 1 else itertools.chain(head, input)
        yield from self.stream(value, config, **kwargs)

    async def atransform(self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any) -> AsyncGenerator[AIMessageChunk]:
        """`transform`, async."""
        value: Any
        if not kwargs:
            value = _merged([item async for item in input])
        else:
            head = []
            async for item in input:
                head.append(item)
                if len(head) == 2:
                    break
            value = head[0] if len(head) == 1 else _achain(head, input)
        async with aclosing(self.astream(value, config, **kwargs)) as stream:
            async for chunk in stream:
                yield chunk

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_BUDGETS, "layout", "prompts", "window")}

    def _load(self) -> Reader:
        model = self.model
        if isinstance(model, str) and ":" in model and model.partition(":")[0] not in _OURS:
            model = _chat_model(model)
        if isinstance(model, Runnable):
            return Reader(ChatModelBackend(model, tokenizer=self.tokenizer))
        return Reader(model, backend_options=None if self.tokenizer is None else {"tokenizer": self.tokenizer})

    def _reader(self, config: RunnableConfig, *, streams: bool) -> Reader:
        """A reader with these settings, over the loaded model; its own prompts and budgets (a policy's) hold where none are set."""
        own: Reader = self.loaded.get((self.model, self.tokenizer), self._load)
        backend = own.backend.under(config, streams=streams) if isinstance(own.backend, ChatModelBackend) else own.backend
        settings = self._settings
        settings |= {name: getattr(own.budgets, name) for name in _BUDGETS if settings[name] is None}
        settings["prompts"] = self.prompts or (None if self.layout else own.prompts)
        return Reader(backend, **settings)

    def _events(self, job: tuple[str, Any], config: RunnableConfig, *, streams: bool) -> Iterator[str | Reading]:
        question, context = job
        document = context.invoke(question, config) if isinstance(context, BaseRetriever) else context
        for event in self._reader(config, streams=streams).stream(question, _text_of(document)):
            if not isinstance(event, Step):
                yield event
            elif event.phase == "memory":
                dispatch_custom_event(STEP, _told(event), config=config)

    async def _aevents(self, job: tuple[str, Any], config: RunnableConfig, *, streams: bool) -> AsyncGenerator[str | Reading]:
        question, context = job
        document = await context.ainvoke(question, config) if isinstance(context, BaseRetriever) else context
        reader = await asyncio.to_thread(self._reader, config, streams=streams)
        async with aclosing(reader.astream(question, _text_of(document))) as events:
            async for event in events:
                if not isinstance(event, Step):
                    yield event
                elif event.phase == "memory":
                    await adispatch_custom_event(STEP, _told(event), config=config)

    def _traced(self, value: Any) -> Any:
        """The input as traces show it."""
        if self.trace_inputs == "full":
            return value
        if isinstance(value, Mapping):
            return {name: value[name] if name == "question" else _elided(value[name]) for name in ("question", "context") if name in value}
        return _elided(value)


def _wrapped(model: Any) -> list[Any]:
    """The models inside retries, bindings and fallbacks, the first choice first."""
    if isinstance(model, RunnableBindingBase):
        return _wrapped(model.bound)
    if isinstance(model, RunnableConfigurableFields):
        return _wrapped(model.default)
    if isinstance(model, RunnableWithFallbacks):
        return [inner for each in model.runnables for inner in _wrapped(each)]
    return [model]


def _chat_model(spec: str) -> Any:
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise MissingExtra.extra("langchain", "langchain") from error
    try:
        return init_chat_model(spec)
    except ImportError as error:
        command = re.search(r"pip install [\w.\[\]-]+", str(error))
        raise MissingExtra(f"the package of {spec}", command=command[0] if command else "see the message above") from error
    except Exception as error:  # an unknown provider, or no key: whatever its class raises
        raise UsageError(f"LangChain cannot make the model {spec!r}: {error}") from error


def _tells_no_usage(model: Any) -> bool:
    """Whether this is a ChatOpenAI that asks for no usage in streams because its server is not OpenAI's."""
    return getattr(model, "stream_usage", False) is None and bool(getattr(model, "openai_api_base", None))


def _finish_reason(message: AIMessage) -> str | None:
    told = message.response_metadata
    reason = next((told[name] for name in ("finish_reason", "stop_reason", "done_reason") if told.get(name)), None)
    reason = reason or (told.get("incomplete_details") or {}).get("reason")  # OpenAI's Responses API
    if message.additional_kwargs.get("refusal"):
        return "content_filter"
    return _FINISH.get(str(reason).lower(), str(reason).lower()) if reason else None


def _usage(told: UsageMetadata | None) -> Usage:
    if not told:
        return Usage()
    cached = told.get("input_token_details", {}).get("cache_read")
    return Usage(prompt_tokens=told["input_tokens"], completion_tokens=told["output_tokens"], cached_tokens=cached)


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str) and one == other)


def _job(value: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Question and context of an input."""
    if unknown := options.keys() - {"question"}:
        raise UsageError(f"the reader takes no {', '.join(sorted(unknown))}; bind arguments of the model to the model")
    question = options.get("question")
    if question is None:
        if not isinstance(value, Mapping) or not {"question", "context"} <= value.keys():
            raise UsageError("the input has to be a dict with 'question' and 'context', or bind the question: reader.bind(question=...)")
        question, value = value["question"], value["context"]
    if not isinstance(question, str):
        raise UsageError(f"the question has to be text, not {type(question).__name__}")
    return question, value


def _text_of(document: Any) -> Any:
    return map(Blob.as_string, [document]) if isinstance(document, Blob) else document  # read when it is asked for


def _elided(value: Any) -> str:
    if isinstance(value, str):
        return f"<{len(value):,} characters>"
    if isinstance(value, (Path, Blob)):
        return str(value if isinstance(value, Path) else value.source or "<Blob>")
    return f"<{type(value).__name__}" + (f" of {len(value):,}>" if isinstance(value, Sequence) else ">")


def _told(step: Step) -> dict[str, Any]:
    """A step as the custom event tells it, which a LangGraph node that this may run in also gets."""
    span = step.span
    data = {
        "step": step.index,
        "memory": step.memory,
        "outcome": step.outcome,
        "cut": step.cut,
        "seconds": step.reply.seconds,
        "chunk": {"start": span.start, "end": span.end, "tokens": span.tokens} if span else None,
    }
    if langgraph := sys.modules.get("langgraph.config"):
        try:
            write = langgraph.get_stream_writer()
        except (RuntimeError, KeyError):  # there is no graph here, or it is not what called us
            return data
        write({STEP: data})
    return data


def _details(reading: Reading) -> dict[str, Any]:
    usage, steps = reading.usage, reading.steps
    metadata = {
        "model": reading.model,
        "chunks": len(steps) - 1,
        "calls": len(steps),
        "outcomes": dict(Tally(step.outcome for step in steps)),
        "cut": [step.index for step in steps if step.cut],
        "finish_reason": steps[-1].reply.finish_reason,
        "memory": reading.memory,
    }
    read, written = usage.prompt_tokens, usage.completion_tokens
    if read is None or written is None:
        return {"response_metadata": {"memagent": metadata}}
    total = UsageMetadata(input_tokens=read, output_tokens=written, total_tokens=read + written)
    if usage.cached_tokens is not None:
        total["input_token_details"] = {"cache_read": usage.cached_tokens}
    return {"response_metadata": {"memagent": metadata}, "usage_metadata": total}


def _message(reading: Reading) -> AIMessage:
    return AIMessage(content=reading.answer or "", **_details(reading))


def _chunk(event: str | Reading) -> AIMessageChunk:
    if isinstance(event, str):
        return AIMessageChunk(content=event)
    return AIMessageChunk(content="", chunk_position="last", **_details(event))


def _merged(pieces: list[Any]) -> Any:
    """The input that a step before has streamed in pieces: text of the question joined, parts of the context in a row."""
    question, contexts = "", []
    for piece in pieces:
        if not isinstance(piece, Mapping) or not isinstance(piece.get("question", ""), str):
            raise UsageError(
                "a stream to read has to bring dicts with 'question' (text) and 'context'; or bind the question: reader.bind(question=...)"
            )
        whole = "context" in piece and "question" in piece
        if whole and question not in ("", piece["question"]):
            raise UsageError("the stream brings more than one question")
        question = piece["question"] if whole else question + piece.get("question", "")
        contexts += [piece["context"]] if "context" in piece else []
    if not contexts:
        raise UsageError("the stream brings no context to read")
    return {"question": question, "context": contexts[0] if len(contexts) == 1 else contexts}


async def _achain(head: list[Any], rest: AsyncIterator[Any] | None = None) -> AsyncGenerator[Any]:
    for item in head:
        yield item
    if rest:
        async for item in rest:
            yield item

"""A chat model that follows a script, readers over it, and inputs for the tests of LangChain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import Field

from memagent_integrations import MemAgentReader, ScriptedBackend
from memagent_integrations.langchain import ReaderInput
from memagent_integrations.records import Prompt

count = ScriptedBackend([]).count
DOCUMENT = "Some words of a long document. " * 100  # 700 of the scripted tokens: four chunks of 200
INPUT: ReaderInput = {"question": "Why?", "context": DOCUMENT}
SMALL: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50}
ANSWER = "the answer is seven"
WAYS = ["invoke", "ainvoke", "stream", "astream"]


def say(text: str) -> str:
    """Return the memory with one more note, or the answer."""
    old = text.partition("<memory>\n")[2].partition("\n</memory>")[0]
    return f"{'' if old.startswith('(empty') else old} note".strip() if "<section>" in text else ANSWER


class Model(BaseChatModel):
    """Reply with `script(prompt)`, word by word in a stream; `prompts` and `options` are the history."""

    script: Callable[[str], str | AIMessage] = say
    prompts: list[str] = Field(default_factory=list, repr=False)
    options: list[dict[str, Any]] = Field(default_factory=list, repr=False)
    usage: bool = True
    failures: list[BaseException] = Field(default_factory=list, repr=False)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _answer(self, messages: list[BaseMessage], options: dict[str, Any]) -> AIMessage:
        self.prompts.append(str(messages[-1].text))
        self.options.append(options)
        if self.failures:
            raise self.failures.pop(0)
        reply = self.script(self.prompts[-1])
        if isinstance(reply, AIMessage):
            return reply
        usage = (
            {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12, "input_token_details": {"cache_read": 4}}
            if self.usage
            else None
        )
        return AIMessage(
            reply, usage_metadata=usage, response_metadata={"finish_reason": "stop", "model_name": "scripted-1"}
        )

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages, options))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages, options))])

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> Iterator[ChatGenerationChunk]:
        whole = self._answer(messages, options)
        for word in str(whole.text).replace(" ", "| ").split("|"):
            yield ChatGenerationChunk(message=AIMessageChunk(word))
        yield ChatGenerationChunk(
            message=AIMessageChunk(
                "",
                usage_metadata=whole.usage_metadata,
                response_metadata=whole.response_metadata,
                chunk_position="last",
            )
        )

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in self._stream(messages, **options):
            yield chunk


def failing(at: int, error: BaseException | None = None) -> Model:
    """Return a model whose call number `at`, counted from 0, fails once."""
    model = Model()

    def script(text: str) -> str:
        if len(model.prompts) == at + 1:
            raise error or ConnectionError("the server is gone")
        return say(text)

    model.script = script
    return model


def sections(model: Model) -> list[str]:
    """Return the sections of the document that the model was shown."""
    return [
        text.partition("<section>\n")[2].partition("\n</section>")[0] for text in model.prompts if "<section>" in text
    ]


def reader(model: Any = None, **settings: Any) -> MemAgentReader:
    return MemAgentReader(model or Model(), **({"tokenizer": count} | SMALL | settings))


def scripted(**settings: Any) -> MemAgentReader:
    def script(prompt: Prompt) -> str:
        return f"note {prompt.index}" if prompt.phase == "memory" else ANSWER

    return MemAgentReader(ScriptedBackend(script), **(SMALL | settings))


def total(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


class Loader(BaseLoader):
    def __init__(self, pages: int = 4) -> None:
        self.pages, self.yielded = pages, 0

    def lazy_load(self) -> Iterator[Document]:
        for number in range(self.pages):
            self.yielded += 1
            yield Document(f"Page {number} has some words. " * 30, metadata={"source": "book", "page": number})


class Retriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(f"what is said of {query}")]


async def call(subject: Any, how: str, value: Any = INPUT, config: Any = None) -> Any:
    """Call the subject in one of the `WAYS`; return its output, summed over a stream."""
    if how == "invoke":
        return subject.invoke(value, config)
    if how == "ainvoke":
        return await subject.ainvoke(value, config)
    return total(
        list(subject.stream(value, config))
        if how == "stream"
        else [chunk async for chunk in subject.astream(value, config)]
    )


async def traced(subject: Any, how: str, value: Any = INPUT) -> Any:
    """Return the run of a call."""
    collector = RunCollectorCallbackHandler()
    await call(subject, how, value, {"callbacks": [collector], "tags": ["mine"], "metadata": {"user": "u"}})
    (root,) = collector.traced_runs
    return root

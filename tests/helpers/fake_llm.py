"""A LlamaIndex LLM that follows a script, and the documents and readers that tests of LlamaIndex share."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.llms import ChatMessage, ChatResponse, LLMMetadata
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import Document, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from pydantic import Field

from memagent_integrations import ScriptedBackend
from memagent_integrations.records import Message, Prompt

SIZES: dict[str, Any] = {"chunk_tokens": 200, "memory_tokens": 50, "output_tokens": 50}
ANSWER = "the code is seven"


class FakeLLM(MockFunctionCallingLLM):
    """Reply with `script(prompt)`, word by word in a stream, and report usage; `calls` is the history."""

    script: Callable[[str], Any]
    api_key: str = ""
    context: int = 8192
    raw: dict[str, Any] = Field(default_factory=dict)  # replaces fields of the raw response
    calls: list[tuple[str, list[ChatMessage], dict[str, Any]]] = Field(default_factory=list)
    arrive: Any = None  # awaited before each `achat`

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self.context, is_chat_model=True, model_name="fake")

    @classmethod
    def class_name(cls) -> str:
        return "FakeLLM"

    def respond(self, method: str, messages: Any, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Return the words of the reply and the raw response."""
        self.calls.append((method, list(messages), options))
        reply = self.script(messages[-1].content)
        if isinstance(reply, BaseException):
            raise reply
        words = re.findall(r"\s?\S+", reply)
        kept = words[: options.get("max_tokens", 10**6)]
        usage = {
            "prompt_tokens": sum(len(Settings.tokenizer(message.content)) for message in messages),
            "completion_tokens": len(kept),
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        finish_reason = "stop" if kept == words else "length"
        return kept, {"choices": [{"finish_reason": finish_reason}], "usage": usage} | self.raw

    @llm_chat_callback()
    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        words, raw = self.respond("chat", messages, kwargs)
        return ChatResponse(message=ChatMessage(role="assistant", content="".join(words)), raw=raw)

    @llm_chat_callback()
    def stream_chat(self, messages: Any, **kwargs: Any) -> Iterator[ChatResponse]:
        words, raw = self.respond("stream_chat", messages, kwargs)
        return stream_of(words, raw)

    @llm_chat_callback()
    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        if self.arrive:
            await self.arrive()
        words, raw = self.respond("achat", messages, kwargs)
        return ChatResponse(message=ChatMessage(role="assistant", content="".join(words)), raw=raw)

    @llm_chat_callback()
    async def astream_chat(self, messages: Any, **kwargs: Any) -> AsyncIterator[ChatResponse]:
        words, raw = self.respond("astream_chat", messages, kwargs)

        async def stream() -> AsyncGenerator[ChatResponse]:
            for response in stream_of(words, raw):
                await asyncio.sleep(0)
                yield response

        return stream()


def stream_of(words: list[str], raw: dict[str, Any]) -> Iterator[ChatResponse]:
    for number, word in enumerate(words, 1):
        yield ChatResponse(message=ChatMessage(role="assistant", content="".join(words[:number])), delta=word)
    yield ChatResponse(message=ChatMessage(role="assistant", content="".join(words)), delta="", raw=raw)


def one_note(prompt: str) -> str:
    return "one note" if "<section>" in prompt else ANSWER


def fake(script: Callable[[str], Any] = one_note, **fields: Any) -> FakeLLM:
    return FakeLLM(script=script, **fields)


class FixedRetriever(BaseRetriever):
    """Return the same nodes for every query; `queries` is the history."""

    def __init__(self, nodes: list[NodeWithScore]) -> None:
        self.nodes = nodes
        self.queries: list[str] = []
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.queries.append(f"sync {query_bundle.query_str}")
        return self.nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.queries.append(f"async {query_bundle.query_str}")
        return self.nodes


class ServerError(Exception):
    """An SDK's error for an HTTP status."""

    def __init__(self, status: int, message: str = "no") -> None:
        super().__init__(message)
        self.status_code = status


def prompt(text: str = "hello", phase: Any = "answer") -> Prompt:
    return Prompt(index=0, phase=phase, messages=(Message(role="user", content=text),), max_tokens=12)


def scripted() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: f"note {prompt.index}" if prompt.phase == "memory" else ANSWER)


def documents() -> list[Document]:
    days = "".join(f"Day {number} was fair. " for number in range(100))
    nights = "".join(f"Night {number} was dark. " for number in range(60))
    hidden = ["file"]  # from the prompts: what is shown there is the text alone
    return [
        Document(text=days, id_="first", metadata={"file": "a.txt"}, excluded_llm_metadata_keys=hidden),
        Document(text=nights, id_="second", metadata={"file": "b.txt"}, excluded_llm_metadata_keys=hidden),
    ]


def text_read(backend: ScriptedBackend) -> str:
    """Return all sections that the backend was shown, in order."""
    sections = [
        re.search(r"<section>\n(.*)\n</section>", prompt.messages[0].content, re.DOTALL)
        for prompt in backend.prompts
        if prompt.phase == "memory"
    ]
    return "".join(section[1] for section in sections if section)


async def pieces_of(response: Any) -> list[str]:
    """Return the pieces of an asynchronous stream."""
    assert isinstance(response, AsyncStreamingResponse)
    return [text async for text in response.response_gen]

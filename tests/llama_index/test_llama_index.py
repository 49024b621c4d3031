from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import BackendContract
from helpers.fake_llm import (
    ANSWER,
    SIZES,
    FakeLLM,
    FixedRetriever,
    ServerError,
    documents,
    fake,
    one_note,
    pieces_of,
    prompt,
    scripted,
    text_read,
)
from llama_index.core import SimpleDirectoryReader
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.llms import ChatMessage, ChatResponse, LLMMetadata, MockLLM
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate
from llama_index.core.readers.base import BaseReader
from llama_index.core.schema import Document, NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings
from pydantic import BaseModel

import memagent_integrations
from memagent_integrations import (
    BackendError,
    ContextOverflow,
    MemAgentQueryEngine,
    MemAgentSynthesizer,
    PromptSet,
    ScriptedBackend,
    UsageError,
)
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Reply, Usage

# The backend over an LLM


class TestContract(BackendContract):
    @pytest.fixture
    def backend(self) -> LLMBackend:
        def script(text: str) -> str | ValueError:
            size = len(Settings.tokenizer(text))
            if "JSON schema" in text:
                return '{"name": "Jupiter", "gas": true}'
            return (
                ValueError(f"{size} tokens exceed the context window of 8192")
                if size > 8192
                else "red and green and blue"
            )

        return LLMBackend(fake(script), limit_parameter="max_tokens")


@pytest.mark.parametrize(
    ("raw", "extra", "usage"),
    [
        ({"usage": {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 1}}, {}, (5, 2, 1)),
        ({"usage_metadata": {"prompt_token_count": 5, "candidates_token_count": 2}}, {}, (5, 2, None)),
        (None, {"prompt_tokens": 5, "completion_tokens": 2}, (5, 2, None)),
        (None, {}, (None, None, None)),
        ({"usage": None}, {}, (None, None, None)),
        (
            {"usage": {"prompt_tokens": 5, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}},
            {},
            (5, 0, 0),
        ),
    ],
)
def test_usage_is_found_or_unknown(raw: Any, extra: dict[str, Any], usage: tuple[Any, ...]) -> None:
    class Reporting(FakeLLM):
        @llm_chat_callback()
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            return ChatResponse(message=ChatMessage(content="yes"), raw=raw, additional_kwargs=extra)

    reply = LLMBackend(Reporting(script=one_note)).complete(prompt())
    assert reply.usage == Usage(prompt_tokens=usage[0], completion_tokens=usage[1], cached_tokens=usage[2])


def test_the_sdk_s_own_objects_are_understood() -> None:
    chat = pytest.importorskip("openai.types.chat")
    raw = chat.ChatCompletion.model_validate(
        {
            "id": "1",
            "created": 1,
            "model": "m",
            "object": "chat.completion",
            "choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "yes"}}],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 1,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
    )

    class Typed(FakeLLM):
        @llm_chat_callback()
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            return ChatResponse(message=ChatMessage(content="yes"), raw=raw)

    reply = LLMBackend(Typed(script=one_note)).complete(prompt())
    assert (reply.usage, reply.finish_reason) == (
        Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=4),
        "length",
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"stop_reason": "max_tokens"}, "length"),
        ({"stop_reason": "end_turn"}, "stop"),
        ({"done_reason": "stop"}, "stop"),
        ({"choices": [{"finish_reason": "content_filter"}]}, "content_filter"),
        ({"choices": []}, None),
        ({}, None),
    ],
)
def test_the_finish_reason_has_one_language(raw: dict[str, Any], reason: str | None) -> None:
    class Ending(FakeLLM):
        @llm_chat_callback()
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            return ChatResponse(message=ChatMessage(content="yes"), raw=raw)

    assert LLMBackend(Ending(script=one_note)).complete(prompt()).finish_reason == reason


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage(role="assistant", blocks=[ThinkingBlock(content="hm"), *ChatMessage(content="yes").blocks]),
        ChatMessage(role="assistant", content="yes", additional_kwargs={"reasoning_content": "hm"}),
    ],
)
def test_reasoning_stays_apart(message: ChatMessage) -> None:
    class Thinking(FakeLLM):
        @llm_chat_callback()
        def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
            return ChatResponse(message=message)

        @llm_chat_callback()
        def stream_chat(self, messages: Any, **kwargs: Any) -> Iterator[ChatResponse]:
            yield ChatResponse(
                message=ChatMessage(role="assistant"), delta="", additional_kwargs={"thinking_delta": "hm"}
            )
            yield ChatResponse(
                message=ChatMessage(role="assistant", content="yes")
            )  # no delta: all that was said so far

    backend = LLMBackend(Thinking(script=one_note))
    assert (backend.complete(prompt()).text, backend.complete(prompt()).reasoning) == ("yes", "hm")
    text, reply = backend.stream(prompt())
    assert isinstance(reply, Reply)
    assert (text, reply.text, reply.reasoning) == ("yes", "yes", "hm")


def test_the_llm_s_system_prompt_opens_the_prompt_and_counts() -> None:
    llm = fake(system_prompt="Answer like a pirate.")
    backend = LLMBackend(llm)
    backend.complete(prompt())
    assert [(message.role.value, message.content) for message in llm.calls[0][1]] == [
        ("system", "Answer like a pirate."),
        ("user", "hello"),
    ]
    assert backend.template_tokens == LLMBackend(fake()).template_tokens + backend.count("Answer like a pirate.")


def test_the_limit_goes_only_to_llms_that_take_it() -> None:
    class OpenAI(FakeLLM):
        pass

    for llm, name, expected in [
        (fake(), None, {}),
        (OpenAI(script=one_note), None, {"max_tokens": 12}),
        (fake(), "n", {"n": 12}),
    ]:
        LLMBackend(llm, limit_parameter=name).complete(prompt())
        assert llm.calls[0][2] == expected


def test_tokens_are_llama_index_s_unless_a_tokenizer_is_given() -> None:
    assert LLMBackend(fake()).count("Hello, world!") == len(Settings.tokenizer("Hello, world!")) == 4
    assert LLMBackend(fake(), tokenizer="approximate").count("aaaaaa") == 2
    assert LLMBackend(fake(), tokenizer=len).count("abc") == 3
    assert LLMBackend(fake(), tokenizer=lambda text: 1 + len(text)).count("") == 0


def test_a_tokenizer_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_index.core.global_tokenizer", None)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.warns(UserWarning, match="tokenizer='approximate'"):
        assert LLMBackend(fake()).count("aaaaaa") == 2
    assert LLMBackend(fake(), tokenizer="approximate").count("aaaaaa") == 2


def test_the_window_is_the_llm_s_where_it_knows_it() -> None:
    assert LLMBackend(fake(context=32000)).window == 32000
    assert LLMBackend(MockLLM()).window is None, "3,900 is LlamaIndex's way of saying that it does not know"
    assert LLMBackend(MockLLM(), window=4096).window == 4096
    assert LLMBackend(MockLLM()).name == "llama-index:MockLLM"


def test_an_llm_that_does_not_know_its_model() -> None:
    class Unknown(FakeLLM):
        @property
        def metadata(self) -> LLMMetadata:
            raise ValueError("Unknown model 'gpt-99'")

    with pytest.raises(UsageError, match="OpenAILike"):
        MemAgentSynthesizer(Unknown(script=one_note)).get_response("q", ["text"])


async def test_a_synchronous_llm_does_not_block_the_event_loop() -> None:
    """MockLLM, a CustomLLM, has async methods that call the sync ones."""
    threads = []

    class Noting(MockLLM):
        def _generate_text(self, length: int) -> str:
            threads.append(threading.current_thread())
            return super()._generate_text(length)

    backend = LLMBackend(Noting(max_tokens=3))
    assert (await backend.acomplete(prompt())).text == "text text text"
    *texts, reply = [piece async for piece in backend.astream(prompt())]
    assert [str(text).strip() for text in texts] == ["text", "text", "text"]  # older versions end with a space
    assert isinstance(reply, Reply)
    assert len(threads) == 4
    assert threading.main_thread() not in threads


class ContextWindowExceededError(Exception):
    pass


class ReadTimeoutError(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "expected", "retryable"),
    [
        (ServerError(429), BackendError, True),
        (ServerError(503), BackendError, True),
        (ServerError(401), BackendError, False),
        (ServerError(404), BackendError, False),
        (ServerError(400, "maximum context length is 8192 tokens"), ContextOverflow, None),
        (ContextWindowExceededError("too long"), ContextOverflow, None),
        (ReadTimeoutError("slow"), BackendError, True),
        (ConnectionResetError("gone"), BackendError, True),
        (RuntimeError("the model fell over"), BackendError, False),
        (BackendError("ours"), BackendError, False),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_failures_of_the_model_are_ours(
    raised: Exception, expected: type[Exception], retryable: bool | None, streaming: bool
) -> None:
    def script(text: str) -> Any:
        return "note" if "<section>" in text else raised

    synthesizer = MemAgentSynthesizer(fake(script), streaming=streaming, **SIZES)

    def consumed() -> None:
        response: Any = synthesizer.synthesize("q", [NodeWithScore(node=documents()[0])])
        list(response.response_gen)

    with pytest.raises(expected) as sync:
        consumed()
    with pytest.raises(expected) as asynchronous:
        await pieces_of(await synthesizer.asynthesize("q", [NodeWithScore(node=documents()[0])]))
    for caught in (sync.value, asynchronous.value):
        assert getattr(caught, "retryable", None) == retryable
        assert caught is raised or caught.__cause__ is raised
        assert caught.reading.memory == "note"  # type: ignore[attr-defined]


class Pieces:
    """An iterator of both kinds that cannot be closed."""

    def __init__(self, *items: Any) -> None:
        self._items = iter(items)

    def __iter__(self) -> Pieces:
        return self

    def __next__(self) -> Any:
        return next(self._items)

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            return item
        raise StopAsyncIteration


def piece(content: str | None, delta: str | None) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role="assistant", content=content), delta=delta)


class Odd(FakeLLM):
    """Gives what `script` gives, and no callback looks at it."""

    def chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.script("")

    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.script("")

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        return self.script("")

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.script("")


class Watched(Odd):
    chat, achat = llm_chat_callback()(Odd.chat), llm_chat_callback()(Odd.achat)
    stream_chat, astream_chat = llm_chat_callback()(Odd.stream_chat), llm_chat_callback()(Odd.astream_chat)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ((piece("a", "a"), piece("ab", "b")), "ab"),
        ((piece("a", None), piece("ab", None), piece(None, None)), "ab"),
        ((piece(None, None),), ""),
    ],
)
async def test_any_iterator_is_a_stream(items: tuple[ChatResponse, ...], text: str) -> None:
    backend = LLMBackend(Odd(script=lambda _: Pieces(*items)))
    *texts, reply = backend.stream(prompt())
    *later, same = [each async for each in backend.astream(prompt())]
    assert isinstance(reply, Reply)
    assert isinstance(same, Reply)
    assert "".join(map(str, texts)) == "".join(map(str, later)) == reply.text == same.text == text
    *texts, reply = LLMBackend(Odd(script=lambda _: list(items))).stream(prompt())
    assert isinstance(reply, Reply)
    assert reply.text == text


@pytest.mark.parametrize("kind", [Odd, Watched])
@pytest.mark.parametrize("said", [None, "text", Pieces, lambda: Pieces(None), lambda: Pieces(piece("a", "a"), "b")])
async def test_what_is_no_reply_is_a_failure_of_the_model(kind: type[Odd], said: Any) -> None:
    def script(_: str) -> Any:
        return said() if callable(said) else said

    backend = LLMBackend(kind(script=script))
    with pytest.raises(BackendError):
        backend.complete(prompt())
    with pytest.raises(BackendError):
        await backend.acomplete(prompt())
    with pytest.raises(BackendError):
        list(backend.stream(prompt()))
    with pytest.raises(BackendError):
        [each async for each in backend.astream(prompt())]


@pytest.mark.parametrize("mistake", [TypeError("no such argument"), AttributeError("x"), ValueError("bad value")])
def test_mistakes_in_code_pass_through(mistake: Exception) -> None:
    with pytest.raises(type(mistake), match=str(mistake)):
        MemAgentSynthesizer(fake(lambda _: mistake)).get_response("q", ["text"])


def test_a_key_never_shows_in_a_message() -> None:
    llm = fake(lambda _: ServerError(401, "bad key swordfish-1"), api_key="swordfish-1")
    with pytest.raises(BackendError, match=r"\*\*\*") as caught:
        LLMBackend(llm).complete(prompt())
    assert "swordfish" not in str(caught.value)


# The default model


def test_models_of_every_kind() -> None:
    for model in (fake(), scripted()):
        assert MemAgentSynthesizer(model, **SIZES).get_response("q", ["some text"]) == ANSWER
    assert MemAgentSynthesizer("openai:gpt-test", window=8192).reader.backend.name == "openai:gpt-test"


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": scripted()}, "called llm"),
        ({"llm": fake(), "answer_model": scripted()}, "answer_llm"),
        ({"llm": 7}, "not int"),
        ({"llm": "no-such-model"}, "unknown model"),
        ({"llm": scripted(), "tokenizer": "approximate"}, "tokenizer"),
        ({"llm": scripted(), "chunk_tokens": 0}, "chunk_tokens"),
        ({"llm": scripted(), "prompts": PromptSet.default(), "layout": "memory-first"}, "not both"),
    ],
)
def test_wrong_settings_are_said_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MemAgentSynthesizer(**arguments)


def test_a_model_in_place_of_a_synthesizer_is_told_where_it_belongs() -> None:
    with pytest.raises(UsageError, match=r"synthesizer of LlamaIndex, not ScriptedBackend; .*from_documents"):
        MemAgentQueryEngine([Document(text="text")], scripted())  # type: ignore[arg-type]


# Reading


async def test_only_the_answer_is_streamed_and_only_async_methods_are_awaited() -> None:
    llm = fake()
    engine = MemAgentQueryEngine.from_documents(documents(), llm, streaming=True, **SIZES)
    list(engine.query("q").response_gen)  # type: ignore[union-attr, arg-type]
    assert {name for name, *_ in llm.calls[:-1]} == {"chat"}
    assert llm.calls[-1][0] == "stream_chat"
    llm.calls.clear()
    await pieces_of(await engine.aquery("q"))
    assert {name for name, *_ in llm.calls[:-1]} == {"achat"}
    assert llm.calls[-1][0] == "astream_chat"


async def test_everything_that_holds_text_is_read_whole() -> None:
    class Folder(BaseReader):
        def lazy_load_data(self, *_: Any, **__: Any) -> Iterator[Document]:
            yield from documents()

    async def later() -> AsyncIterator[Document]:
        for each in documents():
            await asyncio.sleep(0)
            yield each

    text = documents()[0].text + "\n\n" + documents()[1].text
    for source in (documents(), iter(documents()), Folder(), text):
        backend = scripted()
        response = MemAgentQueryEngine.from_documents(source, backend, **SIZES).query("q")
        assert text_read(backend) == text
        assert "\n\n".join(source.text for source in response.source_nodes) in (text, "\n\n"), "an iterator is not kept"
    backend = scripted()
    response = await MemAgentQueryEngine.from_nodes(later(), backend, **SIZES).aquery("q")
    assert text_read(backend) == text
    assert {source.node.metadata["file"] for source in response.source_nodes} == {"a.txt", "b.txt"}
    with pytest.raises(UsageError, match="async"):
        MemAgentQueryEngine.from_nodes(later(), backend, **SIZES).query("q")
    backend = scripted()
    assert str(MemAgentQueryEngine(documents()[0], MemAgentSynthesizer(backend, **SIZES)).query("q")) == ANSWER
    assert text_read(backend) == documents()[0].text


async def test_a_query_that_is_refused_uses_up_nothing() -> None:
    async def later() -> AsyncIterator[Document]:
        for each in documents():
            yield each

    for wrong in ("", " \n", "too long " * 1100):
        engine = MemAgentQueryEngine.from_documents(iter(documents()), scripted(), **SIZES)
        with pytest.raises(UsageError, match="question"):
            engine.query(wrong)
        assert str(engine.query("q")) == ANSWER
    engine = MemAgentQueryEngine.from_documents(later(), scripted(), **SIZES)
    with pytest.raises(UsageError, match="question is empty"):
        await engine.aquery("")
    assert str(await engine.aquery("q")) == ANSWER
    with pytest.raises(UsageError, match="earlier query"):
        await engine.aquery("q")
    retriever = FixedRetriever([])
    for source in (
        MemAgentQueryEngine.from_retriever(retriever, scripted()),
        MemAgentQueryEngine.from_documents([], scripted()),
    ):
        with pytest.raises(UsageError, match="question is empty"):
            source.query("")
        with pytest.raises(UsageError, match="question is empty"):
            await source.aquery("")
    assert retriever.queries == []


def test_scored_nodes_come_in_document_order() -> None:
    splitter = TokenTextSplitter(chunk_size=60, chunk_overlap=0)
    nodes = splitter.get_nodes_from_documents(documents())
    firsts = [node for node in nodes if node.ref_doc_id == "first"]
    shuffled = [NodeWithScore(node=node, score=float(number)) for number, node in enumerate(reversed(nodes))]
    backend = scripted()
    response = MemAgentSynthesizer(backend, **SIZES).synthesize("q", shuffled)
    sources: list[Any] = [source.node for source in response.source_nodes if source.node.ref_doc_id == "first"]
    starts = [source.start_char_idx for source in sources]
    assert len(starts) > 3
    assert starts == sorted(starts)
    assert text_read(backend).rindex(firsts[0].get_content()[:20]) < text_read(backend).rindex(
        firsts[-1].get_content()[-20:]
    )
    scores = {item.node.node_id: item.score for item in shuffled}
    assert all(source.score == scores[source.node.node_id.split(":")[0]] for source in response.source_nodes)


def test_source_nodes_are_light_and_whole_nodes_keep_their_id() -> None:
    nodes = [TextNode(id_=f"n{number}", text=f"Short note {number}.", metadata={"page": number}) for number in range(3)]
    response = MemAgentSynthesizer(scripted(), include_text=False, **SIZES).synthesize(
        "q", [NodeWithScore(node=node, score=0.5) for node in nodes]
    )
    assert [(source.node.node_id, source.score, source.node.metadata) for source in response.source_nodes] == [
        (f"n{number}", 0.5, {"page": number}) for number in range(3)
    ]
    assert all(source.text == "" for source in response.source_nodes)


def test_nodes_that_do_not_know_their_place_are_told_apart() -> None:
    parents = TokenTextSplitter(chunk_size=60, chunk_overlap=0).get_nodes_from_documents(documents()[:1])
    nodes = [
        TextNode(id_=node.node_id, text=node.get_content(), metadata={"part": number}, relationships=node.relationships)
        for number, node in enumerate(parents)
    ]
    assert len({node.ref_doc_id for node in nodes}) == 1
    response = MemAgentSynthesizer(scripted(), include_text=True, **SIZES).synthesize(
        "q", [NodeWithScore(node=node) for node in nodes]
    )
    for source in response.source_nodes:
        original = nodes[source.node.metadata["part"]]
        assert source.text == original.text[source.node.start_char_idx : source.node.end_char_idx]  # type: ignore[attr-defined]
    assert {source.node.metadata["part"] for source in response.source_nodes} == set(range(len(nodes)))


def test_a_node_split_between_chunks_and_overlapping_nodes() -> None:
    text = "".join(f"Sentence {number} of the text. " for number in range(200))
    whole = Document(text=text, id_="doc")
    nodes = TokenTextSplitter(chunk_size=300, chunk_overlap=60).get_nodes_from_documents([whole])
    response = MemAgentSynthesizer(scripted(), include_text=True, **SIZES).synthesize("q", nodes)
    for source in response.source_nodes:
        assert isinstance(source.node, TextNode)
        assert source.text == text[source.node.start_char_idx : source.node.end_char_idx] != ""


async def test_metadata_tells_the_steps_the_memory_and_the_usage() -> None:
    llm = fake()
    engine = MemAgentQueryEngine.from_documents(documents(), llm, **SIZES)
    streaming = MemAgentQueryEngine.from_documents(documents(), llm, streaming=True, **SIZES)
    expected = engine.query("q").metadata["memagent"]  # type: ignore[index]
    assert expected["model"] == "llama-index:FakeLLM:fake"
    assert expected["memory"] == "one note"
    assert [step["phase"] for step in expected["steps"]] == ["memory"] * (len(llm.calls) - 1) + ["answer"]
    assert expected["steps"][0]["outcome"] == "updated"
    assert expected["usage"]["prompt_tokens"] == sum(step["prompt_tokens"] for step in expected["steps"]) > 0
    assert expected["usage"]["completion_tokens"] == 2 * (len(llm.calls) - 1) + 4

    def timeless(response: Any) -> Any:
        details = response.metadata["memagent"]
        return {**details, "steps": [{**step, "seconds": None} for step in details["steps"]]}

    stream = streaming.query("q")
    assert len(timeless(stream)["steps"]) == len(expected["steps"]) - 1, "the answer is still to come"
    list(stream.response_gen)  # type: ignore[union-attr, arg-type]
    astream = await streaming.aquery("q")
    await pieces_of(astream)
    assert timeless(stream) == timeless(astream) == timeless(engine.query("q")) == timeless(await engine.aquery("q"))
    unknown = MemAgentQueryEngine.from_documents(documents(), fake(raw={"usage": None}), **SIZES).query("q")
    assert unknown.metadata["memagent"]["usage"] == {
        "prompt_tokens": None,
        "completion_tokens": None,
        "cached_tokens": None,
    }  # type: ignore[index]


async def test_no_nodes_no_reading() -> None:
    for streaming in (False, True):
        synthesizer = MemAgentSynthesizer(scripted(), streaming=streaming, empty_response="Nothing found.")
        assert str(synthesizer.synthesize("q", [])) == "Nothing found."
        response = await synthesizer.asynthesize("q", [])
        assert (await pieces_of(response) if streaming else [str(response)]) == ["Nothing found."]
    assert str(MemAgentSynthesizer(scripted()).synthesize("q", [])) == "Empty Response"
    assert str(MemAgentSynthesizer(scripted()).synthesize("q", iter([]))) == "Empty Response"


def test_what_is_no_node() -> None:
    backend = scripted()
    response = MemAgentSynthesizer(backend, **SIZES).synthesize("q", ["a line\n", "another\n"])
    assert text_read(backend) == "a line\nanother\n"
    assert [(source.node.node_id, source.node.metadata) for source in response.source_nodes] == [("text-1", {})]
    for wrong in (b"bytes", {"text": "in a dict"}, 7):
        with pytest.raises(UsageError):
            MemAgentSynthesizer(backend, **SIZES).synthesize("q", wrong)


class Code(BaseModel):
    gate: str
    number: int


async def test_a_structured_llm_answers_with_its_object() -> None:
    llm = fake(
        lambda text: '{"gate": "north", "number": 7}' if "JSON" in text else "one note", pydantic_program_mode="llm"
    )
    engine = MemAgentQueryEngine.from_documents(documents(), llm.as_structured_llm(Code), **SIZES)
    for response in (engine.query("q"), await engine.aquery("q")):
        assert isinstance(response, PydanticResponse)
        assert response.response == Code(gate="north", number=7)
        assert response.metadata is not None
        assert response.metadata["memagent"]["memory"] == "one note"
    with pytest.raises(UsageError, match="streamed"):
        MemAgentSynthesizer(llm.as_structured_llm(Code), streaming=True)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"gate": 3}', "no Code: gate: Input should be a valid string; number: Field required"),
        ("seven", "no Code: .* seven"),
        ("", "no Code"),
    ],
)
async def test_an_answer_that_is_not_the_object(said: str, reason: str) -> None:
    llm = fake(lambda text: said if "JSON" in text else "one note", pydantic_program_mode="llm")
    engine = MemAgentQueryEngine.from_documents(documents(), llm.as_structured_llm(Code), **SIZES)
    with pytest.raises(BackendError, match=reason) as caught:
        engine.query("q")
    assert caught.value.reading
    assert caught.value.reading.memory == "one note"
    with pytest.raises(BackendError, match=reason):
        await engine.aquery("q")


async def test_failures_behind_an_object_are_what_they_are() -> None:
    for raised, expected in [
        (ValueError("maximum context length is 8192"), ContextOverflow),
        (ServerError(503), BackendError),
        (TypeError("x"), TypeError),
    ]:
        structured = fake(
            lambda text, raised=raised: raised if "JSON" in text else "note", pydantic_program_mode="llm"
        ).as_structured_llm(Code)  # type: ignore[misc]
        with pytest.raises(expected):
            MemAgentSynthesizer(structured, **SIZES).get_response("q", ["text"])


# Prompts


def test_prompts_can_be_seen_and_changed() -> None:
    backend = scripted()
    engine = MemAgentQueryEngine.from_documents(documents(), backend, **SIZES)
    default = PromptSet.default()
    shown = {name: template.get_template() for name, template in engine.get_prompts().items()}
    assert shown == {"response_synthesizer:memory": default.update, "response_synthesizer:answer": default.answer}
    renamed = PromptTemplate(
        "Q: {query_str} N: {memory} T: <section>\n{section}\n</section> {style}",
        template_var_mappings={"question": "query_str"},
    ).partial_format(style="Be brief.")
    engine.update_prompts({"response_synthesizer:memory": renamed})
    engine.query("Why?")
    assert (
        backend.prompts[0]
        .messages[0]
        .content.startswith("Q: Why? N: (empty: nothing noted yet) T: <section>\nDay 0 was")
    )
    assert backend.prompts[0].messages[0].content.endswith("Be brief.")
    assert backend.prompts[-1].messages[0].content.startswith("A long document was read")
    engine.update_prompts({"response_synthesizer:answer": PromptTemplate("{question} {memory} Put it in \\boxed{}.")})
    synthesizer: Any = engine._get_prompt_modules()["response_synthesizer"]
    prompts = synthesizer.reader.prompts
    assert (prompts.answer_format, prompts.no_change, prompts.name) == ("boxed", None, "custom")
    assert default == PromptSet.default()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"text_qa_template": PromptTemplate("{question} {memory}")}, "no prompt 'text_qa_template'"),
        ({"answer": PromptTemplate("{context} {text}")}, "lacks {question}, {memory}"),
        ({"answer": SelectorPromptTemplate(PromptTemplate("{question}"))}, "lacks {memory}"),
        ({"answer": ChatPromptTemplate([ChatMessage("{question} {memory}", role="tool")])}, "not of tool"),
    ],
)
def test_prompts_that_cannot_be(prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        MemAgentSynthesizer(scripted()).update_prompts(prompts)


def test_prompts_and_layout_go_to_the_reader() -> None:
    backend = scripted()
    MemAgentSynthesizer(backend, layout="memory-first", **SIZES).get_response("Why?", ["text"])
    content = backend.prompts[0].messages[0].content
    assert content.index("<memory>") < content.index("<section>")


# In company


async def test_many_readings_wait_for_their_models_together() -> None:
    """Each call waits until all readings have one in flight: were they made in turn, the first would wait for ever."""
    readings, peak, flying = 6, 0, 0
    barrier = asyncio.Barrier(readings)

    async def arrive() -> None:
        nonlocal peak, flying
        flying += 1
        peak = max(peak, flying)
        await barrier.wait()
        flying -= 1

    engine = MemAgentQueryEngine.from_documents(documents(), fake(arrive=arrive), **SIZES)
    async with asyncio.timeout(60):
        responses = await asyncio.gather(*(engine.aquery(f"question {number}") for number in range(readings)))
    assert peak == readings
    assert {str(response) for response in responses} == {ANSWER}


async def test_a_cancelled_reading_stops() -> None:
    started = asyncio.Event()

    async def arrive() -> None:
        started.set()
        await asyncio.Event().wait()

    llm = fake(arrive=arrive)
    task = asyncio.create_task(MemAgentQueryEngine.from_documents(documents(), llm, **SIZES).aquery("q"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.calls == []


async def test_a_retriever_finds_what_is_read() -> None:
    retriever = FixedRetriever([NodeWithScore(node=document, score=0.5) for document in documents()])
    engine = MemAgentQueryEngine.from_retriever(retriever, scripted(), **SIZES)
    assert str(engine.query("q1")) == str(await engine.aquery("q2")) == ANSWER
    assert retriever.queries == ["sync q1", "async q2"]
    assert engine.retrieve(QueryBundle("q3")) == retriever.nodes
    assert str(MemAgentQueryEngine.from_retriever(FixedRetriever([]), scripted()).query("q")) == "Empty Response"


def test_an_engine_shows_what_it_would_read() -> None:
    for source in (documents(), iter(documents()), [NodeWithScore(node=document) for document in documents()]):
        nodes = MemAgentQueryEngine.from_documents(source, scripted()).retrieve(QueryBundle("q"))
        assert [item.node.node_id for item in nodes] == ["first", "second"]
    (plain,) = MemAgentQueryEngine.from_documents(["plain text"], scripted()).retrieve(QueryBundle("q"))
    assert plain.node.get_content() == "plain text"


@pytest.mark.heavy
def test_the_door() -> None:
    assert memagent_integrations.MemAgentQueryEngine is MemAgentQueryEngine
    script = "import sys; sys.modules['llama_index.core'] = None\nimport memagent_integrations.llama_index"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "MissingExtra" in done.stderr
    assert "[llama-index]'" in done.stderr


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "llama_index_query.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "7319" in output
    assert "log-2.txt" in output


async def test_a_journal(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda prompt: f"note {prompt.index}")
    text = "Some words of a long document. " * 100
    first = MemAgentQueryEngine.from_documents(
        text, backend, chunk_tokens=200, memory_tokens=50, journal=tmp_path / "runs.db"
    ).query("Why?")
    calls = len(backend.prompts)
    engine = MemAgentQueryEngine.from_documents(
        text, backend, chunk_tokens=200, memory_tokens=50, journal=tmp_path / "runs.db"
    )
    assert str(engine.query("Why?")) == str(await engine.aquery("Why?")) == str(first)
    assert len(backend.prompts) == calls, "a complete reading costs nothing"


def test_what_a_first_user_writes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    source = SimpleDirectoryReader(str(tmp_path))
    assert (
        str(MemAgentQueryEngine.from_documents(source, llm=ScriptedBackend(["m", "the answer"])).query("Why?"))
        == "the answer"
    )

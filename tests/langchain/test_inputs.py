"""What may stand for the question, the document and the memory in the input of the runnable."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_chat import ANSWER, DOCUMENT, INPUT, WAYS, Loader, Model, Retriever, call, reader, sections
from langchain_core.document_loaders import BaseLoader, BlobLoader
from langchain_core.documents import Document
from langchain_core.documents.base import Blob
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from memagent_integrations import UsageError

every_way = pytest.mark.parametrize("how", WAYS)


class AsyncLoader(BaseLoader):
    """A loader that can only load async."""

    async def alazy_load(self) -> AsyncIterator[Document]:
        yield Document("loaded without a thread")
        yield Document("and a second page")


class Folder(BlobLoader):
    def __init__(self, path: Path) -> None:
        self.path = path

    def yield_blobs(self) -> Iterator[Blob]:
        yield from map(Blob.from_path, sorted(self.path.iterdir()))


async def section(context: Any, how: str) -> str:
    model = Model()
    assert (await call(reader(model, chunk_tokens=1000), how, {"question": "Why?", "context": context})).text == ANSWER
    (text,) = sections(model)
    return text


@pytest.mark.parametrize("how", ["ainvoke", "astream"])
async def test_a_loader_that_loads_only_async_is_read_by_async_calls(how: str) -> None:
    text = "loaded without a thread\n\nand a second page"
    assert await section(AsyncLoader(), how) == text
    assert await section([Document("before"), AsyncLoader()], how) == f"before\n\n{text}"
    assert (
        await section([Loader(1), AsyncLoader(), "after"], how)
        == f"{'Page 0 has some words. ' * 30}\n\n{text}\n\nafter"
    )


@pytest.mark.parametrize("how", ["invoke", "stream"])
@pytest.mark.parametrize("wrap", [lambda loader: loader, lambda loader: [loader]], ids=["alone", "in a list"])
async def test_a_sync_call_says_that_a_loader_loads_only_async(wrap: Any, how: str) -> None:
    with pytest.raises(UsageError, match=r"AsyncLoader loads only async; read it with .*ainvoke"):
        await section(wrap(AsyncLoader()), how)


@every_way
async def test_blobs_and_blob_loaders_are_documents(how: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}", encoding="utf-8")
    blobs = [Blob.from_path(tmp_path / "a.txt"), Blob.from_data("in memory")]
    assert await section(blobs, how) == "text of a\n\nin memory"
    assert await section(iter(blobs), how) == "text of a\n\nin memory"
    assert await section(Folder(tmp_path), how) == "text of a\n\ntext of b"
    assert await section([Folder(tmp_path), Document("last")], how) == "text of a\n\ntext of b\n\nlast"


RETRIEVERS: dict[str, Runnable[Any, Any]] = {
    "as it is": Retriever(),
    "with_retry": Retriever().with_retry(),
    "with_config": Retriever().with_config(tags=["found"]),
    "with_fallbacks": Retriever().with_fallbacks([Retriever()]),
    "piped": Retriever() | (lambda documents: [Document(page.page_content) for page in documents]),
    "function": RunnableLambda(lambda question: f"what is said of {question}"),
}


@every_way
@pytest.mark.parametrize("kind", RETRIEVERS)
async def test_any_runnable_as_context_is_invoked_with_the_question(kind: str, how: str) -> None:
    assert await section(RETRIEVERS[kind], how) == "what is said of Why?"


@every_way
async def test_a_key_that_the_input_does_not_have_is_an_error_that_names_those_it_has(how: str) -> None:
    with pytest.raises(
        UsageError, match="takes no 'chat_history' in its input, but 'question' and 'context', and 'mem"
    ):
        await call(reader(), how, {**INPUT, "chat_history": []})
    with pytest.raises(UsageError, match="takes no 'documents' in its input"):
        await call(reader(), how, {"question": "Why?", "documents": "x"})


async def test_keys_that_a_chain_adds_are_told_too() -> None:
    chain = RunnablePassthrough.assign(topic=lambda _: "x") | reader()
    with pytest.raises(UsageError, match="takes no 'topic'"):
        chain.invoke(INPUT)
    with pytest.raises(UsageError, match="takes no 'topic'"):
        list(chain.stream(INPUT))


def question_of(model: Model) -> str:
    return model.prompts[-1].partition("<question>\n")[2].partition("\n</question>")[0]


PROMPTS: dict[str, tuple[Any, str]] = {
    "PromptTemplate": (PromptTemplate.from_template("Why is {x}?"), "Why is it?"),
    "human": (ChatPromptTemplate.from_messages([("human", "Why is {x}?")]), "Why is it?"),
    "system and human": (
        ChatPromptTemplate.from_messages([("system", "Be short."), ("human", "Why is {x}?")]),
        "Be short.\n\nWhy is it?",
    ),
    "examples": (
        ChatPromptTemplate.from_messages([("human", "Who?"), ("ai", "Ada"), ("human", "Why is {x}?")]),
        "Human: Who?\nAI: Ada\nHuman: Why is it?",
    ),
}


@every_way
@pytest.mark.parametrize("kind", PROMPTS)
async def test_a_prompt_piped_into_the_reader_is_the_question(kind: str, how: str) -> None:
    prompt, question = PROMPTS[kind]
    model = Model()
    assert (await call(prompt | reader(model).bind(context=DOCUMENT), how, {"x": "it"})).text == ANSWER
    assert question_of(model) == question
    value = {"question": prompt.invoke({"x": "it"}), "context": DOCUMENT}
    assert (await call(reader(model), how, value)).text == ANSWER
    assert question_of(model) == question


@every_way
@pytest.mark.parametrize(
    ("question", "text"),
    [
        (HumanMessage("Why?"), "Why?"),
        (HumanMessage([{"type": "text", "text": "Why?"}]), "Why?"),
        ([SystemMessage("Be short."), HumanMessage("Why?")], "Be short.\n\nWhy?"),
        ([("system", "Be short."), ("user", "Why?")], "Be short.\n\nWhy?"),
        ([HumanMessage("Who?"), AIMessage("Ada"), HumanMessage("Why?")], "Human: Who?\nAI: Ada\nHuman: Why?"),
    ],
    ids=str,
)
async def test_messages_are_a_question(question: Any, text: str, how: str) -> None:
    model = Model()
    await call(reader(model), how, {"question": question, "context": "x"})
    await call(reader(model).bind(context="x"), how, question)
    assert [question_of(model), model.prompts[0].count(text)] == [text, 1]
    assert question_of(model) == text


@pytest.mark.parametrize(
    "question",
    [
        HumanMessage([{"type": "text", "text": "What is this?"}, {"type": "image", "url": "https://a.example/b.png"}]),
        [AIMessage("", tool_calls=[{"name": "find", "args": {}, "id": "1"}])],
        [],
        ["Why?"],
        [7],
        7,
    ],
    ids=["image", "tool call", "no messages", "texts", "numbers", "number"],
)
def test_what_is_no_text_is_no_question(question: Any) -> None:
    with pytest.raises(UsageError, match="question"):
        reader().invoke({"question": question, "context": "x"})


@every_way
async def test_parts_are_bound_in_any_combination(how: str) -> None:
    text, subject = "Some words.", reader()
    for bound, value in (
        ({"question": "Why?"}, text),
        ({"question": "Why?"}, {"context": text}),
        ({"context": text}, "Why?"),
        ({"context": text}, {"question": "Why?"}),
        ({"context": text, "memory": "a note"}, {"question": "Why?"}),
        ({"context": text, "question": "Why?"}, {}),
    ):
        assert (await call(subject.bind(**bound), how, value)).text == ANSWER
    for bound, value, complaint in (
        (
            {"context": text},
            {"question": "Why?", "context": text},
            "the context is in the input, and it is bound as well",
        ),
        ({"context": text}, {"memory": "x"}, "has no question"),
        ({"question": "Why?", "context": text}, "Why?", "has to be a dict"),
    ):
        with pytest.raises(UsageError, match=complaint):
            await call(subject.bind(**bound), how, value)


@every_way
async def test_what_cannot_be_bound_says_where_it_belongs(how: str) -> None:
    for name, where in (
        ("stop", r"MemAgentReader\(model\.bind\(stop=\.\.\.\)\).* backend_options=\{'stop': \.\.\.\}"),
        ("chunk_tokens", r"is a setting of the reader.*MemAgentReader\(\.\.\., chunk_tokens=\.\.\.\)"),
        ("tools", r"MemAgentReader\(model\.bind\(tools=\.\.\.\)\)"),
    ):
        with pytest.raises(UsageError, match=where):
            await call(reader().bind(**{name: 1}), how)


@every_way
async def test_a_memory_in_the_input_is_where_the_reading_starts(how: str) -> None:
    model = Model()
    message = await call(reader(model), how, {**INPUT, "memory": "an old note"})
    assert "<memory>\nan old note\n</memory>" in model.prompts[0]
    assert message.response_metadata["memagent"]["memory"].startswith("an old note note")
    for nothing in ("", None):
        await call(reader(model), how, {**INPUT, "memory": nothing})
        assert "an old note" not in model.prompts[-1]


async def test_a_memory_streams_into_the_reader_with_the_rest() -> None:
    model = Model()
    pieces = [{"question": "Why?"}, {"memory": "an old "}, {"context": "text"}, {"memory": "note"}]
    assert "".join(chunk.text for chunk in reader(model).transform(iter(pieces))) == ANSWER
    assert "<memory>\nan old note\n</memory>" in model.prompts[0]

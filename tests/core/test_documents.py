from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core import SimpleDirectoryReader
from llama_index.core.schema import Document as IndexDocument
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from pydantic import BaseModel

from memagent_integrations import UsageError
from memagent_integrations.documents import SEPARATOR, Piece, apieces, is_async, is_one_shot, pieces


def text_of(document: Any) -> str:
    return "".join(piece.text for piece in pieces(document))


def places(document: Any) -> list[tuple[str | None, int, str]]:
    return [(piece.document_id, piece.start, piece.text) for piece in pieces(document) if piece.document_id]


def test_a_str_is_text_even_if_it_names_a_file() -> None:
    assert places("pyproject.toml") == [("text-1", 0, "pyproject.toml")]


def test_strings_in_a_row_are_one_document() -> None:
    assert places(["ab", "cd\n", "e"]) == [("text-1", 0, "ab"), ("text-1", 2, "cd\n"), ("text-1", 5, "e")]


def test_documents_are_set_apart() -> None:
    documents = [
        Document("one", metadata={"source": "a.txt"}),
        Document("two", id="x"),
        "three",
        "four",
        Document("five"),
    ]
    assert text_of(documents) == SEPARATOR.join(["one", "two", "threefour", "five"])
    assert [name for name, *_ in places(documents)] == ["a.txt", "x", "text-3", "text-3", "document-4"]


def test_pages_and_start_index() -> None:
    pages = [Document("p", metadata={"source": "f.pdf", "page": page, "start_index": 40}) for page in (0, 1)]
    assert places(pages) == [("f.pdf#page=0", 40, "p"), ("f.pdf#page=1", 40, "p")]


def scored_node(name: str, start: int, text: str, parent: str = "doc") -> NodeWithScore:
    relationships = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=parent)}
    node = TextNode(id_=name, text=text, start_char_idx=start, relationships=relationships)
    return NodeWithScore(node=node, score=1 / (start + 1))


def test_scored_nodes_return_to_document_order() -> None:
    nodes = [
        scored_node("3", 50, "c", "b"),
        scored_node("2", 10, "b", "a"),
        scored_node("5", 20, "e", "b"),
        scored_node("1", 0, "a", "a"),
    ]
    assert places(nodes) == [("b", 20, "e"), ("b", 50, "c"), ("a", 0, "a"), ("a", 10, "b")]
    assert [text for *_, text in places(iter(nodes))] == ["c", "b", "e", "a"], "an iterator cannot be sorted"


def test_index_documents_and_nodes() -> None:
    assert places([IndexDocument(text="whole", id_="d1"), TextNode(text="part", id_="n1")]) == [
        ("d1", 0, "whole"),
        ("n1", 0, "part"),
    ]


@dataclass
class Loader:
    name: str
    items: list[Any]
    taken: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name != self.name:
            raise AttributeError(name)
        return self._load

    def _load(self) -> Iterator[Any]:
        for item in self.items:
            self.taken.append(item)
            yield item


@pytest.mark.parametrize("name", ["lazy_load", "lazy_load_data"])
def test_loaders_are_lazy(name: str) -> None:
    loader = Loader(name, [Document("a"), Document("b"), Document("c")])
    stream = pieces(loader)
    assert next(stream).text == "a"
    assert loader.taken == loader.items[:1]
    assert "".join(piece.text for piece in stream) == "\n\nb\n\nc"


def test_a_loader_that_is_not_lazy_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    assert text_of(SimpleDirectoryReader(str(tmp_path))) == "one"


def test_files(tmp_path: Path) -> None:
    text = "línea uno\r\nzwei\rdrei\n中文\x00\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(text.encode("utf-8-sig"))
    (tmp_path / "c.txt").write_bytes(text.encode("utf-16"))
    (tmp_path / "d.txt").write_bytes(text.encode("utf-32"))
    assert [text_of(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt", "d.txt")] == [text] * 4
    assert places([tmp_path / "a.txt", tmp_path / "b.txt"])[1] == (str(tmp_path / "b.txt"), 0, text)


def test_a_file_is_read_in_blocks_without_breaking_characters(tmp_path: Path) -> None:
    text = "中" * 400_000
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    parts = list(pieces(tmp_path / "long.txt"))
    assert len(parts) > 3
    assert [part.start for part in parts] == [sum(len(before.text) for before in parts[:n]) for n in range(len(parts))]
    assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"%PDF-1.7 ...", "is a PDF, not a text file"),
        (b"PK\x03\x04...", "DOCX"),
        (b"\x89PNG\r\n", "PNG"),
        (b"fine until \xff here", "is not UTF-8 text .*at byte 11.*iconv"),
        (codecs.BOM_UTF8 + b"fine until \xff here", "is not UTF-8 text .*at byte 14"),
        (b"a" * 300_000 + b"\xe9t\xe9", "is not UTF-8 text .*at byte 300000"),
        (b"a" * ((1 << 18) - 1) + b"\xe9t", f"is not UTF-8 text .*at byte {(1 << 18) - 1}"),
        (b"cut" + "中".encode()[:2], "is not UTF-8 text .*at byte 3"),
        ("UTF-16 without a mark".encode("utf-16-le"), "full of NUL bytes"),
        ("UTF-32 without a mark".encode("utf-32-be"), "full of NUL bytes"),
        (bytes(5000), "full of NUL bytes"),
    ],
)
def test_files_that_are_not_text(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        text_of(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        text_of(tmp_path / "missing")
    for path in (tmp_path, Path("a\0b"), Path("\ud800")):
        with pytest.raises(UsageError, match="cannot read"):
            text_of(path)


class Strange:
    page_content = 7


class Failing:
    def get_content(self) -> str:
        raise ConnectionError("the store is away")


class NoMetadata:
    page_content, metadata = "text", "none"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"bytes", "decode it to str"),
        ({"text": "x"}, "is a dict"),
        (7, "int is not a document"),
        (None, "NoneType is not a document"),
        (["fine", 7], "int is not a document"),
        (Failing(), "ConnectionError: the store is away"),
        (NoMetadata(), "reading the document failed: AttributeError"),
        (Strange(), "the content of document-1 is int"),
    ],
)
def test_what_is_no_document(document: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        text_of(document)


def test_an_error_of_the_callers_iterator_is_the_cause() -> None:
    def broken() -> Iterator[str]:
        yield "fine"
        raise ConnectionError("the disk went away")

    with pytest.raises(UsageError, match="ConnectionError: the disk went away") as caught:
        text_of(broken())
    assert isinstance(caught.value.__cause__, ConnectionError)


async def test_async_documents() -> None:
    async def lines() -> Any:
        yield "one\n"
        yield "two\n"
        yield Document("three", id="3")
        yield [Document("four", id="4")]

    result: list[Piece] = [piece async for piece in apieces(lines())]
    assert "".join(piece.text for piece in result) == "one\ntwo\n\n\nthree\n\nfour"
    assert [piece.document_id for piece in result if piece.document_id] == ["text-1", "text-1", "3", "4"]
    with pytest.raises(UsageError, match="async iterator; read it with aread"):
        text_of(lines())


async def test_async_documents_that_fail() -> None:
    async def broken(error: Exception) -> Any:
        yield "fine"
        raise error

    with pytest.raises(UsageError, match="OSError: gone"):
        [piece async for piece in apieces(broken(OSError("gone")))]
    with pytest.raises(UsageError, match=r"^mine$"):
        [piece async for piece in apieces(broken(UsageError("mine")))]


def test_a_node_is_not_searched_for_the_methods_of_a_loader() -> None:
    """A list may have many nodes, each of which would take its time to say that it has no such method."""
    asked: list[str] = []

    class Node:
        def get_content(self) -> str:
            return "text"

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    assert not is_async([Node()] * 3)
    assert not asked


def test_kinds() -> None:
    assert is_one_shot(iter(""))
    assert not is_one_shot(["a"])
    assert not is_one_shot("a")
    assert not is_async("a")
    assert is_async(Loader("alazy_load", []))
    assert not is_async(Loader("lazy_load", []))


@pytest.mark.parametrize(
    "make", [iter, lambda texts: (text for text in texts), lambda texts: map(str, texts), lambda texts: [iter(texts)]]
)
def test_the_rest_of_an_iterator_is_not_taken_for_the_whole(make: Callable[[list[str]], Any]) -> None:
    document = make(["one ", "two ", "three"])
    stream = pieces(document)
    assert next(stream).text == "one "
    stream.close()
    with pytest.raises(UsageError, match="this iterator was read from before"):
        list(pieces(document))


def test_an_iterator_that_was_read_to_its_end_is_empty() -> None:
    document = iter(["one"])
    assert [piece.text for piece in pieces(document)] == ["one"]
    assert list(pieces(document)) == []


async def test_a_generator_that_was_read_to_its_end_is_not_an_empty_document() -> None:
    async def later() -> AsyncIterator[str]:
        yield "one"

    spent = (text for text in ["one"])
    assert [piece.text for piece in pieces(spent)] == ["one"]
    with pytest.raises(UsageError, match="this iterator was read from before"):
        list(pieces(spent))
    asynchronous = later()
    assert [piece.text async for piece in apieces(asynchronous)] == ["one"]
    with pytest.raises(UsageError, match="this iterator was read from before"):
        [piece async for piece in apieces(asynchronous)]


async def test_the_rest_of_an_async_iterator_is_not_taken_for_the_whole() -> None:
    class Lines:
        def __init__(self) -> None:
            self.lines = ["one ", "two ", "three"]

        def __aiter__(self) -> Lines:
            return self

        async def __anext__(self) -> str:
            if not self.lines:
                raise StopAsyncIteration
            return self.lines.pop(0)

    document = Lines()
    stream = apieces(document)
    assert (await anext(stream)).text == "one "
    await stream.aclose()
    with pytest.raises(UsageError, match="this iterator was read from before"):
        [piece async for piece in apieces(document)]


def test_an_object_with_fields_is_no_document() -> None:
    class Page(BaseModel):
        title: str
        body: str

    with pytest.raises(UsageError, match="Page is not a document; pass the text in it"):
        list(pieces(Page(title="t", body="b")))


def test_a_text_that_is_the_name_of_a_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lease.txt"
    path.write_text("The rent is 1,200.")
    assert [piece.text for piece in pieces(str(path))] == [str(path)]
    assert "is also the name of a file; pass Path(" in caplog.text
    caplog.clear()
    assert [piece.text for piece in pieces("lease\0.txt")] == ["lease\0.txt"]
    assert not caplog.records

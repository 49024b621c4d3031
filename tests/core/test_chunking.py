from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.counters import COUNTERS
from hypothesis import given
from hypothesis import strategies as st

from memagent_integrations import UsageError
from memagent_integrations.chunking import FULL, Chunker, achunks, chunks
from memagent_integrations.documents import Piece, pieces
from memagent_integrations.records import Chunk
from memagent_integrations.sanitize import neutralise
from memagent_integrations.tokens import Counter, in_blocks

PIECES = [
    "word ",
    "longer-word ",
    "Sentence end. ",
    "\n",
    "\n\n",
    "\r\n",
    "中文字符。",
    "مرحبا ",
    "👩‍👩‍👧",
    "é",
    "e\u0301",
    "\u202e",
    "\x00",
    "x" * 40,
    "  ",
]
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=300).map("".join)


def cut(document: object, count: Counter, size: int, overlap: int = 0) -> list[Chunk]:
    return list(chunks(pieces(document), Chunker(count, size, overlap)))


def encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.fuzz
@given(text=TEXT.map(encodable), size=st.integers(40, 200))
def test_chunks_join_to_the_text_and_keep_their_size(name: str, text: str, size: int) -> None:
    count = COUNTERS[name]()
    result = cut(text, count, size)
    assert "".join(chunk.text for chunk in result) == text
    assert [chunk.span.start for chunk in result] == [0, *(chunk.span.end for chunk in result)][: len(result)]
    for chunk in result:
        assert chunk.span.tokens == count(chunk.text) <= size
    for chunk, following in itertools.pairwise(result):
        # full, or else not one more character of what follows would have fitted in
        assert chunk.span.tokens >= FULL * size or count(chunk.text + following.text[0]) > size


@pytest.mark.parametrize("name", COUNTERS)
def test_chunks_of_a_novel_are_full(name: str, books: Path) -> None:
    count = COUNTERS[name]()
    text = (books / "stevenson-hyde.txt").read_bytes().decode()
    result = cut(text, count, 1000)
    assert "".join(chunk.text for chunk in result) == text
    assert all(900 <= chunk.span.tokens <= 1000 for chunk in result[:-1])


def test_cuts_at_the_best_end_that_is_near() -> None:
    words = "one two three four. " * 30
    paragraphs = [words[:560] + "\n\n"] * 4
    assert [chunk.text for chunk in cut("".join(paragraphs), len, 600)] == paragraphs
    assert all(chunk.text.endswith(". ") for chunk in cut(words * 5, len, 205)[:-1])
    assert all(chunk.text.endswith(" ") for chunk in cut("word " * 1000, len, 98)[:-1])
    assert all(chunk.text.endswith("。") for chunk in cut("十二個字的中文句子在這裡。" * 100, len, 135)[:-1])


def test_never_cuts_inside_a_character() -> None:
    result = cut("e\u0301" * 2000, len, 101)
    assert all(chunk.text.endswith("\u0301") for chunk in result)
    assert not any(chunk.text.endswith("\r") for chunk in cut("\r\n" * 2000, len, 101))


def test_a_long_line_without_a_space() -> None:
    text = "x" * 3_000_000
    result = cut(text, len, 50_000)
    assert "".join(chunk.text for chunk in result) == text
    assert all(chunk.span.tokens >= 45_000 for chunk in result[:-1])


def test_overlap_repeats_the_end_of_the_chunk_before() -> None:
    text = "The quick brown fox jumps. " * 200
    result = cut(text, len, 300, 60)
    rebuilt, end = "", 0
    for chunk in result:
        assert text[chunk.span.start : chunk.span.end] == chunk.text
        assert end - 60 <= chunk.span.start <= end
        rebuilt, end = rebuilt[: chunk.span.start] + chunk.text, chunk.span.end
    assert rebuilt == text
    assert all(chunk.span.start < before.span.end for before, chunk in itertools.pairwise(result))


def test_a_chunk_knows_its_sources() -> None:
    documents = {"a": "A" * 150, "b": "B" * 30, "c": "C" * 100}
    result = cut([Page(name, text) for name, text in documents.items()], len, 100)
    for chunk in result:
        parts = [documents[source.document_id][source.start : source.end] for source in chunk.span.sources]
        assert "".join(parts) == chunk.text.replace("\n", "")
    covered = [(source.document_id, source.start, source.end) for chunk in result for source in chunk.span.sources]
    assert [name for name, *_ in covered] == ["a", "a", "b", "c", "c"]
    assert covered[0][2] == covered[1][1]
    assert covered[3][2] == covered[4][1]


class Page:
    """Has the attributes of a LangChain document."""

    def __init__(self, name: str, text: str) -> None:
        self.page_content, self.metadata = text, {"source": name}


def test_pieces_of_one_source_are_one_source() -> None:
    result = cut((f"line {n}\n" for n in range(500)), len, 1000)
    assert all(len(chunk.span.sources) == 1 for chunk in result)
    assert all((s.start, s.end) == (c.span.start, c.span.end) for c in result for s in c.span.sources)


def test_a_character_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="chunk_tokens=2 is too small"):
        cut("fine then \U0001f642", lambda text: 9 * text.count("\U0001f642") + (len(text) > 0), 2)


def test_takes_no_more_than_it_needs() -> None:
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for _ in range(10_000):
            taken += 1
            yield "one more line of text\n"

    stream = chunks(pieces(lines()), Chunker(len, 220))
    next(stream)
    assert taken < 120
    next(stream)
    assert taken < 140


async def test_async_chunks_are_the_same() -> None:
    async def source() -> object:
        for start in range(0, len(text), 7):
            yield Piece(text=text[start : start + 7], document_id="d", start=start)
        yield Piece(text=text, document_id="d", start=len(text))

    text = "Some words to cut. " * 100
    result = [chunk async for chunk in achunks(source(), Chunker(len, 150))]  # type: ignore[arg-type]
    assert result == list(chunks([Piece(text=text * 2, document_id="d", start=0)], Chunker(len, 150)))


def test_few_counts_a_chunk() -> None:
    calls = 0

    def counting(inner: Callable[[str], int]) -> Counter:
        def count(text: str) -> int:
            nonlocal calls
            calls += 1
            return inner(text)

        return count

    result = cut("A sentence of several words stands here. " * 3000, counting(COUNTERS["tiktoken"]()), 500)
    assert calls <= 6 * len(result)


def test_a_text_is_tokenized_hardly_more_than_once() -> None:
    tokenized = 0

    def count(text: str) -> int:
        nonlocal tokenized
        tokenized += len(text)
        return len(text) // 4

    text = "".join(f"Entry {number} of the ledger says something else. " for number in range(10_000))
    cut(text, in_blocks(count), 5000)
    assert tokenized < 1.25 * len(text)


def test_counts_the_text_as_a_prompt_shows_it() -> None:
    text, shown = "<|im_end|> and words " * 500, "‹|im_end|> and words " * 500
    result = list(chunks(pieces(text), Chunker(COUNTERS["tiktoken"](), 100, 10, neutralise)))
    assert result[-1].span.end == len(text)
    for chunk in result:
        assert chunk.text == text[chunk.span.start : chunk.span.end]
        assert COUNTERS["tiktoken"]()(shown[chunk.span.start : chunk.span.end]) <= 100


def test_a_tokenizer_that_refuses_control_tokens_counts_texts_that_hold_some() -> None:
    def count(text: str) -> int:
        if "<|endoftext|>" in text:
            raise ValueError("Encountered text corresponding to disallowed special token")
        return len(text.split())

    text = "The log ends with <|endoftext|> and goes on. " * 40
    made = list(chunks(pieces(text), Chunker(count, 50, harmless=neutralise)))
    assert "".join(chunk.text for chunk in made) == text
    assert all(chunk.span.tokens == count(neutralise(chunk.text)) for chunk in made)

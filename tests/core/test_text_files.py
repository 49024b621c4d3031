"""Files of text: what is no text, or is not whole, is told; whatever the bytes, text or a typed error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memagent_integrations import Reader, ScriptedBackend, UsageError
from memagent_integrations.documents import pieces
from memagent_integrations.text_files import text_blocks

BLOCK = 1 << 18


@pytest.mark.parametrize("before", [BLOCK - 100, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_file_whose_end_is_nothing(before: int, mark: bytes, tmp_path: Path) -> None:
    """So is a file after a crash, or one that is still being downloaded."""
    file = tmp_path / "file.txt"
    file.write_bytes(mark + b"word " * (before // 5) + bytes(BLOCK))
    with pytest.raises(UsageError, match="NUL bytes behind byte"):
        list(text_blocks(file))
    os.truncate(file, len(mark) + before // 5 * 5)
    assert "".join(text_blocks(file)).endswith("word ")


def test_a_few_nuls_far_behind_are_text(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_bytes(b"x" * BLOCK + b"a\0b")
    assert "".join(text_blocks(file))[-3:] == "a\0b"


@pytest.mark.parametrize("left", [BLOCK, BLOCK + 10, 0])
def test_a_file_that_is_cut_while_it_is_read(left: int, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_bytes("wörd ".encode() * BLOCK)
    blocks = text_blocks(file)
    next(blocks)
    os.truncate(file, left)
    with pytest.raises(UsageError, match=r"was cut while it was read.*read it again"):
        list(blocks)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_bytes(b"x" * (BLOCK + 1))
    blocks = text_blocks(file)
    first = next(blocks)
    with file.open("ab") as more:
        more.write(b"yy")
    assert first + "".join(blocks) == "x" * (BLOCK + 1) + "yy"


def test_a_pipe_has_no_size(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"piped")
    os.close(writing)
    try:
        assert "".join(text_blocks(Path(f"/dev/fd/{reading}"))) == "piped"
    finally:
        os.close(reading)


def loop(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


@pytest.mark.parametrize("name", ["loop", "a\0b", "\ud800", "x" * 300, ""])
def test_paths_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    loop(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        Reader(ScriptedBackend([])).read("Why?", tmp_path / name)


ENCODINGS = {
    "utf-8": b"",
    "utf-8-sig": b"",
    "utf-16": b"",
    "utf-32": b"",
    "utf-16-le": b"\xff\xfe",
    "utf-16-be": b"\xfe\xff",
}
SIGNS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=60)


@pytest.mark.fuzz
@given(text=SIGNS, encoding=st.sampled_from(sorted(ENCODINGS)))
def test_a_text_in_any_encoding_is_read_as_it_is(
    text: str, encoding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "text"
    file.write_bytes(ENCODINGS[encoding] + text.encode(encoding))
    if encoding == "utf-8" and text.startswith("\ufeff"):
        text = text[1:]
    assert "".join(piece.text for piece in pieces(file)) == text


CONTENT = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"\xff\xfe\0\0", b"%PDF-", b"PK\3\4", bytes(20), b"\x1f\x8b"]
        ),
        SIGNS.map(str.encode),
        st.integers(BLOCK - 3, BLOCK + 3).map(lambda size: b"x" * size),
    ),
    max_size=4,
).map(b"".join)


@pytest.mark.fuzz
@given(content=CONTENT)
def test_any_bytes_are_text_or_a_typed_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes"
    file.write_bytes(content)
    try:
        text = "".join(text_blocks(file))
    except UsageError:
        return
    assert any(text == content.decode(name, "replace") for name in ("utf-8", "utf-8-sig", "utf-16", "utf-32"))
    assert "\ufffd" not in text or any(
        "\ufffd".encode(name) in content for name in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
    )


ITEMS = st.recursive(
    st.one_of(st.text(max_size=20), st.binary(max_size=5), st.none(), st.integers(), st.just(Path("/nowhere\0"))),
    lambda items: st.one_of(
        st.lists(items, max_size=3), st.tuples(items), st.dictionaries(st.text(max_size=3), items, max_size=2)
    ),
    max_leaves=6,
)


@pytest.mark.fuzz
@given(document=ITEMS)
def test_any_document_is_read_or_refused(document: object) -> None:
    def strings(item: object) -> list[str]:
        return [item] if isinstance(item, str) else [text for each in item for text in strings(each)]  # type: ignore[attr-defined]

    try:
        text = "".join(piece.text for piece in pieces(document))
    except UsageError:
        return
    assert text == "".join(strings(document))

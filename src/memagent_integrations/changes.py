"""Compare two texts word by word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from html import escape

_WORD = re.compile(r"\S+\s*|\s+")
_MOST_PAIRS = 100_000  # pairs of equal words beyond which an exact comparison takes minutes
_MARKUP = {
    0: "{}",
    1: "<ins style='background:rgba(46,160,67,.25);text-decoration:none'>{}</ins>",
    -1: "<del style='background:rgba(248,81,73,.25)'>{}</del>",
}


def difference(old: str, new: str) -> Iterator[tuple[int, str]]:
    """Yield the words of both texts in reading order, as (0, kept), (-1, deleted) and (1, inserted).

    White space is not compared; kept words have the white space of `new`.
    """
    old_parts, new_parts = _WORD.findall(old), _WORD.findall(new)
    old_words, new_words = [part.strip() for part in old_parts], [part.strip() for part in new_parts]
    old_counts, new_counts = Counter(old_words), Counter(new_words)
    pairs = sum(count * new_counts[word] for word, count in old_counts.items())
    matcher = SequenceMatcher(None, old_words, new_words, autojunk=pairs > _MOST_PAIRS)  # a model may repeat itself
    for tag, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        if tag == "equal":
            yield 0, "".join(new_parts[new_start:new_end])
            continue
        if old_start < old_end:
            yield -1, "".join(old_parts[old_start:old_end])
        if new_start < new_end:
            yield 1, "".join(new_parts[new_start:new_end])


def marked(old: str, new: str) -> str:
    """Return the new text as HTML, with deletions and insertions marked in colours that suit light and dark pages."""
    parts = (_MARKUP[sign].format(escape(text)) for sign, text in difference(old, new))
    return f"<div style='white-space:pre-wrap'>{''.join(parts)}</div>"

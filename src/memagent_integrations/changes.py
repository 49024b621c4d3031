"""Differences between two texts, word by word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from html import escape

_WORD = re.compile(r"\S+\s*|\s+")
_MOST_PAIRS = 100_000
_MARKS = {
    0: "{}",
    1: "<ins style='background:rgba(46,160,67,.25);text-decoration:none'>{}</ins>",
    -1: "<del style='background:rgba(248,81,73,.25)'>{}</del>",
}


def difference(old: str, new: str) -> Iterator[tuple[int, str]]:
    """What became of a text, word by word: (0, kept), (-1, taken out), (1, put in), in reading order. White space is that of `new`."""
    before, after = _WORD.findall(old), _WORD.findall(new)
    one, other = [word.strip() for word in before], [word.strip() for word in after]
    counts, others = Counter(one), Counter(other)
    repeated = (
        sum(count * others[word] for word, count in counts.items()) > _MOST_PAIRS
    )  # a model that repeats itself would take minutes
    words = SequenceMatcher(None, one, other, autojunk=repeated)
    for kind, a, b, c, d in words.get_opcodes():
        if kind == "equal":
            yield 0, "".join(after[c:d])
            continue
        if a < b:
            yield -1, "".join(before[a:b])
        if c < d:
            yield 1, "".join(after[c:d])


def marked(old: str, new: str) -> str:
    """The new text as HTML, with deletions and insertions marked. It needs no style sheet and suits light and dark pages."""
    parts = (_MARKS[kind].format(escape(text)) for kind, text in difference(old, new))
    return f"<div style='white-space:pre-wrap'>{''.join(parts)}</div>"

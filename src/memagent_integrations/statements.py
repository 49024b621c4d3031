"""Texts as sentences, and sentences as weighted words: what it takes to see that two say the same.

It needs no dictionary. Words count by their beginning, so that most inflections are equal; text without spaces counts
by pairs of characters. All of it takes time in proportion to the text.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

SENTENCE_END = r"[.!?…؟۔।]['\")\]’”»]*\s+|[。！？]['\")\]’”」』]*\s*|\r?\n"
"""A pattern for the end of a sentence with the white space behind it."""

LONGEST = 400
"""The most characters of a sentence: a longer one is cut, between words where it has any."""

_END = re.compile(SENTENCE_END)
_ABBREVIATION = re.compile(r"\b(?:Mrs?|Ms|Dr|Prof|St|Sr|Jr|vs|Nr|Fig|Vol|ca|approx|e\.g|i\.e|z\.B|cf|[A-Z])\Z")
_ITEM_NUMBER = re.compile(r"\d{1,3}\Z")
_NO_SPACE = re.compile(r"\S")
_BULLET = re.compile(r"(?:(?:[-*•–—>#]{1,6}|\(?\d{1,3}[.)]|\[[ xX]?\])\s+)++")
_SPACELESS = (  # Thai to Khmer, Japanese, Chinese; and Korean, whose endings are written onto the word
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff"
)
_LETTERS = rf"[^\W_{_SPACELESS}]"
_MARKS = "[\u0300-\u036f\u064b-\u065f\u0900-\u0963\u0970-\u0dff]"  # accents, and vowels of India, which are no letters
_WORD = re.compile(
    rf"(?P<number>\d++(?:[.,'’\u202f]\d++){{0,8}}+(?:st|nd|rd|th)?(?!{_LETTERS}))"
    rf"|(?P<spaceless>[{_SPACELESS}]+)"
    rf"|{_LETTERS}++(?:{_MARKS}++{_LETTERS}*+)*+"
)
_GROUPING = re.compile(r"[.,'’\u202f](?=\d{3}(?!\d))")
_STEM = 5  # characters of a word that count


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A sentence of a memory, without its bullet, and how much each of its terms says (see `terms`)."""

    text: str
    weights: Mapping[str, float]
    numbers: frozenset[str]


def sentences(text: str, *, wrapped: bool = False) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence, white space included; a line is one, and so is a part of a long sentence.

    With `wrapped`, a line that goes on in lower case is no end: a document may be broken into lines anywhere.
    """
    start = 0
    first = _first_word(text, 0)  # looked for once in a sentence, however many dots it has
    for end in _END.finditer(text):
        if not _is_inside(text, first, end, wrapped):
            yield from _parts(text, start, end.end())
            start = end.end()
            first = first if first >= start else _first_word(text, start)
    yield from _parts(text, start, len(text))


def statements(memory: str) -> Iterator[Statement]:
    """Yield the sentences of a memory. What has no words, and a heading that ends in a colon, says nothing."""
    for start, end in sentences(memory):
        sentence = statement(memory[start:end])
        if sentence.weights and not sentence.text.endswith((":", "：")):
            yield sentence


@lru_cache(maxsize=2048)  # most of a memory stays as it was
def statement(text: str) -> Statement:
    """Return a sentence as a statement.

    Of its terms, numbers say most, then names (what has a capital inside the sentence); short words say least.
    """
    text = text.strip()
    text = text[bullet.end() :] if (bullet := _BULLET.match(text)) else text
    weights: dict[str, float] = {}
    first = True
    for term, word, _ in terms(text):
        weights[term] = max(_weight(word, first=first), weights.get(term, 0.0))
        first = False
    return Statement(text=text, weights=weights, numbers=frozenset(filter(is_number, weights)))


def terms(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield each term of a text with the word that it is the term of, and where that begins.

    A term is a number without grouping, the beginning of a word in lower case, or two characters of a text without
    spaces.
    """
    for match in _WORD.finditer(text):
        word, start = match[0], match.start()
        if not match["spaceless"]:
            yield _term(word), word, start
        elif len(word) == 1:
            yield word, word, start
        else:
            for place in range(len(word) - 1):
                yield word[place : place + 2], word[place : place + 2], start + place


def is_number(term: str) -> bool:
    """Return whether the term is a number, or an identifier that holds digits."""
    return not term.isalpha() and any(character.isdigit() for character in term)


def rarity(times: int, of: int) -> float:
    """Return how much a term says that stands in `times` of `of` sentences, from 0 to 1 (for one or none)."""
    return math.log1p(of / max(times, 1)) / math.log1p(max(of, 1))


def total(weights: Mapping[str, float], chosen: Collection[str] | Iterable[str]) -> float:
    """Return the sum of the weights of some terms, in any order; one without a weight weighs nothing."""
    return math.fsum([weights.get(term, 0.0) for term in chosen])


@lru_cache(maxsize=1 << 15)
def _term(word: str) -> str:
    word = unicodedata.normalize("NFKC", word).casefold()
    if not is_number(word):
        return word[:_STEM]
    return _GROUPING.sub("", word.rstrip("sthndr") if word[0].isdigit() and word[-2:].isalpha() else word)[:64]


def _weight(word: str, *, first: bool) -> float:
    if is_number(word):
        return min(1.0 + len(word) / 2, 3.0)
    if len(word) > 1 and word[0].isupper() and (not first or word.isupper()):
        return 2.0
    return 0.2 if len(word) <= 3 and word.isascii() else 1.0


def _first_word(text: str, start: int) -> int:
    """Return where the white space ends that begins at `start`."""
    found = _NO_SPACE.search(text, start)
    return found.start() if found else len(text)


def _is_inside(text: str, start: int, end: re.Match[str], wrapped: bool) -> bool:
    """Return whether what looks like the end of a sentence stands inside of one, whose first word is at `start`."""
    if end[0][0] in "\r\n":
        following = text[end.end() : end.end() + 40].lstrip(" \t")
        return wrapped and following[:1].islower()
    if end[0][0] != "." or "\n" in end[0]:
        return False
    dot = end.start()
    return bool(_ITEM_NUMBER.match(text, start, dot) or _ABBREVIATION.search(text, max(start, dot - 8), dot))


def _parts(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while end - start > LONGEST:
        space = text.rfind(" ", start + LONGEST // 2, start + LONGEST)
        middle = space + 1 if space > 0 else start + LONGEST
        yield start, middle
        start = middle
    if start < end:
        yield start, end

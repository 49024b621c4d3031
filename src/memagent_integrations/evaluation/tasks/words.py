"""The random words, numbers and uuids of RULER's needles (arXiv:2404.06654, NVIDIA/RULER), without repetition."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Set
from functools import cache
from typing import Literal
from uuid import UUID

from memagent_integrations.errors import MissingExtra
from memagent_integrations.evaluation.permutation import Permutation

Kind = Literal["words", "numbers", "uuids"]


def distinct(kind: Kind, key: str) -> Callable[[int], str]:
    """Return a function from 0, 1, 2, ... to adjective-noun pairs, seven-digit numbers, or uuids.

    After the last pair or number it starts again from the first.

    Raises:
        MissingExtra: words are asked for, and the package with the list of words is not installed.
    """
    if kind == "uuids":

        def uuid(index: int) -> str:
            digest = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=16).digest()
            return str(UUID(bytes=digest, version=4))

        return uuid
    if kind == "numbers":
        numbers = Permutation(9_000_000, key)
        return lambda index: str(1_000_000 + numbers[index % len(numbers)])
    return pairs(key)


def pairs(key: str) -> Callable[[int], str]:
    """Return a function from 0, 1, 2, ... to words made of an adjective and a noun."""
    adjectives, nouns = lists("adjective"), lists("noun")
    order = Permutation(len(adjectives) * len(nouns), key)

    def pair(index: int) -> str:
        adjective, noun = divmod(order[index % len(order)], len(nouns))
        return f"{adjectives[adjective]}-{nouns[noun]}"

    return pair


def singles(key: str) -> Callable[[int], str]:
    """Return a function from 0, 1, 2, ... to nouns, adjectives and verbs, followed by adjective-noun pairs."""
    adjectives, nouns = set(lists("adjective")), set(lists("noun"))
    alone = {*lists("verb"), *adjectives, *nouns}
    words = sorted(word for word in alone if not _is_pair(word, adjectives, nouns))
    random.Random(key).shuffle(words)
    pair = pairs(key)
    return lambda index: words[index] if index < len(words) else pair(index - len(words))


@cache
def lists(category: str) -> tuple[str, ...]:
    """Return all nouns, adjectives or verbs, also hyphenated ones; not the few with a space or an apostrophe.

    No two pairs of an adjective and a noun are the same text.
    """
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise MissingExtra.extra("wonderwords", "eval") from error
    return tuple(
        sorted({word for word in RandomWord().filter(include_categories=[category]) if word.replace("-", "").isalpha()})
    )


def _is_pair(word: str, adjectives: Set[str], nouns: Set[str]) -> bool:
    """Return whether the word is what `pairs` makes of an adjective and a noun."""
    parts = word.split("-")
    splits = (("-".join(parts[:n]), "-".join(parts[n:])) for n in range(1, len(parts)))
    return any(first in adjectives and second in nouns for first, second in splits)

"""The random words, numbers and uuids of RULER's needles (arXiv:2404.06654, NVIDIA/RULER), each by its number and none of them twice."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import cache
from typing import Literal
from uuid import UUID

from memagent_integrations.errors import MissingExtra
from memagent_integrations.evaluation.permutation import Permutation

Kind = Literal["words", "numbers", "uuids"]


def distinct(kind: Kind, key: str) -> Callable[[int], str]:
    """A function from 0, 1, 2, ... to things of a kind: adjective-noun, seven digits, or uuid. They begin anew after the last that there is.

    Raises:
        MissingExtra: words are asked for, and there is no list of them.
    """
    if kind == "uuids":
        return lambda index: str(
            UUID(bytes=hashlib.blake2b(f"{key}/{index}".encode(), digest_size=16).digest(), version=4)
        )
    if kind == "numbers":
        numbers = Permutation(9_000_000, key)
        return lambda index: str(1_000_000 + numbers[index % len(numbers)])
    return pairs(key)


def pairs(key: str) -> Callable[[int], str]:
    """A function from 0, 1, 2, ... to words made of an adjective and a noun."""
    adjectives, nouns = lists("adjective"), lists("noun")
    order = Permutation(len(adjectives) * len(nouns), key)

    def pair(index: int) -> str:
        adjective, noun = divmod(order[index % len(order)], len(nouns))
        return f"{adjectives[adjective]}-{nouns[noun]}"

    return pair


def singles(key: str) -> Callable[[int], str]:
    """A function from 0, 1, 2, ... to words: nouns, adjectives and verbs, and where they end, pairs of an adjective and a noun."""
    words = sorted({*lists("noun"), *lists("adjective"), *lists("verb")})
    random.Random(key).shuffle(words)
    pair = pairs(key)
    return lambda index: words[index] if index < len(words) else pair(index - len(words))


@cache
def lists(category: str) -> tuple[str, ...]:
    """The nouns, adjectives or verbs that there are, without those that have a hyphen: a pair of words could be another pair."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise MissingExtra.extra("wonderwords", "eval") from error
    return tuple(sorted({word for word in RandomWord().filter(include_categories=[category]) if word.isalpha()}))

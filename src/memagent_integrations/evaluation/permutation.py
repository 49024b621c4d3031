"""A shuffled order of any number of things that takes no memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import isqrt

from memagent_integrations.checks import check_int

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Permutation:
    """The numbers 0 to `size` - 1 in an order that `key` decides, each found by its place, on every machine the same.

    A Feistel network over pairs (left, right) of numbers below the root of the size; a pair that stands for no number is sent through again.

    >>> order = Permutation(5, "a seed")
    >>> sorted(order) == [0, 1, 2, 3, 4] and order.place(order[3]) == 3
    True
    """

    def __init__(self, size: int, key: str) -> None:
        check_int(size=size, most=1 << 60)
        seeded = random.Random(key)
        self._size = size
        self._side = isqrt(size - 1) + 1
        self._keys = tuple((seeded.getrandbits(64) | 1, seeded.getrandbits(64)) for _ in range(_ROUNDS))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))

    def __getitem__(self, place: int) -> int:
        """The number at a place.

        Raises:
            IndexError: there is no such place.
        """
        self._check(place)
        side, keys = self._side, self._keys
        number = place
        while True:
            left, right = divmod(number, side)
            for factor, term in keys:
                left, right = right, (left + (((right + term) ** 2 * factor & _MASK) >> 32)) % side
            number = left * side + right
            if number < self._size:
                return number

    def place(self, number: int) -> int:
        """Where a number stands.

        Raises:
            IndexError: there is no such number.
        """
        self._check(number)
        side, keys = self._side, self._keys[::-1]
        place = number
        while True:
            left, right = divmod(place, side)
            for factor, term in keys:
                left, right = (right - (((left + term) ** 2 * factor & _MASK) >> 32)) % side, left
            place = left * side + right
            if place < self._size:
                return place

    def _check(self, index: int) -> None:
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is not below {self._size}")

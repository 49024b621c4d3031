"""A shuffled order of any size that takes no memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import isqrt

from memagent_integrations.checks import check_int

_ROUNDS = 6
_MASK = (1 << 64) - 1


class Permutation:
    """The numbers from 0 to `size` - 1 in an order that `key` determines, the same on every machine.

    A Feistel network over pairs (left, right) of numbers up to the square root of the size. It is applied again while
    the result is not below the size.

    >>> order = Permutation(5, "a seed")
    >>> sorted(order) == [0, 1, 2, 3, 4] and order.index(order[3]) == 3
    True
    """

    def __init__(self, size: int, key: str) -> None:
        check_int(size=size, most=1 << 60)
        rng = random.Random(key)
        self._size = size
        self._side = isqrt(size - 1) + 1
        self._keys = tuple((rng.getrandbits(64) | 1, rng.getrandbits(64)) for _ in range(_ROUNDS))

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._size))

    def __getitem__(self, index: int) -> int:
        """Return the number at an index.

        Raises:
            IndexError: the index is out of range.
        """
        self._check(index)
        side, keys = self._side, self._keys
        number = index
        while True:
            left, right = divmod(number, side)
            for factor, term in keys:
                left, right = right, (left + (((right + term) ** 2 * factor & _MASK) >> 32)) % side
            number = left * side + right
            if number < self._size:
                return number

    def index(self, number: int) -> int:
        """Return the index of a number.

        Raises:
            IndexError: the number is out of range.
        """
        self._check(number)
        side, keys = self._side, self._keys[::-1]
        index = number
        while True:
            left, right = divmod(index, side)
            for factor, term in keys:
                left, right = (right - (((left + term) ** 2 * factor & _MASK) >> 32)) % side, left
            index = left * side + right
            if index < self._size:
                return index

    def _check(self, number: int) -> None:
        if not 0 <= number < self._size:
            raise IndexError(f"{number} is not below {self._size}")

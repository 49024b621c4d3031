"""Count tokens, and find how much of a text fits into a number of them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import lru_cache, wraps
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent_integrations.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import tiktoken

Counter = Callable[[str], int]
"""A function that returns the number of tokens of a text."""

_BLOCK = 1000
"""The least characters of a block that is counted on its own."""
_SEAM = re.compile(r"[a-z](?= [a-z])")
"""Where no token of OpenAI's vocabularies goes on: their patterns let one begin with a space, but never hold it."""

WAYS_OUT = (
    "pass tokenizer='hf:FOLDER_OR_NAME' (a Hugging Face tokenizer), tokenizer='tiktoken:o200k_base' (offline: set "
    "TIKTOKEN_CACHE_DIR to a folder that holds the vocabulary), or tokenizer='approximate' (no vocabulary; it counts "
    "high, to stay on the safe side)"
)
"""The advice when no tokenizer can be loaded."""


def in_blocks(count: Counter) -> Counter:
    """Return the same counter, which counts texts that begin alike only where they differ.

    For tokenizers none of whose tokens reaches over a `_SEAM`: then the tokens of the blocks are those of the text.
    """
    remembered = lru_cache(maxsize=256)(count)

    @wraps(count)
    def count_blocks(text: str) -> int:
        return sum((remembered if len(block) <= 2 * _BLOCK else count)(block) for block in _blocks(text))

    return count_blocks


def _blocks(text: str) -> Iterator[str]:
    """Yield the text in parts that end at seams; a longer text that begins alike has the same parts, but the last."""
    start = 0
    while seam := _SEAM.search(text, start + _BLOCK):
        yield text[start : seam.end()]
        start = seam.end()
    yield text[start:]


def load_counter(spec: str | Counter) -> Counter:
    """Return the counter named by "hf:NAME", "tiktoken:ENCODING" or "approximate"; a counter is returned unchanged.

    A function that returns the tokens themselves, as LlamaIndex's tokenizers do, becomes one that counts them.

    Raises:
        UsageError: the name is unknown, its vocabulary cannot be loaded, or a function returns neither.
        MissingExtra: the package that reads the vocabulary is not installed.
    """
    if callable(spec):
        return _counting(spec)
    kind, _, name = spec.partition(":")
    if spec == "approximate":
        return approximate
    if kind == "hf" and name:
        return huggingface(name)
    if kind == "tiktoken" and name:
        return tiktoken_counter(name)
    raise UsageError(f"unknown tokenizer {spec!r}; {WAYS_OUT}")


def _counting(count: Callable[[str], Any]) -> Counter:
    """Return a function as a counter, after trying it."""
    tokens = count("a")
    if isinstance(tokens, Integral):
        return count
    if isinstance(tokens, Sized) and not isinstance(tokens, str | Mapping):
        return wraps(count)(lambda text: len(count(text)))
    kind = type(tokens).__name__
    raise UsageError(f"tokenizer has to return the number of tokens of a text, or a list of them, not {kind}")


def huggingface(name: str) -> Counter:
    """Return a counter that uses a `tokenizer.json`, given the file, its folder, or a name on the Hugging Face hub."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra("tokenizers", command="pip install tokenizers") from error
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:
        raise UsageError(f"no tokenizer could be loaded from {name!r} ({error}); {WAYS_OUT}") from error

    tokenizer.no_truncation()  # with either, which a file may ask for, every text would have the same count
    tokenizer.no_padding()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def tiktoken_counter(encoding: str) -> Counter:
    """Return a counter that uses the tiktoken vocabulary of an encoding, such as "o200k_base"."""
    import tiktoken

    return _tiktoken(encoding, lambda: tiktoken.get_encoding(encoding))


def openai_counter(model: str) -> Counter:
    """Return the tiktoken counter of an OpenAI model.

    Raises:
        UsageError: tiktoken does not know the model, or cannot load its vocabulary.
    """
    import tiktoken

    return _tiktoken(model, lambda: tiktoken.encoding_for_model(model))


def counter_of(model: str) -> Counter:
    """Return the tiktoken counter of an OpenAI model; for any other model an estimate, as `estimated` says."""
    try:
        return openai_counter(model)
    except UsageError as error:
        return estimated(model, str(error).partition(";")[0])


def estimated(model: str, reason: str) -> Counter:
    """Return `approximate`, for a model whose tokenizer is not known, and warn that the counts are estimates.

    They are rather too high: the chunks are smaller than they could be, and no prompt outgrows the window.
    """
    warnings.warn(
        f"the tokens of {model} are estimated, rather too high, so its window is not used to the full: {reason}. "
        f"To count them, or to accept the estimate without this warning, {WAYS_OUT}",
        stacklevel=2,
    )
    return approximate


def _tiktoken(name: str, load: Callable[[], tiktoken.Encoding]) -> Counter:
    try:
        encode = load().encode_ordinary
    except Exception as error:  # an unknown name, or any failure of the download
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(f"tiktoken has no vocabulary for {name!r} ({cause}); {WAYS_OUT}") from error

    @in_blocks
    def count(text: str) -> int:
        return len(encode(text))

    return count


_PIECES = re.compile(
    r"(?P<word>[A-Za-z]+)|(?P<single>[0-9]|[!-/:-@\[-`{-~]|[\x00-\x1f\x7f])|(?P<spaces> +)|(?P<other>[^\x00-\x7f]+)"
)


@in_blocks
def approximate(text: str) -> int:
    """Estimate the number of tokens without a vocabulary, rather too high, for prose and code in any script.

    Counts one token for three letters of a word, for a digit, sign or control character, for eight spaces in a row, and
    for two bytes of anything that is not ASCII, plus one for an emoji. The tests compare it with real vocabularies.
    """
    total = 0
    for piece in _PIECES.finditer(text):
        kind, length = piece.lastgroup, piece.end() - piece.start()
        if kind == "word":
            total += math.ceil(length / 3)
        elif kind == "spaces":
            total += length // 8
        elif kind == "other":
            characters = piece.group()
            total += math.ceil(len(characters.encode("utf-8", "replace")) / 2)
            total += sum(character > "\uffff" for character in characters)
        else:
            total += 1
    return max(total, 1 if text else 0)


def fit(limit: int, size: int, cost: Callable[[int], int], *, guess: int = 0, enough: float = 1.0) -> int:
    """Return the largest n <= `size` that the search finds with cost(n) <= `limit`; 0 if not even 1 fits.

    `cost` should grow with n, but may fall a little now and then (tokens merge). The search starts at `guess` and
    alternates interpolation and bisection. It ends early at an n whose cost is at least `enough * limit`: a caller that
    is content with 95 % pays for two or three counts.
    """
    low, low_cost, high, high_cost = 0, 0, size + 1, 0
    n = guess or limit * 4
    bisect = False
    while high - low > 1:
        n = min(max(n, low + 1), high - 1)
        n_cost = cost(n)
        if n_cost <= limit:
            low, low_cost = n, n_cost
            if enough < 1 and n_cost >= enough * limit:
                break
        else:
            high, high_cost = n, n_cost
        target = limit * (1 + enough) / 2
        if high > size:  # no n has been too large yet
            n = math.ceil(n * max(target / max(n_cost, 1), 1.1))
        elif bisect:
            n = (low + high) // 2
        else:
            n = low + int((high - low) * (target - low_cost) / max(high_cost - low_cost, 1))
        bisect = not bisect
    return low


def cut(text: str, limit: int, count: Counter) -> str:
    """Return the longest beginning of `text` that has at most `limit` tokens."""
    if len(text) < 50 * limit and count(text) <= limit:  # a text that is far longer cannot fit: save the count
        return text
    return text[: fit(limit, len(text), lambda n: count(text[:n]))]

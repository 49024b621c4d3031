"""Counting tokens, and finding how much of a text fits into a number of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memagent_integrations.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import tiktoken

Counter = Callable[[str], int]
"""A function from text to its number of tokens."""

WAYS_OUT = (
    "pass tokenizer='hf:FOLDER_OR_NAME' (a Hugging Face tokenizer), tokenizer='tiktoken:o200k_base' (offline: set TIKTOKEN_CACHE_DIR "
    "to a folder that holds the vocabulary), or tokenizer='approximate' (no vocabulary; it counts high, to stay on the safe side)"
)


def load_counter(spec: str | Counter) -> Counter:
    """The counter that a name stands for: "hf:NAME", "tiktoken:ENCODING" or "approximate". A counter stands for itself.

    Raises:
        UsageError: the name is unknown, or its vocabulary cannot be had.
        MissingExtra: the package that reads the vocabulary is not installed.
    """
    if callable(spec):
        return spec
    kind, _, name = spec.partition(":")
    if spec == "approximate":
        return approximate
    if kind == "hf" and name:
        return huggingface(name)
    if kind == "tiktoken" and name:
        return tiktoken_counter(name)
    raise UsageError(f"unknown tokenizer {spec!r}; {WAYS_OUT}")


def huggingface(name: str) -> Counter:
    """A counter over a `tokenizer.json`: a file, a folder that holds one, or a name on the Hugging Face hub."""
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

    tokenizer.no_truncation()  # a file may ask for either, and then every text counts the same
    tokenizer.no_padding()

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def tiktoken_counter(encoding: str) -> Counter:
    """A counter over a tiktoken vocabulary, by the name of its encoding."""
    import tiktoken

    return _tiktoken(encoding, lambda: tiktoken.get_encoding(encoding))


def openai_counter(model: str) -> Counter:
    """The tiktoken counter of an OpenAI model.

    Raises:
        UsageError: tiktoken does not know the model, or cannot get its vocabulary.
    """
    import tiktoken

    return _tiktoken(model, lambda: tiktoken.encoding_for_model(model))


def _tiktoken(name: str, load: Callable[[], tiktoken.Encoding]) -> Counter:
    try:
        encode = load().encode_ordinary
    except Exception as error:  # an unknown name, or any failure of the download
        raise UsageError(
            f"tiktoken has no vocabulary for {name!r} ({type(error).__name__}: {error}); {WAYS_OUT}"
        ) from error

    def count(text: str) -> int:
        return len(encode(text))

    return count


_PIECES = re.compile(
    r"(?P<word>[A-Za-z]+)|(?P<one>[0-9]|[!-/:-@\[-`{-~]|[\x00-\x1f\x7f])|(?P<space> +)|(?P<other>[^\x00-\x7f]+)"
)


def approximate(text: str) -> int:
    """A count without a vocabulary, meant to lie above the true one for prose and code in any script.

    A token for each three letters of a word, for each digit, sign and control character, for each eight spaces of a run, for each two
    bytes of what is not ASCII, and one more for an emoji. `tests/test_tokens.py` compares it with real vocabularies.
    """
    total = 0
    for piece in _PIECES.finditer(text):
        kind, length = piece.lastgroup, piece.end() - piece.start()
        if kind == "word":
            total += math.ceil(length / 3)
        elif kind == "space":
            total += length // 8
        elif kind == "other":
            text = piece.group()
            total += math.ceil(len(text.encode("utf-8", "replace")) / 2) + sum(char > "\uffff" for char in text)
        else:
            total += 1
    return max(total, 1 if text else 0)


def fit(limit: int, size: int, cost: Callable[[int], int], *, guess: int = 0, enough: float = 1.0) -> int:
    """The largest n <= `size` found with cost(n) <= `limit`; 0 when not even 1 fits.

    `cost` grows with n, though it need not do so at every step (tokens merge). The search alternates interpolation and
    bisection. It ends early at an n whose cost is at least `enough * limit`, so a caller that can do with 95 % pays for
    two or three counts.
    """
    low, low_cost, high, high_cost = 0, 0, size + 1, 0
    n = guess or limit * 4
    bisect = False
    while high - low > 1:
        n = min(max(n, low + 1), high - 1)
        spent = cost(n)
        if spent <= limit:
            low, low_cost = n, spent
            if enough < 1 and spent >= enough * limit:
                break
        else:
            high, high_cost = n, spent
        aim = limit * (1 + enough) / 2
        if high > size:  # nothing has been too much yet
            n = math.ceil(n * max(aim / max(spent, 1), 1.1))
        elif bisect:
            n = (low + high) // 2
        else:
            n = low + int((high - low) * (aim - low_cost) / max(high_cost - low_cost, 1))
        bisect = not bisect
    return low


def cut(text: str, limit: int, count: Counter) -> str:
    """The longest beginning of `text` that has at most `limit` tokens."""
    if len(text) < 50 * limit and count(text) <= limit:  # what is far longer is not counted to its end
        return text
    return text[: fit(limit, len(text), lambda n: count(text[:n]))]

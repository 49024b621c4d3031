from __future__ import annotations

import builtins
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import tiktoken
from helpers.counters import COUNTERS, byte_bpe
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from memagent_integrations import MissingExtra, UsageError
from memagent_integrations.tokens import approximate, counter_of, cut, fit, in_blocks, load_counter, openai_counter


@pytest.mark.fuzz
@given(size=st.integers(0, 300), limit=st.integers(1, 400), step=st.integers(1, 7))
def test_fit_finds_the_largest(size: int, limit: int, step: int) -> None:
    def cost(n: int) -> int:
        return n * step

    assert fit(limit, size, cost) == min(size, limit // step)


@pytest.mark.fuzz
@given(size=st.integers(1, 3000), limit=st.integers(1, 1000), guess=st.integers(0, 5000))
def test_fit_may_stop_when_it_is_enough(size: int, limit: int, guess: int) -> None:
    best = min(size, limit * 3)
    result = fit(limit, size, lambda n: -(-n // 3), guess=guess, enough=0.9)
    assert result <= best
    assert result == best or -(-result // 3) >= 0.9 * limit


def test_fit_needs_few_counts() -> None:
    counts = 0

    def cost(n: int) -> int:
        nonlocal counts
        counts += 1
        return n // 4

    fit(5000, 60_000, cost, guess=19_000, enough=0.96)
    assert counts <= 3
    counts = 0
    assert fit(1000, 1_000_000, cost) == 4003
    assert counts <= 25


@pytest.mark.fuzz
@given(text=st.text(), limit=st.integers(1, 50))
def test_cut_keeps_the_beginning(text: str, limit: int) -> None:
    short = cut(text, limit, len)
    assert short == text[:limit]


def test_cut_in_tokens() -> None:
    count = byte_bpe()
    text = "Ein Wörterbuch, 中文 und noch mehr. " * 20
    short = cut(text, 50, count)
    assert text.startswith(short)
    assert 47 <= count(short) <= 50


@pytest.mark.parametrize("name", ["tiktoken", "byte-bpe"])
def test_approximate_counts_high_on_prose(name: str, books: Path) -> None:
    count = COUNTERS["tiktoken"]() if name == "tiktoken" else load_counter("tiktoken:cl100k_base")
    for book in books.glob("*.txt"):
        text = book.read_text(encoding="utf-8")[:60_000]
        assert count(text) <= approximate(text) <= 1.9 * count(text), book.name


def test_approximate_counts_high_elsewhere() -> None:
    count = load_counter("tiktoken:cl100k_base")
    samples = {
        "code": Path(fit.__code__.co_filename).read_text(encoding="utf-8"),
        "manual": "\n".join(topics.values())[:50_000],
        "chinese": "人工智能是一門研究如何使機器具有智能的學科，這個領域發展得很快。" * 20,
        "arabic": "الذكاء الاصطناعي هو سلوك وخصائص معينة تتسم بها البرامج الحاسوبية. " * 20,
        "numbers": " ".join(str(n * 7919) for n in range(500)),
        "emoji": "🙂👩‍👩‍👧🎉" * 50,
    }
    for name, text in samples.items():
        assert approximate(text) >= count(text), name
    assert approximate("") == 0
    assert approximate(" ") == 1
    assert approximate("\ud800") >= 1


def test_counters_by_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["some text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = len(tokenizer.encode("some text").ids)
    assert load_counter(f"hf:{tmp_path}")("some text") == expected
    assert load_counter(f"hf:{tmp_path / 'tokenizer.json'}")("some text") == expected
    assert load_counter("approximate") is approximate
    assert load_counter("tiktoken:o200k_base")("hello <|endoftext|>") > 3
    assert openai_counter("gpt-4o")("hello") == 1


@pytest.mark.parametrize(
    "spec", ["", "hf:", "tiktoken", "nonsense:x", "tiktoken:no_such_encoding", "hf:/no/such/tokenizer"]
)
def test_unknown_names_tell_the_ways_out(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="tokenizer='approximate'"):
        load_counter(spec)


def test_unknown_openai_model() -> None:
    with pytest.raises(UsageError, match="tiktoken has no vocabulary for 'my-model'"):
        openai_counter("my-model")


def test_the_tokens_of_an_unknown_model_are_estimated_with_one_warning_that_says_how_to_count_them() -> None:
    with pytest.warns(UserWarning, match="my-model") as warned:
        assert counter_of("my-model") is approximate
    [warning] = warned
    assert "the tokens of my-model are estimated, rather too high" in str(warning.message)
    assert "tokenizer='approximate'" in str(warning.message)


def test_the_tokens_of_an_openai_model_are_counted_without_a_warning() -> None:
    assert counter_of("gpt-4o")("hello") == 1


def test_tokenizers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def import_without_tokenizers(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_tokenizers)
    with pytest.raises(MissingExtra) as caught:
        load_counter("hf:anything")
    assert caught.value.command == "pip install tokenizers"


def test_a_tokenizer_that_truncates_and_pads_still_counts(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    count = load_counter(f"hf:{tmp_path}")
    assert (count("a"), count("a " * 50)) == (1, 50)


_WORDS = st.sampled_from(
    ["word", " next", " a", "'s", " don't", "\n", "\n\n", "  ", "\t", " 12", ". ", "中文", " É", "é", "🙂", "\r\n", "x"]
)


@pytest.mark.fuzz
@pytest.mark.parametrize("encoding", ["o200k_base", "cl100k_base"])
@given(parts=st.lists(st.one_of(_WORDS, st.text(max_size=6)), max_size=400))
def test_the_tokens_of_blocks_are_those_of_the_text(encoding: str, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode() * 12  # several blocks
    assert load_counter(f"tiktoken:{encoding}")(text) == len(tiktoken.get_encoding(encoding).encode_ordinary(text))
    assert approximate(text) == approximate.__wrapped__(text)  # type: ignore[attr-defined]


def test_a_text_that_begins_alike_is_counted_where_it_differs() -> None:
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return len(text)

    text, count_blocks = "".join(f"{n} words of a text " for n in range(5000)), in_blocks(count)
    assert [count_blocks(text[:n]) for n in (80_000, 79_900, 81_000)] == [80_000, 79_900, 81_000]
    assert counted < 85_000


def test_a_function_that_returns_the_tokens_becomes_one_that_counts_them() -> None:
    encode = tiktoken.get_encoding("o200k_base").encode
    assert load_counter(encode)("one two three") == 3
    assert load_counter(lambda text: tuple(text))("four") == 4
    assert load_counter(len) is len


@pytest.mark.parametrize("wrong", [lambda text: {"input_ids": [1]}, lambda text: text, lambda text: None])
def test_a_function_that_counts_no_tokens_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="tokenizer has to return the number of tokens of a text, or a list of them"):
        load_counter(wrong)

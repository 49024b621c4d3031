"""Real tokenizers of several kinds, for tests that depend on counting."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from memagent_integrations.tokens import Counter, load_counter


def _count(tokenizer: Tokenizer) -> Counter:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@cache
def byte_bpe() -> Counter:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(topics.values(), trainer)
    return _count(tokenizer)


@cache
def unigram() -> Counter:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=1500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(list(topics.values())[:40], trainer)
    return _count(tokenizer)


@cache
def tiktoken() -> Counter:
    return load_counter("tiktoken:o200k_base")


COUNTERS = {"byte-bpe": byte_bpe, "unigram": unigram, "tiktoken": tiktoken, "characters": lambda: len}

"""Small language models with random weights, in folders that transformers loads, and LoRA adapters for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WINDOW = 256
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
PEFT_WARNS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def make_tokenizer(template: str | None) -> Any:
    """Return a tokenizer of bytes that knows a few words besides."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(["the memory of the reader and the question of the memory " * 5], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(folder: Path, *, template: str | None = TEMPLATE, size: int = 48, ends: Sequence[int] = ()) -> Path:
    """Save a Llama with random weights, wide enough that its greedy text varies; `ends` are further end tokens."""
    tokenizer = make_tokenizer(template)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.LlamaForCausalLM(config)
    # settings that a backend must not take over
    model.generation_config.update(do_sample=True, temperature=9.0, top_k=2, repetition_penalty=3.0, max_new_tokens=1)
    model.generation_config.eos_token_id = [config.eos_token_id, *ends]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(model: Path, folder: Path) -> Path:
    """Save a LoRA adapter with random weights for the model."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(folder)
    return folder

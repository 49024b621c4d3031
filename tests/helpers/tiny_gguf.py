"""A small model with random weights, in a folder for transformers and in a GGUF file (float32) for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_model import TEMPLATE, WINDOW, make_tokenizer, torch, transformers

gguf = pytest.importorskip("gguf")

__all__ = ["WINDOW", "gguf", "make_folder", "make_gguf", "torch", "transformers"]

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}


def make_folder(folder: Path, kind: str, *, template: str = TEMPLATE, **settings: Any) -> Path:
    """Save a model with two key heads for four query heads, wide enough that its greedy text varies."""
    tokenizer = make_tokenizer(template)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": WINDOW,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    others = {"initializer_range": 0.3, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(kind, **(shape | heads | ends | others | settings))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, weights in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_gguf(folder: Path, file: Path) -> Path:
    """Save the same weights for llama.cpp, whose Llama interleaves the halves of each query and key head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(WINDOW)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        if architecture == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            heads = len(weights) // 16
            weights = weights.view(heads, 2, 8, -1).transpose(1, 2).reshape(weights.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weights.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: Any, folder: Path) -> None:
    """Add the folder's tokenizer to a GGUF file."""
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    special = {token["content"]: token["id"] for token in words["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
    writer.add_bos_token_id(special["<|im_start|>"])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((folder / "chat_template.jinja").read_text(encoding="utf-8"))

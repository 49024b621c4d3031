"""The LoRA adapter of a PEFT model as a GGUF file, the format of llama.cpp: written, and read back.

The format is that of llama.cpp's converter: for each layer `NAME.lora_a` (rank, in) and `NAME.lora_b` (out, rank), with
the layer's name in a GGUF model, and alpha, which llama.cpp divides by the rank to scale the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGUFReader,
    GGUFType,
    GGUFWriter,
    Keys,
    TensorNameMap,
    get_tensor_name_map,
)
from numpy import ascontiguousarray, floating
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor

from memagent_integrations.errors import UsageError

ADAPTER = "default"
"""The name that PEFT gives to a model's only adapter."""
_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
_PAIRED = {MODEL_ARCH.LLAMA}
"""Architectures whose rotary embedding rotates neighbouring rows in llama.cpp, and half-heads in transformers."""
_BEYOND_LORA = ("modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias")

_Matrix = NDArray[floating[Any]]


def write(model: PeftModel, file: Path) -> None:
    """Write the adapter of a Llama, Mistral, Qwen2 or Qwen3 model: in float32, or float16 if it has a 16-bit dtype.

    Raises:
        UsageError: llama.cpp cannot hold this adapter, or this writer does not know the architecture; nothing is
            written.
    """
    lora: Any = model.peft_config[ADAPTER]
    base: Any = model.get_base_model()
    architecture = _architecture(base)
    _check_plain(lora)
    alpha = float(lora.lora_alpha or 1)
    tensors = list(_tensors(base, architecture, alpha))
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[architecture])
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
    for name, matrix in tensors:
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(model: Any, file: str | Path) -> PeftModel:
    """Return a transformers model with the adapter of a GGUF file, in the dtype of the model.

    Raises:
        UsageError: the file is no LoRA adapter for the layers of this model.
    """
    architecture = _architecture(model)
    try:
        content = GGUFReader(file)
        made_for = content.fields[Keys.General.ARCHITECTURE].contents()
        alpha = float(content.fields[Keys.Adapter.LORA_ALPHA].contents())
        matrices = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in content.tensors}
    except (LookupError, TypeError, ValueError) as error:  # of a GGUFReader of any other content
        raise UsageError(f"{file} is no GGUF file with a LoRA adapter") from error
    names = _names(model, architecture)
    named = ((layer, names.get_name(layer)) for layer, _ in model.named_modules())
    layers = {layer: name for layer, name in named if name and f"{name}.weight.lora_a" in matrices}
    if made_for != MODEL_ARCH_NAMES[architecture] or not layers or len(matrices) != 2 * len(layers):
        raise UsageError(f"{file} is an adapter of another model: its layers are not those of this one")
    ranks = {layer: len(matrices[f"{name}.weight.lora_a"]) for layer, name in layers.items()}
    shape: dict[str, Any] = {"r": max(ranks.values()), "rank_pattern": ranks, "lora_alpha": alpha}
    config = LoraConfig(target_modules=list(layers), **shape)
    adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=False)
    heads = _heads(model, architecture)
    modules = dict(adapted.get_base_model().named_modules())
    for layer, name in layers.items():
        lora_b = matrices[f"{name}.weight.lora_b"]
        if count := heads.get(name.rpartition(".")[2]):
            lora_b = torch.from_numpy(_unpair_rows(lora_b.numpy(), count))
        try:
            _fill(modules[layer].lora_A[ADAPTER], matrices[f"{name}.weight.lora_a"])
            _fill(modules[layer].lora_B[ADAPTER], lora_b)
        except RuntimeError as error:
            raise UsageError(f"{file} is an adapter of another model: {layer} has other sizes") from error
    return adapted.requires_grad_(False)


def _fill(linear: Any, matrix: Tensor) -> None:
    with torch.no_grad():
        linear.weight.copy_(matrix)


def _architecture(model: Any) -> MODEL_ARCH:
    model_type = model.config.model_type
    if model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UsageError(f"the architecture {model_type} is none of those that GGUF adapters are made for: {known}")
    return _ARCHITECTURES[model_type]


def _names(base: Any, architecture: MODEL_ARCH) -> TensorNameMap:
    return get_tensor_name_map(architecture, base.config.num_hidden_layers)


def _heads(base: Any, architecture: MODEL_ARCH) -> dict[str, int]:
    """Return the number of heads of the layers whose rows are paired in a GGUF file."""
    if architecture not in _PAIRED:
        return {}
    return {"attn_q": base.config.num_attention_heads, "attn_k": base.config.num_key_value_heads}


def _tensors(base: Any, architecture: MODEL_ARCH, alpha: float) -> Iterator[tuple[str, _Matrix]]:
    """Yield both matrices of each layer by name.

    llama.cpp scales by alpha / rank; where PEFT scales a layer by another factor, `lora_b` is multiplied by the rest.
    """
    config = base.config
    names, heads = _names(base, architecture), _heads(base, architecture)
    for layer, module in base.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = names.get_name(layer)
        untied = layer != "lm_head" or not config.tie_word_embeddings
        if name is None or ADAPTER not in module.lora_A or module.lora_variant or not untied:
            raise UsageError(f"llama.cpp cannot hold what was trained of {layer}")
        lora_a, lora_b = _matrix(module.lora_A[ADAPTER]), _matrix(module.lora_B[ADAPTER])
        lora_b = lora_b * lora_b.dtype.type(module.scaling[ADAPTER] * len(lora_a) / alpha)
        if count := heads.get(name.rpartition(".")[2]):
            lora_b = _pair_rows(lora_b, count)
        yield f"{name}.weight.lora_a", lora_a
        yield f"{name}.weight.lora_b", lora_b


def _check_plain(lora: Any) -> None:
    if lora.peft_type != "LORA":
        raise UsageError(f"llama.cpp takes LoRA adapters alone, not {lora.peft_type}")
    beyond = [name for name in _BEYOND_LORA if getattr(lora, name, None)]
    if beyond or lora.bias != "none":
        raise UsageError(f"llama.cpp takes plain LoRA adapters, without {' and '.join(beyond or ['bias'])}")


def _matrix(linear: Any) -> _Matrix:
    weight = linear.weight.detach().cpu()
    matrix: _Matrix = (weight.half() if weight.itemsize == 2 else weight.float()).numpy()
    return matrix


def _pair_rows(rows: _Matrix, heads: int) -> _Matrix:
    """Reorder the rows (out, rank) of a query or key projection: rows i and i + half a head become neighbours."""
    out, rank = rows.shape
    return ascontiguousarray(rows.reshape(heads, 2, out // heads // 2, rank).swapaxes(1, 2).reshape(out, rank))


def _unpair_rows(rows: _Matrix, heads: int) -> _Matrix:
    """Undo `_pair_rows`."""
    out, rank = rows.shape
    return ascontiguousarray(rows.reshape(heads, out // heads // 2, 2, rank).swapaxes(1, 2).reshape(out, rank))

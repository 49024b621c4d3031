"""Write the LoRA adapter of a PEFT model as a GGUF file, the format of llama.cpp.

The format is that of llama.cpp's converter: for each layer `NAME.lora_a` (rank, in) and `NAME.lora_b` (out, rank), with
the layer's name in a GGUF model, and alpha, which llama.cpp divides by the rank to scale the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFWriter, Keys, get_tensor_name_map
from numpy import ascontiguousarray, float32
from numpy.typing import NDArray
from peft import PeftModel
from peft.tuners.lora import LoraLayer

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

_Matrix = NDArray[float32]


def write(model: PeftModel, file: Path) -> None:
    """Write the adapter of a Llama, Mistral, Qwen2 or Qwen3 model, in float32.

    Raises:
        UsageError: llama.cpp cannot hold this adapter, or this writer does not know the architecture; nothing is
            written.
    """
    lora: Any = model.peft_config[ADAPTER]
    base: Any = model.get_base_model()
    model_type = base.config.model_type
    if model_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UsageError(f"the architecture {model_type} is none of those that can be written for llama.cpp: {known}")
    _check_plain(lora)
    architecture, alpha = _ARCHITECTURES[model_type], float(lora.lora_alpha or 1)
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


def _tensors(base: Any, architecture: MODEL_ARCH, alpha: float) -> Iterator[tuple[str, _Matrix]]:
    """Yield both matrices of each layer by name.

    llama.cpp scales by alpha / rank; where PEFT scales a layer by another factor, `lora_b` is multiplied by the rest.
    """
    config = base.config
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {}
    if architecture in _PAIRED:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer, module in base.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = names.get_name(layer)
        untied = layer != "lm_head" or not config.tie_word_embeddings
        if name is None or ADAPTER not in module.lora_A or module.lora_variant or not untied:
            raise UsageError(f"llama.cpp cannot hold what was trained of {layer}")
        lora_a, lora_b = _matrix(module.lora_A[ADAPTER]), _matrix(module.lora_B[ADAPTER])
        lora_b = lora_b * float32(module.scaling[ADAPTER] * len(lora_a) / alpha)
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
    matrix: _Matrix = linear.weight.detach().float().cpu().numpy()
    return matrix


def _pair_rows(rows: _Matrix, heads: int) -> _Matrix:
    """Reorder the rows (out, rank) of a query or key projection: rows i and i + half a head become neighbours."""
    out, rank = rows.shape
    return ascontiguousarray(rows.reshape(heads, 2, out // heads // 2, rank).swapaxes(1, 2).reshape(out, rank))

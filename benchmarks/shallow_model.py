"""Write the first layers of the embedded model, for measurements in which the replies do not matter.

    python benchmarks/shallow_model.py OUT [--layers 6]

OUT gets a folder, for transformers and vLLM, and OUT.gguf for llama.cpp. Needs the extras llamacpp and transformers.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import gguf
from transformers import AutoModelForCausalLM

from memagent_integrations.backends import prepared


def cut_folder(source: Path, target: Path, layers: int) -> None:
    shutil.copytree(source, target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(target)


def cut_gguf(source: Path, target: Path, layers: int) -> None:
    reader = gguf.GGUFReader(source)
    fields = dict(reader.fields)
    writer = gguf.GGUFWriter(target, fields.pop(gguf.Keys.General.ARCHITECTURE).contents())
    for name, field in fields.items():
        if not name.startswith("GGUF."):
            value = layers if name.endswith(".block_count") else field.contents()
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        kind, _, rest = tensor.name.partition(".")
        if kind != "blk" or int(rest.partition(".")[0]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    cut_folder(prepared.for_transformers("smollm2-raw"), options.target, options.layers)
    cut_gguf(prepared.for_llamacpp("smollm2-raw"), options.target.with_suffix(".gguf"), options.layers)


if __name__ == "__main__":
    main()

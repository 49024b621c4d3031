"""A GGUF model in another quantisation."""

from __future__ import annotations

from pathlib import Path

from memagent_integrations.errors import MissingExtra


def requantise(source: Path, target: Path, kind: str) -> None:
    """Write the model of a GGUF file with the matrices of its layers as `kind` ("Q8_0"); the rest stays as it is.

    Raises:
        MissingExtra: gguf is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingExtra.extra("gguf", "llamacpp") from error
    reader = gguf.GGUFReader(source)
    fields = dict(reader.fields)
    writer = gguf.GGUFWriter(target, fields.pop(gguf.Keys.General.ARCHITECTURE).contents())
    for name, field in fields.items():
        if not name.startswith("GGUF."):  # the writer's own
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        data, data_type = tensor.data, tensor.tensor_type
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            weights, data_type = gguf.dequantize(data, data_type), gguf.GGMLQuantizationType[kind]
            data = gguf.quantize(weights, data_type)
        writer.add_tensor(tensor.name, data, raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

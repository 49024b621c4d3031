"""The embedded model in the forms that llama.cpp and transformers read, made from its file once."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_embedded import MODEL, in_processes
from helpers.tiny_gguf import gguf, make_folder, make_gguf, torch

from memagent_integrations import MissingExtra, UsageError, backends, load_backend
from memagent_integrations.backends import embedded, prepared
from memagent_integrations.backends.transformers import TransformersBackend

pytestmark = pytest.mark.heavy


@dataclass(frozen=True)
class Form:
    """What one kind of engine reads: how to get it, its path in the cache, and its weights in that path."""

    get: Callable[[str], Path]
    name: str
    weights: str = ""

    @property
    def path(self) -> Path:
        return embedded.cache() / self.name

    @property
    def file(self) -> Path:
        return self.path / self.weights


LLAMACPP = Form(prepared.for_llamacpp, "tiny.Q8_0.gguf")
TRANSFORMERS = Form(prepared.for_transformers, "tiny.float16", "model.safetensors")
every_form = pytest.mark.parametrize("form", [LLAMACPP, TRANSFORMERS], ids=["llama.cpp", "transformers"])


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    return make_gguf(make_folder(folder / "model", "llama"), folder / "tiny.gguf").read_bytes()


@pytest.fixture
def source(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a model into the cache; return its path."""
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    return put(content, monkeypatch)


def put(content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    sha256 = hashlib.sha256(content).hexdigest()
    model = replace(MODEL, sha256=sha256, size=len(content), quantisation="Q8_0")
    monkeypatch.setattr(embedded, "EMBEDDED", {"tiny": model})
    source = embedded.path("tiny")
    source.parent.mkdir(exist_ok=True)
    source.write_bytes(content)
    return source


def test_llamacpp_gets_the_matrices_of_the_layers_in_another_quantisation(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy as np

    kinds = {"token_embd.weight": "Q4_1", "blk.0.attn_norm.weight": "F32", "blk.0.attn_q.weight": "Q4_1"}
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("sizes", [3, 5])
    writer.add_float32("epsilon", 1e-5)
    for name, kind in kinds.items():
        weights = np.random.default_rng(7).standard_normal((4, 64), np.float32)[: 1 if "norm" in name else 4].squeeze()
        data_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(weights, data_type), raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    put(source.read_bytes(), monkeypatch)

    made = prepared.for_llamacpp("tiny")
    assert made == LLAMACPP.path
    assert [record.message for record in caplog.records] == [f"writing the model tiny as Q8_0, once, to {made}"]
    then, now = gguf.GGUFReader(source), gguf.GGUFReader(made)
    assert {name: field.contents() for name, field in then.fields.items()} == {
        name: field.contents() for name, field in now.fields.items()
    }
    assert [field.types for field in then.fields.values()] == [field.types for field in now.fields.values()]
    assert {tensor.name: tensor.tensor_type.name for tensor in now.tensors} == kinds | {"blk.0.attn_q.weight": "Q8_0"}
    for old, new in zip(then.tensors, now.tensors, strict=True):
        weights = gguf.dequantize(old.data, old.tensor_type)
        np.testing.assert_allclose(
            gguf.dequantize(new.data, new.tensor_type), weights, atol=np.abs(weights).max() / 250
        )


def test_transformers_gets_a_folder_with_the_same_model(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load_backend("transformers:tiny", dtype="float32", device="cpu") as made:
        folder = TRANSFORMERS.path
        assert [record.message for record in caplog.records] == [
            f"writing the model tiny as float16, once, to {folder}"
        ]
        with TransformersBackend(source, dtype="float32", device="cpu") as read:
            assert made.window == read.window
            assert made.count("The memory of the reader.") == read.count("The memory of the reader.")
            assert made.tokenizer.chat_template == read.tokenizer.chat_template  # type: ignore[attr-defined]
            theirs = read.model.state_dict()
            ours = made.model.state_dict()  # type: ignore[attr-defined]
            assert ours.keys() == theirs.keys()
            for name, weights in theirs.items():
                torch.testing.assert_close(ours[name], weights.half().float(), rtol=0, atol=0)
    assert {file.stat().st_mode for file in folder.iterdir()} == {(folder / "config.json").stat().st_mode}


@every_form
def test_it_is_made_once(source: Path, form: Form, caplog: pytest.LogCaptureFixture) -> None:
    assert form.get("tiny") == form.path
    first = form.file.stat()
    assert form.get("tiny") == form.path
    os.utime(form.file, (1, 1))  # touched, not changed
    assert form.get("tiny") == form.path
    assert form.file.stat().st_ino == first.st_ino
    assert len(caplog.records) == 1


@every_form
def test_processes_that_ask_at_once_make_it_once(source: Path, form: Form) -> None:
    paths, log = in_processes(f"prepared.{form.get.__name__}('tiny')", embedded.EMBEDDED["tiny"])
    assert paths == [str(form.path)] * 3
    assert log.count("writing the model") == 1


def damage(form: Form) -> None:
    content = form.file.read_bytes()
    form.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def stamp(form: Form) -> Path:
    return form.file.with_name(f"{form.file.name}.verified")


def kill(form: Form) -> None:
    damage(form)
    form.path.rename(f"{form.path}.new")


HARM = {
    "changed": damage,
    "cut off": lambda form: form.file.write_bytes(form.file.read_bytes()[:-9]),
    "gone": lambda form: form.file.unlink(),
    "unknown": lambda form: stamp(form).unlink(),
    "unknown stamp": lambda form: stamp(form).write_bytes(b"[]"),
    "killed while it was made": kill,
}


@every_form
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_one_is_made_anew(source: Path, form: Form, harm: Callable[[Form], object]) -> None:
    form.get("tiny")
    good = form.file.read_bytes()
    harm(form)
    assert form.get("tiny") == form.path
    assert form.file.read_bytes() == good
    assert not Path(f"{form.path}.new").exists()


@every_form
def test_what_fills_the_disk_is_removed(source: Path, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, **_: Any) -> None:
        if form.weights:
            target.mkdir()
        (target / form.weights).write_bytes(b"the beginning")
        raise OSError(28, "No space left on device")

    for name in ("requantise", "_dequantise"):
        monkeypatch.setattr(prepared, name, full)
    with pytest.raises(UsageError, match="No space left on device; MEMAGENT_CACHE names another folder"):
        form.get("tiny")
    assert not Path(f"{form.path}.new").exists()


@every_form
def test_without_gguf(source: Path, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match="gguf is not installed; run: "):
        form.get("tiny")
    assert not form.path.exists()


@every_form
def test_in_a_cache_that_cannot_be_written_the_models_own_file_is_read(
    source: Path, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert form.get("tiny") == source
    monkeypatch.undo()


def test_each_engine_reads_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(backends, "_make", lambda kind, model, options: made.append(model))
    for name in ("tiny", "llamacpp:tiny", "transformers:tiny", "vllm:tiny", "openai:tiny"):
        load_backend(name)
    assert made == [LLAMACPP.path, LLAMACPP.path, "tiny", "tiny", "tiny"]
    assert prepared.weights_of("tiny") == TRANSFORMERS.path
    assert prepared.weights_of("gpt2") == "gpt2"
    assert prepared.weights_of(Path("tiny")) == Path("tiny"), "a folder of that name"


def test_it_is_called_what_it_was_asked_for_by_and_not_where_it_lies(source: Path) -> None:
    for backend in (load_backend("transformers:tiny", device="cpu"), TransformersBackend("tiny", device="cpu")):
        with backend:
            assert backend.name == "transformers:tiny"
            assert str(source.parent) not in repr(backend.identity)
            assert backend.count("one two") > 0

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import ask
from helpers.tiny_gguf import WINDOW, gguf, make_folder, make_gguf, torch, transformers
from helpers.tiny_model import PEFT_WARNS

from memagent_integrations import Backend, Reader, UsageError, load_backend, policies
from memagent_integrations.backends import embedded, prepared
from memagent_integrations.policies import Policy
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets

peft = pytest.importorskip("peft")
pytest.importorskip("xllamacpp")

from memagent_integrations.backends import gguf_adapter  # noqa: E402
from memagent_integrations.training import export  # noqa: E402

pytestmark = [PEFT_WARNS, pytest.mark.heavy]
KINDS = ("llama", "mistral", "qwen2", "qwen3")
FIGURES = export.Figures(data="questions on keys and values, 4 chunks", steps=1200)
PROMPTS = [
    [7 * length * position % 280 for position in range(1, length)] for length in (9, 23, 40, 77, 130)
]  # lengths, since rotations show with them
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FLOAT32 = {"device": "cpu", "dtype": "float32"}
LLAMACPP = {"window": WINDOW, "threads": 1}


def policy(model: str) -> Policy:
    return Policy(
        model=model,
        prompts=PromptSet.default(layout="section-first"),
        budgets=Budgets(chunk_tokens=60, memory_tokens=20),
    )


def adapted(model: Any, *, scale: float = 0.15, **settings: Any) -> Any:
    """The model with a LoRA adapter of random weights on all its projections."""
    config = {"r": 4, "lora_alpha": 16, "target_modules": LINEAR, "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_" in name:
                weights.copy_(torch.randn(weights.shape, generator=random) * scale)
    return model.eval()


def by_transformers(model: Any, prompts: Sequence[list[int]] = PROMPTS) -> Any:
    """Log-probabilities of the next token (prompts, vocabulary)."""
    with torch.no_grad():
        return torch.stack(
            [torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1) for prompt in prompts]
        )


def by_llamacpp(file: Path, adapter: Path | str | None, prompts: Sequence[list[int]] = PROMPTS) -> Any:
    """The same; the token itself is forced, since llama.cpp shows none that begins a character."""
    with load_backend(f"llamacpp:{file}", adapter=adapter, **LLAMACPP) as backend:
        return torch.stack([_next(backend, prompt) for prompt in prompts])


def _next(backend: Any, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 10**6, "logit_bias": [[70, 1000]]}
    answer = backend._ask(f"{backend._server.listening_address}/completion", body)
    logprobs = {token["id"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}
    return torch.tensor([logprobs[token] for token in range(len(logprobs))], dtype=torch.float64)


class Tiny:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = make_folder(folder / kind, kind), kind
        self.gguf = make_gguf(self.folder, folder / f"{kind}.gguf")

    def model(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def policy(self) -> Policy:
        return policy(f"transformers:{self.folder}")


@pytest.fixture(scope="module")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: Tiny(folder, kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def tiny(tinies: dict[str, Tiny], request: pytest.FixtureRequest) -> Tiny:
    return tinies[request.param]


@pytest.fixture
def llama(tinies: dict[str, Tiny]) -> Tiny:
    return tinies["llama"]


def answers(backend: Backend) -> list[str]:
    """Greedy replies, without the characters that are not whole: each backend shows these in its own way."""
    with backend:
        return [
            backend.complete(ask(text, 24)).text.replace("\ufffd", "")
            for text in ("the memory of the reader", "question", "the the the", "Who?")
        ]


def test_the_adapter_says_the_same_in_both_forms(tiny: Tiny, tmp_path: Path) -> None:
    model = adapted(tiny.model())
    written = export.save(model, None, tmp_path / "reader", policy=tiny.policy(), figures=FIGURES)
    ours, theirs = by_transformers(model), by_llamacpp(tiny.gguf, written.adapter_for("llamacpp"))
    assert (ours - theirs).abs().max() < 0.1  # llama.cpp keeps keys and values in 16 bits
    assert (ours - by_llamacpp(tiny.gguf, None)).abs().max() > 5
    name = f"policy:{tmp_path / 'reader'}"
    here, there = (
        answers(load_backend(name, **FLOAT32)),
        answers(load_backend(name, model=f"llamacpp:{tiny.gguf}", **LLAMACPP)),
    )
    assert here == there
    assert here != answers(load_backend(f"transformers:{tiny.folder}", **FLOAT32))


def test_without_the_permutation_it_would_say_something_else(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(llama.model())
    monkeypatch.setattr(gguf_adapter, "_PAIRED", set())
    gguf_adapter.write(model, tmp_path / "adapter.gguf")
    assert (by_transformers(model) - by_llamacpp(llama.gguf, tmp_path / "adapter.gguf")).abs().max() > 5


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "lora_alpha": 7},
        {"rank_pattern": {"q_proj": 2, "down_proj": 9}, "alpha_pattern": {"k_proj": 3}},
        {"lora_alpha": 0},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": "all-linear"},
    ],
)
def test_settings_of_an_adapter(llama: Tiny, tmp_path: Path, settings: dict[str, Any]) -> None:
    model = adapted(llama.model(), **settings)
    gguf_adapter.write(model, tmp_path / "adapter.gguf")
    assert (by_transformers(model) - by_llamacpp(llama.gguf, tmp_path / "adapter.gguf")).abs().max() < 0.1
    read = gguf_adapter.read(llama.model(), tmp_path / "adapter.gguf").eval()
    assert (by_transformers(model) - by_transformers(read)).abs().max() < 1e-4


def test_transformers_reads_the_file_of_llamacpp(tiny: Tiny, tmp_path: Path) -> None:
    written = export.save(adapted(tiny.model()), None, tmp_path / "reader", policy=tiny.policy(), figures=FIGURES)
    gguf_file = written.adapter_for("llamacpp")
    ours, theirs = (
        answers(load_backend(written.model, adapter=adapter, **FLOAT32)) for adapter in (written.adapter, gguf_file)
    )
    assert ours == theirs


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no GGUF file at all, but as long as the head of one"])
def test_a_file_that_is_no_adapter(llama: Tiny, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "adapter.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=r"adapter\.gguf is no GGUF file with a LoRA adapter"):
        gguf_adapter.read(llama.model(), tmp_path / "adapter.gguf")


def test_a_model_is_no_adapter(llama: Tiny) -> None:
    with pytest.raises(UsageError, match="is no GGUF file with a LoRA adapter"):
        gguf_adapter.read(llama.model(), llama.gguf)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"intermediate_size": 32}, {"model_type": "qwen2"}])
def test_an_adapter_of_another_model(llama: Tiny, tmp_path: Path, change: dict[str, Any]) -> None:
    gguf_adapter.write(adapted(llama.model()), tmp_path / "adapter.gguf")
    config = {**llama.model().config.to_dict(), **change}
    other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    with pytest.raises(UsageError, match="of another model"):
        gguf_adapter.read(other, tmp_path / "adapter.gguf")


def test_the_file_is_as_llamacpp_reads_it(llama: Tiny, tmp_path: Path) -> None:
    gguf_adapter.write(adapted(llama.model(), target_modules=["k_proj"]), tmp_path / "adapter.gguf")
    file = gguf.GGUFReader(tmp_path / "adapter.gguf")
    fields = {name: field.contents() for name, field in file.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
    }
    shapes = {tensor.name: tensor.data.shape for tensor in file.tensors}
    assert shapes == {
        f"blk.{layer}.attn_k.weight.lora_{which}": shape
        for layer in (0, 1)
        for which, shape in (("a", (4, 64)), ("b", (32, 4)))
    }


@pytest.mark.parametrize(
    ("kind", "shape", "settings", "message"),
    [
        (
            "gemma",
            {},
            {},
            "the architecture gemma is none of those that GGUF adapters are made for: llama, mistral, qwen2, qwen3",
        ),
        ("llama", {}, {"use_dora": True}, r"cannot hold what was trained of model\.layers\.0\.self_attn\.q_proj"),
        ("llama", {}, {"modules_to_save": ["lm_head"]}, "without modules_to_save"),
        ("llama", {}, {"bias": "all"}, "without bias"),
        ("llama", {}, {"target_modules": ["embed_tokens"]}, r"cannot hold what was trained of model\.embed_tokens"),
        (
            "llama",
            {"tie_word_embeddings": True},
            {"target_modules": ["lm_head"]},
            "cannot hold what was trained of lm_head",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_what_llamacpp_cannot_hold(
    kind: str,
    shape: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_folder(tmp_path / "model", kind, **shape)
    model = adapted(transformers.AutoModelForCausalLM.from_pretrained(folder), **settings)
    with pytest.raises(UsageError, match=message):
        gguf_adapter.write(model, tmp_path / "adapter.gguf")
    assert not (tmp_path / "adapter.gguf").exists()
    with caplog.at_level(logging.WARNING, "memagent_integrations"):
        export.save(model, None, tmp_path / "reader", policy=policy(f"transformers:{folder}"), figures=FIGURES)
    assert "the policy gets no adapter.gguf" in caplog.text
    assert "There is no `adapter.gguf`" in (tmp_path / "reader" / "README.md").read_text()
    with pytest.raises(UsageError, match=r"there is no .*adapter\.gguf; name another backend"):
        load_backend(f"policy:{tmp_path / 'reader'}", model="llamacpp:any.gguf")
    assert answers(load_backend(f"policy:{tmp_path / 'reader'}", device="cpu"))


def test_other_adapters_than_lora(llama: Tiny, tmp_path: Path) -> None:
    model = peft.get_peft_model(llama.model(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(UsageError, match="LoRA adapters alone, not"):
        gguf_adapter.write(model, tmp_path / "adapter.gguf")


def test_a_model_trained_whole_moves_with_its_policy(llama: Tiny, tmp_path: Path) -> None:
    model = llama.model()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.folder)
    written = export.save(model, tokenizer, tmp_path / "reader", policy=llama.policy(), figures=FIGURES)
    assert (written.model, written.adapter) == (f"transformers:{tmp_path / 'reader' / 'model'}", None)
    moved = shutil.move(tmp_path / "reader", tmp_path / "moved")
    replies = answers(load_backend(f"policy:{moved}", **FLOAT32))
    model.save_pretrained(tmp_path / "own")
    tokenizer.save_pretrained(tmp_path / "own")
    assert replies == answers(load_backend(f"transformers:{tmp_path / 'own'}", **FLOAT32))
    assert replies != answers(load_backend(f"transformers:{llama.folder}", **FLOAT32))
    assert str(tmp_path) not in (moved / "memagent.json").read_text()


def test_what_came_from_a_gguf_file_is_saved_whole(llama: Tiny, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        llama.gguf.parent, gguf_file=llama.gguf.name, dtype="float32"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.folder)
    written = export.save(
        model, tokenizer, tmp_path / "reader", policy=policy(f"transformers:{llama.gguf}"), figures=FIGURES
    )
    saved = transformers.AutoModelForCausalLM.from_pretrained(written.model.partition(":")[2])
    assert torch.equal(by_transformers(saved), by_transformers(model))


def test_a_reader_reads_with_all_of_it(llama: Tiny, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "wide", "llama", max_position_embeddings=2048)
    export.save(
        adapted(llama.model()), None, tmp_path / "reader", policy=policy(f"transformers:{folder}"), figures=FIGURES
    )
    reader = Reader(f"policy:{tmp_path / 'reader'}", backend_options={"device": "cpu"})
    reading = reader.read("Who?", "the memory of the reader. " * 20)
    assert (reader.prompts, reader.budgets) == (policy("").prompts, policy("").budgets)
    assert reading.model == f"transformers:{folder}"
    assert len(reading.steps) > 2


def test_the_card_has_the_figures_of_the_run(llama: Tiny, tmp_path: Path) -> None:
    figures = export.Figures(
        data="needles, 2,000 tokens",
        steps=1200,
        rewards=[0.25, 0.875, 0.75],
        scores={"needles, 8192 tokens": (0.1875, 0.8125)},
        settings={"learning rate": 1e-6, "rollouts a question": 16},
    )
    model = adapted(llama.model(), r=9)
    export.save(model, None, tmp_path / "keeper", policy=policy("transformers:someone/Small-1.5B"), figures=figures)
    card = (tmp_path / "keeper" / "README.md").read_text()
    assert card.startswith("---\nbase_model: someone/Small-1.5B\nlibrary_name: peft\n")
    for line in (
        "# keeper",
        "- data: needles, 2,000 tokens",
        "- steps: 1,200",
        "- mean reward: 0.250 in the first step, 0.750 in the last, 0.875 at best",
        "- learning rate: 1e-06",
        "| needles, 8192 tokens | 0.188 | 0.812 |",
        'answer = Reader("policy:keeper").read(question, document).answer',
    ):
        assert line in card.splitlines()
    assert "--enable-lora --lora-modules keeper=keeper/adapter --max-lora-rank 16`" in card
    assert str(tmp_path) not in card
    config = json.loads((tmp_path / "keeper" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/Small-1.5B"
    written = {
        path.relative_to(tmp_path / "keeper").as_posix() for path in (tmp_path / "keeper").rglob("*") if path.is_file()
    }
    assert written == {
        "README.md",
        "memagent.json",
        "adapter.gguf",
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }


def test_what_is_there_stays(llama: Tiny, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    (tmp_path / "reader" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, message in (
        ("reader", "is there already"),
        ("file", "is there already"),
        ("file/reader", r"cannot write '.*reader'"),
        ("a\0b", "cannot write"),
    ):
        with pytest.raises(UsageError, match=message):
            export.save(llama.model(), None, tmp_path / name, policy=llama.policy(), figures=FIGURES)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "notes.txt", "reader"]


def test_a_failure_leaves_nothing_behind(llama: Tiny, tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left on device"):
        export.save(llama.model(), Full(), tmp_path / "new" / "reader", policy=llama.policy(), figures=FIGURES)
    assert not list((tmp_path / "new").iterdir())


def test_an_endpoint_has_the_adapter_already(llama: Tiny, tmp_path: Path) -> None:
    export.save(adapted(llama.model()), None, tmp_path / "reader", policy=llama.policy(), figures=FIGURES)
    name = f"policy:{tmp_path / 'reader'}"
    reader = Reader(name, backend_options={"model": "openai:reader", "base_url": "http://127.0.0.1:1/v1"})
    assert reader.backend.name == "openai:reader"
    assert reader.prompts == llama.policy().prompts


@pytest.mark.parametrize("model", ["policy:.", 5, Path("model.gguf")])
def test_the_model_is_named(model: Any, llama: Tiny, tmp_path: Path) -> None:
    policies.save(llama.policy(), tmp_path)
    with pytest.raises(UsageError, match="has to be the name of a model"):
        load_backend(f"policy:{tmp_path}", model=model)


@pytest.mark.real
def test_the_embedded_model_with_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = embedded.pull("smollm2-raw")
    prompts = [[1, 4093, 198, *range(1000, 1040), 2, 198, 1, 520, 9531, 198]]
    folder = prepared.for_transformers("smollm2-raw")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    before = by_transformers(model, prompts), by_llamacpp(file, None, prompts)
    model = adapted(model, scale=0.05)
    export.save(model, None, tmp_path / "reader", policy=policy("smollm2-raw"), figures=FIGURES)
    assert str(folder) not in (tmp_path / "reader" / "adapter" / "adapter_config.json").read_text()
    monkeypatch.setattr(gguf_adapter, "_PAIRED", set())
    gguf_adapter.write(model, tmp_path / "wrong.gguf")
    change = by_transformers(model, prompts) - before[0]

    def likeness(adapter: Path) -> float:
        """Correlate the changes, since the bases differ a little: llama.cpp computes with the quantised weights."""
        theirs = by_llamacpp(file, adapter, prompts) - before[1]
        return float(torch.corrcoef(torch.stack([change.flatten(), theirs.flatten()]))[0, 1])

    assert likeness(tmp_path / "reader" / "adapter.gguf") > 0.98
    assert likeness(tmp_path / "wrong.gguf") < 0.95, "without the permutation"
    name = f"policy:{tmp_path / 'reader'}"
    prompt = ask("Name three colours.", 10)
    monkeypatch.setattr(prepared, "for_llamacpp", embedded.pull)  # the same weights: nearly tied replies would differ
    with (
        load_backend(name, window=512) as here,
        load_backend(name, model="transformers:smollm2-raw", **FLOAT32) as there,
    ):
        assert here.name == "smollm2-raw"
        assert here._extra_body == {"cache_prompt": True}, "no repetition penalty"  # type: ignore[attr-defined]
        assert here.complete(prompt).text == there.complete(prompt).text

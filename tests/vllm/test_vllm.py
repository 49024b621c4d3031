"""Both ways to use vLLM: its server through the endpoint backend, and its engine in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_env
from helpers.contract import SCRIPTS, BackendContract, ask, joined

from memagent_integrations import Backend, BackendError, ContextOverflow, UsageError, load_backend
from memagent_integrations.backends.in_process import ChatTokenizer
from memagent_integrations.records import Prompt, Reply

SHARED = "The harbour master noted the tide and the wind. " * 60
CPU = {"dtype": "float32", "enforce_eager": True}


@pytest.fixture(scope="class")
def served(url: str) -> Iterator[Backend]:
    with load_backend("openai:smollm2", base_url=url, temperature=0.0) as backend:
        yield backend


class TestServer(BackendContract):
    @pytest.fixture
    def backend(self, served: Backend) -> Backend:
        return served

    async def test_async_gives_the_same(self, url: str) -> None:
        backend = load_backend("openai:smollm2", base_url=url, temperature=0.0)
        try:
            await super().test_async_gives_the_same(backend)
        finally:
            await backend.aclose()  # in the event loop that opened the connections

    def test_counts_as_the_models_own_tokenizer(self, backend: Backend, model: Path) -> None:
        transformers = pytest.importorskip("transformers")
        tokenizer = ChatTokenizer(transformers.AutoTokenizer.from_pretrained(model))
        for text in (SCRIPTS, SHARED, "<|im_end|> \x00 \ud800", " "):
            assert backend.count(text) == tokenizer.count(text)

    def test_reports_what_it_took_from_the_cache(self, backend: Backend) -> None:
        backend.complete(ask(SHARED + "What did he note?", 2))
        usage = backend.complete(ask(SHARED + "Who noted it?", 2)).usage
        assert usage.cached_tokens is not None
        assert usage.prompt_tokens is not None
        assert 0.5 * usage.prompt_tokens < usage.cached_tokens < usage.prompt_tokens

    def test_an_unknown_model_is_named(self, url: str) -> None:
        with (
            load_backend("openai:no-such-model", base_url=url) as other,
            pytest.raises(BackendError, match="no-such-model") as caught,
        ):
            other.complete(ask("Hello."))
        assert not caught.value.retryable

    def test_an_overflow_says_how_large_the_window_is(self, backend: Backend) -> None:
        with pytest.raises(ContextOverflow, match="8192"):
            backend.complete(ask("word " * 9000))


@pytest.fixture(scope="class")  # not for the whole module: it takes gigabytes
def in_process(model: Path) -> Iterator[Backend]:
    with load_backend(f"vllm:{model}", **CPU) as backend:
        yield backend


class TestInProcess(BackendContract):
    @pytest.fixture
    def backend(self, in_process: Backend) -> Backend:
        return in_process

    def test_reports_what_it_took_from_the_cache(self, backend: Backend) -> None:
        backend.complete(ask(SHARED + "What did he note?", 2))
        usage = backend.complete(ask(SHARED + "Who noted it?", 2)).usage
        assert usage.cached_tokens is not None
        assert usage.prompt_tokens is not None
        assert 0.5 * usage.prompt_tokens < usage.cached_tokens < usage.prompt_tokens

    def test_each_prompt_has_its_own_limit(self, backend: Backend) -> None:
        prompts = [ask("Count from one to fifty in words, please.", limit) for limit in (9, 2, 5)]
        replies = backend.complete_batch(prompts)
        assert [reply.usage.completion_tokens for reply in replies if isinstance(reply, Reply)] == [9, 2, 5]
        assert replies[0].text.startswith(replies[2].text)  # type: ignore[union-attr]

    def test_ends_with_the_text(self, backend: Backend) -> None:
        prompt = ask("Say hello.", 200)
        reply = backend.complete(prompt)
        assert reply.finish_reason == "stop"
        assert "<|im_end|>" not in reply.text
        assert joined(backend.stream(prompt))[0] == reply.text

    def test_a_prompt_and_its_output_share_the_window(self, backend: Backend) -> None:
        used = backend.template_tokens + backend.count("word " * 8000)
        overflow = rf"prompt {used} \+ output {8193 - used} = 8193 tokens, but the window holds 8192"
        with pytest.raises(ContextOverflow, match=overflow):
            backend.complete(ask("word " * 8000, 8193 - used))

    def test_an_empty_prompt_is_refused(self, backend: Backend) -> None:
        with pytest.raises(UsageError, match="empty"):
            backend.complete(Prompt(index=0, phase="answer", messages=(), max_tokens=2))

    def test_streams_and_calls_share_the_engine(self, backend: Backend) -> None:
        prompt = ask("Count from one to one hundred in words.", 60)
        stream = backend.stream(prompt)
        first = next(stream)
        assert backend.complete(ask("Name three colours.", 12)).text, "a waiting stream delays no other call"
        texts: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda n=n: texts.update({n: joined(backend.stream(prompt))[0]})) for n in range(3)
        ]
        for thread in threads:
            thread.start()
        text, reply, _ = joined([first, *stream])
        for thread in threads:
            thread.join()
        assert set(texts.values()) == {text} == {reply.text}
        assert len(texts) == 3

    def test_leaving_a_stream_takes_its_prompt_out_of_the_engine(self, backend: Backend) -> None:
        stream = backend.stream(ask("Count from one to one hundred in words.", 2000))
        next(stream)
        engine = backend._engine._engine  # type: ignore[attr-defined]
        assert engine.has_unfinished_requests()
        stream.close()
        assert not engine.has_unfinished_requests()

    def test_a_refused_prompt_leaves_the_others_alone(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        chat: ChatTokenizer = backend._chat  # type: ignore[attr-defined]
        encode = chat.encode

        def encode_wrongly(prompt: Prompt, window: int | None) -> list[int]:
            beyond_the_vocabulary = 10**9
            return [beyond_the_vocabulary] if prompt.max_tokens == 3 else encode(prompt, window)

        monkeypatch.setattr(chat, "encode", encode_wrongly)
        first, refused, last = backend.complete_batch([ask("Hello.", 4), ask("Hello.", 3), ask("Hello.", 4)])
        assert isinstance(refused, BackendError)
        assert isinstance(first, Reply)
        assert isinstance(last, Reply)
        assert first.text == last.text
        with pytest.raises(BackendError, match="failed"):
            list(backend.stream(ask("Hello.", 3)))


def make_adapter(model: Path, folder: Path, *, module: str = "o_proj") -> Path:
    """Save a LoRA adapter with random weights for one module of each layer."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    config = json.loads((model / "config.json").read_text())
    width, rank = config["hidden_size"], 32
    random = torch.Generator().manual_seed(3)
    weights: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
        weights[f"{name}A.weight"] = torch.randn(rank, width, generator=random) / width**0.5
        weights[f"{name}B.weight"] = torch.randn(width, rank, generator=random) / rank**0.5
    folder.mkdir()
    safetensors.save_file(weights, folder / "adapter_model.safetensors")
    lora = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 64,
        "lora_dropout": 0.0,
        "target_modules": [module],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(lora))
    return folder


def test_an_adapter_changes_what_the_model_says(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ask("Name three colours.")
    adapter = make_adapter(model, tmp_path / "adapter")
    options = CPU | {"window": 512, "temperature": 0.7, "seed": 4, "batch_size": 2}
    with load_backend(f"vllm:{model}", adapter=adapter, **options) as adapted:
        assert (adapted.window, adapted.batch_size) == (512, 2)
        reply = adapted.complete(prompt)
        assert adapted.complete(prompt).text == reply.text, "the seed makes it the same again"
        used = adapted.template_tokens + adapted.count("word " * 460)
        full = adapted.complete(ask("word " * 460, 512 - used))
        assert full.usage.prompt_tokens == used, "the window is used to its last token"
        monkeypatch.setattr(adapted, "_adapter", None)
        assert adapted.complete(prompt).text != reply.text
    with pytest.raises(BackendError, match="is closed"):
        adapted.complete(prompt)
    with pytest.raises(BackendError, match="is closed"):
        list(adapted.stream(prompt))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 7.0}, "top_p"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"window": 100_000}, "8192"),
    ],
)
def test_wrong_settings(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_backend(f"vllm:{model}", **(CPU | options))


def test_models_and_adapters_that_are_not_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vLLM cannot load"):
        load_backend(f"vllm:{tmp_path}", **CPU)
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        load_backend(f"vllm:{model}", adapter=tmp_path, **CPU)


def test_an_adapter_for_another_model(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", module="no_such_module")
    with pytest.raises(UsageError, match=r"vLLM cannot load .*no_such_module"):
        load_backend(f"vllm:{model}", adapter=adapter, window=512, **CPU)


def test_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="ended with status"),
        vllm_env.server(tmp_path / "nothing", log=tmp_path / "log"),
    ):
        pytest.fail("it came up")

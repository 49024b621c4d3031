from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import SCRIPTS, BackendContract, ask, joined
from helpers.tiny_model import PEFT_WARNS, TEMPLATE, WINDOW, make_adapter, make_model, torch

from memagent_integrations import Backend, BackendError, ContextOverflow, MissingExtra, Reader, UsageError, load_backend
from memagent_integrations.backends.transformers import TransformersBackend, computes_bfloat16
from memagent_integrations.records import Message, Prompt, Reply

pytestmark = pytest.mark.heavy

Load = Callable[..., TransformersBackend]


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[Backend]:
    with load_backend("transformers:smollm2-raw", device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def on_cuda() -> Iterator[Backend]:
    with load_backend("transformers:smollm2-raw", device="cuda") as loaded:
        yield loaded


@pytest.mark.real
class TestEmbedded(BackendContract):
    @pytest.fixture
    def backend(self, on_cpu: Backend) -> Backend:
        return on_cpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestCuda(BackendContract):
    @pytest.fixture
    def backend(self, on_cuda: Backend) -> Backend:
        return on_cuda

    def test_computes_in_bfloat16_on_the_device(self, backend: TransformersBackend) -> None:
        assert (backend.model.device.type, backend.model.dtype) == ("cuda", torch.bfloat16)

    def test_too_large_a_batch_names_the_way_out(self, backend: TransformersBackend) -> None:
        torch.cuda.set_per_process_memory_fraction(0.005)
        try:
            [outcome] = backend.complete_batch([ask("word " * 8000)])
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert isinstance(outcome, BackendError)
        assert "lower batch_size" in str(outcome)
        assert backend.complete(ask("Name three colours.")).text


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def load(tiny: Path) -> Iterator[Load]:
    loaded = []

    def open_(model: Path = tiny, **options: Any) -> TransformersBackend:
        # In float32: in bfloat16 the replies of random weights depend on what is computed together.
        loaded.append(TransformersBackend(model, **{"device": "cpu", "dtype": "float32"} | options))
        return loaded[-1]

    yield open_
    for backend in loaded:
        backend.close()


def fail(backend: TransformersBackend, error: Exception) -> Any:
    """Let every step of the model fail; return a handle whose `remove` ends that."""

    def hook(*_: Any) -> None:
        raise error

    return backend.model.register_forward_pre_hook(hook)


def test_takes_its_settings_from_the_model(load: Load, tiny: Path) -> None:
    backend = load()
    assert backend.name == f"transformers:{tiny}"
    assert (backend.window, backend.batch_size) == (WINDOW, 8)
    assert backend.model.dtype == torch.float32
    assert load(dtype="bfloat16", window=100, batch_size=2).window == 100
    assert load(dtype=None).model.dtype == (torch.bfloat16 if computes_bfloat16() else torch.float32)


def test_the_template_is_counted_exactly(load: Load) -> None:
    backend = load()
    text = "in the memory of the reader"
    reply = backend.complete(ask(text, 1))
    assert reply.usage.prompt_tokens == backend.template_tokens + backend.count(text)
    assert backend.count("<|im_end|>") > 1, "a control sign in the text is text"


def test_a_base_model_gets_plain_text(load: Load, tmp_path: Path) -> None:
    backend = load(make_model(tmp_path, template=None))
    assert backend.template_tokens == 0
    parts = (Message(role="system", content="Be brief."), Message(role="user", content="Who?"))
    reply = backend.complete(Prompt(index=0, phase="answer", messages=parts, max_tokens=2))
    assert reply.usage.prompt_tokens == backend.count("Be brief.\n\nWho?")
    with pytest.raises(UsageError, match="empty"):
        backend.complete(ask(""))


def test_what_the_template_is_told(load: Load, tmp_path: Path) -> None:
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    folder = make_model(tmp_path, template=refusal + TEMPLATE + "{% if brief %} brief{% endif %}")
    long = load(folder, chat_template_kwargs={"brief": True})
    assert long.template_tokens > load(folder).template_tokens
    with pytest.raises(UsageError, match="no system message; use prompts of one text, or without that role"):
        long.complete(Prompt(index=0, phase="answer", messages=(Message(role="system", content="a"),), max_tokens=2))


def test_a_batch_gives_what_single_calls_give(load: Load) -> None:
    backend = load(batch_size=3)
    prompts = [ask("the memory " * n, limit) for n, limit in ((1, 20), (12, 3), (5, 11), (2, 1), (30, 8))]
    together = backend.complete_batch(prompts)
    for prompt, reply in zip(prompts, together, strict=True):
        assert isinstance(reply, Reply)
        alone = backend.complete(prompt)
        assert (reply.text, reply.usage, reply.finish_reason) == (alone.text, alone.usage, alone.finish_reason)
        assert reply.usage.completion_tokens == prompt.max_tokens
        assert reply.usage.cached_tokens == 0
    assert backend.complete_batch([]) == []


def test_a_reply_ends_at_the_end_of_text_or_at_its_limit(load: Load, tmp_path: Path) -> None:
    prompt = ask("the reader of the memory", 16)
    ids = generated(load(), prompt)
    end = next(n for n in range(3, 16) if ids[n] not in ids[:n])
    backend = load(make_model(tmp_path, ends=[ids[end]]))
    for other in (ask("the", 16), ask("the reader of the memory", end)):
        stopped, cut = backend.complete_batch([prompt, other])
        assert isinstance(stopped, Reply)
        assert isinstance(cut, Reply)
        assert (stopped.finish_reason, stopped.usage.completion_tokens) == ("stop", end + 1)
        assert stopped.text == decoded(backend, ids[:end])
    assert (cut.finish_reason, cut.usage.completion_tokens) == ("length", end)
    text, reply, _ = joined(backend.stream(prompt))
    assert (text, reply.finish_reason, reply.usage) == (stopped.text, "stop", stopped.usage)


def generated(backend: TransformersBackend, prompt: Prompt) -> list[int]:
    """Return the tokens of a reply, computed by the model's forward pass."""
    ids = backend._chat.encode(prompt, None)
    start = len(ids)
    with torch.inference_mode():
        for _ in range(prompt.max_tokens):
            ids = [*ids, int(backend.model(torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] == backend.tokenizer.eos_token_id:
                break
    return ids[start:]


def decoded(backend: TransformersBackend, ids: list[int]) -> str:
    return str(backend.tokenizer.decode(ids, skip_special_tokens=True))


def test_greedy_is_the_likeliest_token_each_time(load: Load) -> None:
    backend = load()
    prompt = ask("the memory of the reader", 12)
    assert backend.complete(prompt).text == decoded(backend, generated(backend, prompt))


def test_the_window_is_used_to_the_last_token(load: Load) -> None:
    backend = load()
    text = "a" * 200
    room = WINDOW - backend.template_tokens - backend.count(text)
    assert backend.complete(ask(text, room)).usage.completion_tokens == room
    overflow = rf"{WINDOW - room} \+ output {room + 1} = {WINDOW + 1} tokens, but the window holds {WINDOW}"
    with pytest.raises(ContextOverflow, match=overflow):
        backend.complete(ask(text, room + 1))
    with pytest.raises(ContextOverflow):
        next(backend.stream(ask(text, room + 1)))


def test_sampling_can_be_repeated_and_leaves_the_random_state_alone(load: Load) -> None:
    backend = load(temperature=2.0, seed=5)
    state = torch.random.get_rng_state()
    batches = [[reply.text for reply in backend.complete_batch([ask("the", 12)] * 4)] for _ in range(2)]
    assert batches[0] == batches[1]
    assert len(set(batches[0])) > 1
    assert torch.equal(state, torch.random.get_rng_state())
    free = load(temperature=2.0, top_p=0.9)
    assert len({free.complete(ask("the", 12)).text for _ in range(4)}) > 1


@pytest.mark.parametrize("text", ["the memory", SCRIPTS, "\x00 and \ud800", "中文 " * 9])
def test_streamed_pieces_make_the_text(load: Load, text: str) -> None:
    backend = load()
    streamed, reply, pieces = joined(backend.stream(ask(text, 60)))
    assert streamed == reply.text == backend.complete(ask(text, 60)).text
    assert pieces > 1
    assert reply.usage.completion_tokens == 60


def test_leaving_a_stream_ends_the_computation(load: Load) -> None:
    backend = load()
    steps: list[int] = []
    backend.model.register_forward_hook(lambda *_: steps.append(1))
    pieces = backend.stream(ask("the memory", 200))
    next(pieces)
    pieces.close()
    stopped_at = len(steps)
    assert stopped_at < 200
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transformers:")]
    assert backend.complete(ask("the", 3)).usage.completion_tokens == 3
    assert len(steps) == stopped_at + 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("mat1 and mat2\n  do not match"), "failed: RuntimeError: mat1 and mat2 do not match"),
        (
            torch.OutOfMemoryError("CUDA out of memory."),
            r"out of memory over 2 prompts at once; lower batch_size \(now 8\)",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "lower batch_size"),
    ],
)
def test_a_failed_computation_is_a_backend_error(load: Load, error: Exception, message: str) -> None:
    backend = load()
    broken = fail(backend, error)
    first, overflow, last = backend.complete_batch([ask("the", 4), ask("the " * 900), ask("memory", 4)])
    assert isinstance(overflow, ContextOverflow)
    for outcome in (first, last):
        assert isinstance(outcome, BackendError)
        assert not outcome.retryable
        assert outcome.__cause__ is error
        with pytest.raises(BackendError, match=message):
            raise outcome
    assert first is not last
    with pytest.raises(BackendError, match=message.replace("2 prompts", "1 prompts")):
        list(backend.stream(ask("the", 4)))
    broken.remove()
    assert backend.complete(ask("the", 4)).usage.completion_tokens == 4


def test_threads_wait_for_one_another(load: Load) -> None:
    backend = load()
    prompts = [ask("the memory " * n, 12) for n in range(1, 5)]
    replies: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n: replies.update({n: backend.complete(prompts[n]).text})) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [replies[n] for n in range(4)] == [backend.complete(prompt).text for prompt in prompts]


@PEFT_WARNS
def test_an_adapter_changes_what_the_model_says(load: Load, tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter")
    plain, adapted = load(), load(adapter=adapter)
    prompt = ask("the memory of the reader", 12)
    assert adapted.complete(prompt).text != plain.complete(prompt).text
    assert adapted.complete(prompt).text == decoded(adapted, generated(adapted, prompt))
    assert joined(adapted.stream(prompt))[0] == adapted.complete(prompt).text
    assert (adapted.window, adapted.template_tokens) == (plain.window, plain.template_tokens)


@PEFT_WARNS
def test_an_adapter_that_does_not_fit(load: Load, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter")
    with pytest.raises(UsageError, match="adapter has to be"):
        load(make_model(tmp_path / "wider", size=64), adapter=adapter)
    with pytest.raises(UsageError, match="adapter has to be"):
        load(adapter=tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"peft is not installed.*\[transformers\]"):
        load(adapter=adapter)


def test_reads_many_documents_side_by_side(load: Load, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    sizes = {"chunk_tokens": 120, "memory_tokens": 24, "output_tokens": 24}
    reader = Reader(load(folder, batch_size=4), on_lost_section="skip", **sizes)  # what it writes may be nothing
    jobs = [("Who?", "the memory of the reader. " * n) for n in (3, 20, 9)]
    many = reader.read_many(jobs)
    assert [reading.answer for reading in many] == [reader.read(*job).answer for job in jobs]


SECTION = "the memory of the reader, of which the question is. " * 12


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_config(make_model(tmp_path_factory.mktemp("wide") / "model"), max_position_embeddings=4096)


def with_config(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def about(section: str, *questions: str, tokens: int = 12) -> list[Prompt]:
    return [
        Prompt(index=0, phase="memory", messages=(Message(role="user", content=section + text),), max_tokens=tokens)
        for text in questions
    ]


def replies_of(backend: TransformersBackend, prompts: list[Prompt]) -> list[Reply]:
    replies = backend.complete_batch(prompts)
    assert all(isinstance(reply, Reply) for reply in replies), replies
    return replies  # type: ignore[return-value]


def test_a_beginning_that_prompts_share_is_computed_once_with_the_same_replies(load: Load, wide: Path) -> None:
    prompts = about(SECTION, *(f"{word} question?" for word in ("first", "other", "a third", "of the memory", "last")))
    plain = replies_of(load(wide, share=False, batch_size=3), prompts)
    shared = replies_of(load(wide, batch_size=3), prompts)
    assert [reply.text for reply in shared] == [reply.text for reply in plain]
    assert len({reply.text for reply in plain}) > 1
    assert [reply.usage.cached_tokens for reply in plain] == [0] * 5
    cached = sorted(reply.usage.cached_tokens or 0 for reply in shared)
    assert cached[0] == 0
    assert len(set(cached[1:])) == 1
    assert cached[1] > 0.9 * min(reply.usage.prompt_tokens or 0 for reply in plain)


def test_the_last_beginning_is_kept_for_the_next_call(load: Load, wide: Path) -> None:
    backend = load(wide)
    one, two, three, other = about(SECTION, "first?", "second?", "the third of the questions?", "")
    other = about(SECTION[: len(SECTION) // 2], "another text " * 30)[0]
    replies_of(backend, [one, two])
    again = replies_of(backend, [three])[0]
    alone = replies_of(load(wide, share=False), [three])[0]
    assert again.text == alone.text
    assert (again.usage.cached_tokens or 0) > 0.8 * (again.usage.prompt_tokens or 0)
    assert replies_of(backend, [other])[0].usage.cached_tokens == 0, "less than half of it is known"
    mixed = replies_of(backend, [three, *about("nothing alike", "?")])
    assert mixed[0].text == alone.text


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
    ids=["sliding window", "positions by length"],
)
def test_models_that_cannot_share_compute_each_prompt_as_a_whole(
    load: Load, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = with_config(make_model(tmp_path / "model"), max_position_embeddings=4096, **settings)
    prompts = about(SECTION, "first?", "second?")
    backend = load(folder)
    assert [reply.usage.cached_tokens for reply in replies_of(backend, prompts)] == [0, 0]
    assert not backend.share
    alone = replies_of(load(folder, share=False), prompts)
    assert [reply.text for reply in replies_of(backend, prompts)] == [reply.text for reply in alone]


def test_many_questions_compute_each_section_once(load: Load, wide: Path) -> None:
    sizes = {"chunk_tokens": 900, "memory_tokens": 16, "output_tokens": 16, "layout": "section-shared"}
    questions = [f"What of {word}?" for word in ("one", "two", "three", "four", "five", "six")]
    document = "".join(f"{number} of the memory of the reader. " for number in range(120))
    readings = {
        share: Reader(load(wide, batch_size=4, share=share), on_lost_section="skip", **sizes).ask(questions, document)
        for share in (True, False)
    }
    assert [[step.memory for step in reading.steps] for reading in readings[True]] == [
        [step.memory for step in reading.steps] for reading in readings[False]
    ]
    for number in range(len(readings[True][0].steps) - 1):
        usages = [reading.steps[number].reply.usage for reading in readings[True]]
        assert sorted(usage.cached_tokens or 0 for usage in usages)[:2].count(0) == 1
        assert sum(usage.cached_tokens or 0 for usage in usages) > 0.5 * sum(u.prompt_tokens or 0 for u in usages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"dtype": "float7"}, "float7"),
        ({"batchsize": 4}, "batchsize"),
    ],
)
def test_wrong_settings(load: Load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(**options)


def test_models_that_cannot_be_loaded(load: Load, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        load_backend(f"transformers:{tmp_path / 'model.gguf'}")
    with pytest.raises(UsageError, match="give a Hugging Face name, a folder"):
        load(tmp_path)
    with pytest.raises(UsageError, match=r"cannot load .*nonsense"):
        TransformersBackend(tiny, device="nonsense")
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UsageError, match="cannot load"):
        load(damaged)
    (tmp_path / "a.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(UsageError, match="cannot load"):
        load(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match="gguf is not installed"):
        load(tmp_path / "a.gguf")


def test_a_closed_backend_says_so(load: Load) -> None:
    backend = load()
    with backend:
        assert backend.complete(ask("the", 2)).text is not None
    with pytest.raises(BackendError, match="is closed"):
        backend.complete(ask("the", 2))
    with pytest.raises(BackendError, match="is closed"):
        list(backend.stream(ask("the", 2)))
    backend.close()

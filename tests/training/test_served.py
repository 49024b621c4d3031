"""Rollouts from a server: a loopback that answers as vLLM 0.32 does, and writes with the adapters that it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from helpers.contract import ask  # noqa: E402
from helpers.loopback import Loopback, Request, Response  # noqa: E402
from helpers.tiny_model import PEFT_WARNS  # noqa: E402
from helpers.tiny_trainer import PROMPTS, WAIT, draw, echo, join, process  # noqa: E402

from memagent_integrations.errors import BackendError, ContextOverflow, MemAgentError, UsageError  # noqa: E402
from memagent_integrations.reader import Reader  # noqa: E402
from memagent_integrations.records import Prompt  # noqa: E402
from memagent_integrations.training.batches import deal  # noqa: E402
from memagent_integrations.training.forward import scores  # noqa: E402
from memagent_integrations.training.given import Given  # noqa: E402
from memagent_integrations.training.policy import start  # noqa: E402
from memagent_integrations.training.recipe import Recipe  # noqa: E402
from memagent_integrations.training.sampler import Sampler  # noqa: E402
from memagent_integrations.training.served import ServedSampler  # noqa: E402
from memagent_integrations.training.settings import Lora, Settings  # noqa: E402
from memagent_integrations.training.trainer import Trainer  # noqa: E402

pytestmark = [PEFT_WARNS, pytest.mark.heavy]
LORA = Lora(rank=4, alpha=64)
SMALL: dict[str, Any] = {
    "steps": 2,
    "questions": 2,
    "group": 4,
    "updates": 2,
    "learning_rate": 1e-2,
    "warmup": 0,
    "evaluate_every": 2,
    "readings_every": 0,
    "lora": LORA,
}
WINDOW = 120


class Server:
    """Answers as a vLLM server with a model of `model_of` does.

    `says` replaces answers, by path; "probe" is a completion of which only one token is allowed.
    """

    def __init__(self, model: Path) -> None:
        self.model, self.adapters = model, dict[str, Sampler]()
        self.says: dict[str, Callable[[dict[str, Any]], Response | dict[str, Any]]] = {}

    def __call__(self, request: Request) -> Response:
        path = request.path.removeprefix("/v1/")
        other = self.says.get("probe" if request.body and "allowed_token_ids" in request.body else path)
        answer = (other or getattr(self, f"_{path}"))(request.body)
        return answer if isinstance(answer, Response) else Response(body=answer)

    def _models(self, _: Any) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {"id": "base", "parent": None, "max_model_len": WINDOW},
                *({"id": name} for name in self.adapters),
            ],
        }

    def _load_lora_adapter(self, body: dict[str, Any]) -> Response:
        self.adapters[body["lora_name"]] = Sampler(self.model, adapter=body["lora_path"], device="cpu", dtype="float32")
        return Response(body=f"Success: LoRA adapter '{body['lora_name']}' added successfully.".encode())

    def _unload_lora_adapter(self, body: dict[str, Any]) -> Response:
        del self.adapters[body["lora_name"]]
        return Response(body=b"Success")

    def _completions(self, body: dict[str, Any]) -> Response | dict[str, Any]:
        if body["model"] not in self.adapters:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if allowed := body.get("allowed_token_ids"):
            return completion(body["prompt"], allowed, [0.0])
        writer = self.adapters[body["model"]]
        writer.temperature = body["temperature"]
        [reply] = writer._replies([body["prompt"]], [body["max_tokens"]], 0)
        assert not isinstance(reply, MemAgentError), reply
        return completion(body["prompt"], list(reply.output_ids), list(reply.logprobs), reply.finish_reason)  # type: ignore[attr-defined]


def completion(prompt: list[int], ids: list[int], logprobs: list[float], reason: str | None = "stop") -> dict[str, Any]:
    entry = {"token_logprobs": logprobs, "tokens": ["not", "looked", "at"]}
    choice = {
        "index": 0,
        "text": "not looked at",
        "token_ids": ids,
        "prompt_token_ids": prompt,
        "logprobs": entry,
        "finish_reason": reason,
    }
    return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


def refusal(status: int, message: str) -> Response:
    return Response(
        status=status, body={"error": {"message": message, "type": "NotFoundError", "param": None, "code": status}}
    )


@pytest.fixture
def server(model: Path) -> Server:
    return Server(model)


@pytest.fixture
def loopback(server: Server) -> Iterator[Loopback]:
    with Loopback(server) as running:
        yield running


@pytest.fixture
def policy(model: Path, loopback: Loopback) -> Iterator[ServedSampler]:
    with ServedSampler(model, base_url=f"{loopback.url}/v1", device="cpu", dtype="float32") as sampler:
        yield sampler


def adapted(policy: Sampler, seed: int = 0) -> Sampler:
    """The policy with an adapter of random weights."""
    if not hasattr(policy.model, "peft_config"):
        start(policy, Settings(**SMALL))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in policy.model.named_parameters():
            if "lora_" in name:
                weights.copy_(torch.randn(weights.shape, generator=random) * 0.3)
    return policy


def reader(policy: Sampler) -> Reader:
    return Reader(policy, prompts=PROMPTS, chunk_tokens=4, memory_tokens=2, output_tokens=2, question_tokens=4)


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_reply_is_the_tokens_of_the_server_and_their_probabilities(policy: ServedSampler, loopback: Loopback) -> None:
    adapted(policy)
    name = policy.publish()
    prompt = ask("question k1 section none memory none new", 5)
    reply = policy.complete(prompt)
    row = policy._chat.encode(prompt, None)
    assert loopback.bodies("/v1/completions")[-1] == {
        "model": name,
        "prompt": row,
        "max_tokens": 5,
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 1.0,
        "stop_token_ids": [1],
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert list(reply.prompt_ids) == row
    assert len(reply.output_ids) == len(reply.logprobs) == reply.usage.completion_tokens
    assert reply.text == policy._text(list(reply.output_ids)) != "not looked at"
    assert reply.usage.cached_tokens == 3
    assert [*policy.stream(prompt)][-1].prompt_ids == reply.prompt_ids  # type: ignore[union-attr]


def test_each_version_writes_under_a_name_of_its_own(
    model: Path, loopback: Loopback, server: Server, tmp_path: Path
) -> None:
    prompts = [ask(f"question k{key} section none memory none new", 6) for key in range(4)]
    names, texts = [], []
    with ServedSampler(
        model, base_url=f"{loopback.url}/v1", folder=tmp_path / "versions", device="cpu", dtype="float32"
    ) as policy:
        for seed in (1, 2):
            adapted(policy, seed)
            names.append(policy.publish())
            assert list(server.adapters) == written(tmp_path / "versions") == [policy.published] == names[-1:], (
                "the one before it is gone"
            )
            with policy.greedy():
                replies = policy.complete_batch(prompts)
            here = adapted(Sampler(model, device="cpu", dtype="float32"), seed)
            with here.greedy():
                assert [reply.output_ids for reply in replies] == [
                    reply.output_ids for reply in here.complete_batch(prompts)
                ]  # type: ignore[union-attr]
            sampled = [policy.complete(prompt) for prompt in prompts]
            scored = scores(policy.model, sampled, deal(sampled, 1, share=True)[0], temperature=1.0, tokens=4096)
            assert torch.cat(scored).tolist() == pytest.approx(
                [value for reply in sampled for value in reply.logprobs], abs=1e-4
            )
            texts.append([reply.text for reply in replies])  # type: ignore[union-attr]
    assert texts[0] != texts[1]
    assert len(set(names)) == 2
    assert not server.adapters
    assert not written(tmp_path / "versions")


def test_a_training_learns_from_what_a_server_writes(model: Path, loopback: Loopback, tmp_path: Path) -> None:
    with ServedSampler(model, base_url=f"{loopback.url}/v1", device="cpu", dtype="float32") as policy:
        training = Trainer(
            reader(policy), draw, Settings(**SMALL), tmp_path, validation={"carry": [draw(99, 0)]}, reward=echo
        )
        lines = list(training.train())
    assert all(line["gap"] < 1e-4 for line in lines)
    assert all(line["failed"] == 0 for line in lines)
    bodies = loopback.bodies("/v1/completions")
    names = [body["model"] for body in bodies if "allowed_token_ids" not in body]
    assert list(dict.fromkeys(names)) == [body["lora_name"] for body in loopback.bodies("/v1/load_lora_adapter")]
    assert len(set(names)) == 4, "before each of two batches, and before the evaluation at the start and at the end"
    assert {
        body["temperature"]
        for body in bodies
        if body["model"] in (names[0], names[-1]) and "allowed_token_ids" not in body
    } == {0.0}


def one_batch(pipe: Any, rank: int, model: Path, url: str, folder: Path) -> None:
    """Do one batch together with another process."""
    accelerator = join(rank, folder / "meeting")
    with ServedSampler(model, base_url=url, device="cpu", dtype="float32") as policy:
        settings = Settings(**SMALL)
        metrics = Trainer(reader(policy), draw, settings, folder / "run", reward=echo, accelerator=accelerator).batch()
    pipe.send((metrics["failed"], metrics["gap"]))
    torch.distributed.destroy_process_group()


def test_one_of_two_processes_publishes_and_both_ask_for_it(model: Path, loopback: Loopback, tmp_path: Path) -> None:
    with ExitStack() as stack:
        arguments = (model, f"{loopback.url}/v1", tmp_path)
        both = [stack.enter_context(process(one_batch, rank, *arguments)) for rank in range(2)]
        for worker, pipe in both:
            assert pipe.poll(WAIT)
            failed, gap = pipe.recv()
            assert failed == 0
            assert gap < 1e-4
            worker.join(WAIT)
            assert worker.exitcode == 0
    [published] = loopback.bodies("/v1/load_lora_adapter")
    names = [body["model"] for body in loopback.bodies("/v1/completions")]
    assert set(names) == {published["lora_name"]}
    assert len(names) == 1 + SMALL["questions"] * SMALL["group"] * 6, "the check, and six conversations a rollout"


@pytest.mark.parametrize(
    ("status", "message", "advice"),
    [
        (
            404,
            "Loading lora x failed: No adapter found for <path>",
            "does not see .*`folder` has to be one that both see",
        ),
        (
            500,
            "Worker failed with error 'LoRA rank 4 is greater than max_lora_rank 2.'",
            "rank 4; start it so: .*--max-lora-rank 8",
        ),
        (
            500,
            "Worker failed with error 'LoRA is not enabled. Use --enable-lora to enable LoRA.'",
            "start it so: .*--model MODEL --enable-lora",
        ),
        (404, "Not Found", "start it so: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ],
)
def test_a_server_that_was_not_started_for_it(
    policy: ServedSampler, server: Server, status: int, message: str, advice: str
) -> None:
    server.says["load_lora_adapter"] = lambda _: refusal(status, message)
    adapted(policy)
    with pytest.raises(UsageError, match=advice):
        policy.publish()
    assert policy.published is None
    assert not written(policy._home)


def test_a_server_that_cannot_load_it(policy: ServedSampler, server: Server) -> None:
    server.says["load_lora_adapter"] = lambda _: refusal(500, "the engine is dead")
    with pytest.raises(BackendError, match=r"vLLM at http.*the engine is dead"):
        adapted(policy).publish()


def test_probabilities_other_than_those_of_sampling_are_refused(policy: ServedSampler, server: Server) -> None:
    server.says["probe"] = lambda body: completion(body["prompt"], body["allowed_token_ids"], [-18.7])
    adapted(policy)
    with pytest.raises(UsageError, match="--logprobs-mode processed_logprobs"):
        policy.publish()
    assert not server.adapters
    assert not written(policy._home)


@pytest.mark.parametrize("lora", [None, LORA])
def test_more_than_an_adapter_cannot_be_published(policy: ServedSampler, loopback: Loopback, lora: Lora | None) -> None:
    start(policy, Settings(**(SMALL | {"lora": lora})))
    policy.model.requires_grad_(True)
    with pytest.raises(UsageError, match="only an adapter"):
        policy.publish()
    assert not loopback.bodies("/v1/load_lora_adapter")


def test_nothing_is_written_before_something_is_published(policy: ServedSampler) -> None:
    with pytest.raises(UsageError, match="publish"):
        policy.complete(ask("none"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "no choices|it has no"),
        ({"choices": [{"text": "an older server", "logprobs": None}]}, "as vLLM does: choices 1 prompt_token_ids"),
        (completion([1, 2], [3], [-0.1]), "another prompt"),
        ("a page", "token ids"),
    ],
)
def test_what_is_no_reply(policy: ServedSampler, server: Server, answer: Any, message: str) -> None:
    adapted(policy).publish()
    server.says["completions"] = lambda body: Response(body=answer)
    with pytest.raises(BackendError, match=message) as caught:
        policy.complete(ask("none", 4))
    assert not caught.value.retryable


@pytest.mark.parametrize("logprobs", [[], [-0.1], [-0.1, None], [-0.1, 0.2, 0.3]])
def test_a_reply_without_all_its_probabilities(policy: ServedSampler, server: Server, logprobs: list[Any]) -> None:
    adapted(policy).publish()
    server.says["completions"] = lambda body: completion(body["prompt"], [3, 4], logprobs)
    with pytest.raises(BackendError, match="probabilit"):
        policy.complete(ask("none", 4))


def test_one_failure_is_of_one_prompt(policy: ServedSampler, server: Server) -> None:
    adapted(policy).publish()
    original = server._completions
    server.says["completions"] = lambda body: (
        completion(body["prompt"], [3], [-0.1], "abort") if body["max_tokens"] == 3 else original(body)
    )
    prompts = [ask("none", 4), ask("none", 3), ask("none", WINDOW), ask("none", 5)]
    first, given_up, too_long, last = policy.complete_batch(prompts)
    assert isinstance(given_up, BackendError)
    assert given_up.retryable
    assert isinstance(too_long, ContextOverflow), "the window is the server's, which is smaller"
    assert [len(reply.output_ids) <= most for reply, most in ((first, 4), (last, 5))] == [True, True]  # type: ignore[union-attr]


def test_calls_that_fail_are_made_again(policy: ServedSampler, server: Server) -> None:
    adapted(policy).publish()
    original, failures = server._completions, iter([True, True])
    server.says["completions"] = lambda body: (
        Response(status=503, headers={"Retry-After-Ms": "1"}) if next(failures, False) else original(body)
    )
    reading = reader(policy).read_many([("k1", draw(0, 0).sample.document())])[0]
    assert reading.error is None
    assert not next(failures, False)


def test_a_server_that_is_gone(model: Path, server: Server) -> None:
    with Loopback(server) as running:
        policy = ServedSampler(model, base_url=f"{running.url}/v1", device="cpu", dtype="float32")
        adapted(policy).publish()
    with policy:
        with pytest.raises(BackendError, match=f"vLLM at {running.url}/v1/? failed") as caught:
            policy.complete(ask("none"))
        assert caught.value.retryable
        with pytest.raises(BackendError, match="vLLM at"):
            policy.publish()
    with pytest.raises(BackendError, match="vLLM at"):
        ServedSampler(model, base_url=f"{running.url}/v1")


def test_a_server_that_is_no_vllm(model: Path) -> None:
    with (
        Loopback(lambda _: Response(body={"models": []})) as running,
        pytest.raises(BackendError, match="as vLLM does: data"),
    ):
        ServedSampler(model, base_url=f"{running.url}/v1")


def test_a_folder_that_cannot_be_written(model: Path, loopback: Loopback, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        ServedSampler(
            model, base_url=f"{loopback.url}/v1", folder=tmp_path / "file", device="cpu", dtype="float32"
        ) as policy,
        pytest.raises(UsageError, match="file"),
    ):
        adapted(policy).publish()


def test_a_recipe_names_its_server(model: Path, loopback: Loopback, tmp_path: Path) -> None:
    table = f'[server]\nbase_url = "{loopback.url}/v1"\nconcurrency = 3\n'
    (tmp_path / "recipe.toml").write_text(
        f'model = "transformers:{model}"\nmixture = "mixture.toml"\ncpu = true\n{table}'
    )
    with Recipe.load(tmp_path / "recipe.toml", Given(base_url=f"{loopback.url}/v1")).reader() as reader:
        assert isinstance(reader.backend, ServedSampler)
        assert (reader.backend.concurrency, reader.backend.temperature, reader.backend.window) == (3, 1.0, WINDOW)
        assert json.dumps(reader.backend.identity)
    (tmp_path / "recipe.toml").write_text(f'model = "m"\nmixture = "mixture.toml"\n{table}port = 3\n')
    with pytest.raises(UsageError, match="no key 'port' in server"):
        Recipe.load(tmp_path / "recipe.toml")


def test_prompts_travel_side_by_side(policy: ServedSampler, server: Server) -> None:
    """Each call is answered when all of them are there."""
    adapted(policy).publish()
    together, original = Barrier(8, timeout=60), server._completions

    def waiting(body: dict[str, Any]) -> Any:
        together.wait()
        return original(body)

    server.says["completions"] = waiting
    prompts: list[Prompt] = [ask("none", 3)] * 8
    assert not [reply for reply in policy.complete_batch(prompts) if isinstance(reply, MemAgentError)]

"""A policy whose replies a vLLM server writes; the weights learn here, and the server gets them before every batch."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import PeftModel
from pydantic import FiniteFloat, TypeAdapter, ValidationError
from safetensors import SafetensorError

from memagent_integrations import files
from memagent_integrations.backends.base import Backend
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.errors import BackendError, MemAgentError, UsageError
from memagent_integrations.records import Message, Prompt, Reply
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.export import save_adapter, served_rank
from memagent_integrations.training.policy import adapter_shape
from memagent_integrations.training.sampler import Sampler

_ALL_TOKENS = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sample from all tokens, whatever the model's own generation settings say."""
_LOADING_SECONDS = 120.0  # that the server may take to load an adapter
_START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server --model MODEL"
    " --enable-lora --max-lora-rank {rank} --logprobs-mode processed_logprobs"
)


class ServedSampler(Sampler):
    """A `Sampler` whose replies a vLLM server writes; log-probabilities and gradients are computed in this process.

    The server has the same model, and has to allow adapters to be loaded while it runs (errors say how to start it).
    `publish` writes the adapter into a new folder, below `folder` or in a temporary one, and has the server load it
    from there: the server runs on this machine, or sees `folder` under the same path. Each version has a name of its
    own, so that the server's prefix cache never mixes versions.

    Args:
        model: as of `Sampler`.
        base_url: the address of the server.
        api_key: its key; by default that in OPENAI_API_KEY.
        folder: where adapters are written.
        concurrency: calls at a time; the server batches them.
        timeout: seconds that a call may take.
        options: further options of `Sampler`.

    Raises:
        UsageError: as `Sampler`, or `base_url` is no address.
        BackendError: there is no server, or it does not answer as vLLM does.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        base_url: str,
        api_key: str | None = None,
        folder: str | Path | None = None,
        concurrency: int = 64,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        self._server = _Server(base_url, api_key, concurrency, timeout)
        server_window = self._server.fetch_window()  # first, because loading the model takes longer
        super().__init__(model, **options)
        self.batch_size, self.concurrency, self.max_retries = 1, concurrency, self._server.max_retries
        self.window = min(filter(None, (self.window, server_window)), default=None)
        self._identity |= {"server": self._server.address}
        self._folder, self._versions = folder, 0
        self._published_folder: Path | None = None

    def publish(self) -> str:
        """Have the server load the current adapter, unload the version before it, and return the adapter's name there.

        Raises:
            UsageError: more than an adapter learns, the adapter cannot be written, or the server was not started so
                that it loads adapters.
            BackendError: the server does not load it.
        """
        weights = self.model.named_parameters()
        beyond_adapter = any(weight.requires_grad for name, weight in weights if "lora_" not in name)
        if not isinstance(self.model, PeftModel) or beyond_adapter:
            problem = "only an adapter can be published to a server, and here all weights learn"
            raise UsageError(f"{problem}; set lora, or leave the server out")
        self._versions += 1
        name = f"memagent-{secrets.token_hex(4)}-{self._versions:06}"
        folder = self._write(self.model, name)
        try:
            rank, _ = adapter_shape(self.model)
            self._server.load(name, folder, rank=rank)
            if not self.published:
                self._check_probabilities(name)
        except MemAgentError:
            self._withdraw(folder)
            raise
        self._withdraw(self._published_folder)
        self.published, self._published_folder = name, folder
        return name

    def complete(self, prompt: Prompt) -> Sampled:
        """Return the server's reply.

        Raises:
            UsageError: nothing has been published.
            ContextOverflow: the prompt and the longest reply do not fit the window.
            BackendError: the call failed.
        """
        if not self.published:
            advice = "call publish() first, and after every update"
            raise UsageError(f"{self._server.address} has no adapter of this policy yet: {advice}")
        started = time.perf_counter()
        row = self._chat.encode(prompt, self.window)
        written, cached = self._server.write(
            self.published, row, prompt, temperature=self.temperature, stop_token_ids=sorted(self._ends)
        )
        return self._sampled(row, written.token_ids, written.logprobs.token_logprobs, started, cached)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts in order; where a call failed, its error."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._outcome, prompts))

    stream = Backend.stream  # yields the reply in one piece

    def close(self) -> None:
        """Unload the adapter from the server, delete its files, and free the model's memory."""
        self._withdraw(self._published_folder)
        self.published = self._published_folder = None
        if "_home" in self.__dict__ and not self._folder:
            shutil.rmtree(self._home, ignore_errors=True)
        self._server.close()
        super().close()

    @cached_property
    def _home(self) -> Path:
        """The folder below which versions are written."""
        return Path(self._folder or tempfile.mkdtemp(prefix="memagent-")).resolve()

    def _write(self, model: PeftModel, name: str) -> Path:
        """Write the current adapter, and return its folder."""
        with files.accessing("write", self._folder or "a temporary folder", also=(SafetensorError,)):
            folder = self._home / name
            save_adapter(model, folder)
        return folder

    def _withdraw(self, folder: Path | None) -> None:
        """Unload a version from the server and delete its files."""
        if folder:
            with suppress(MemAgentError):  # a server that was restarted does not have it
                self._server.unload(folder.name)
            shutil.rmtree(folder, ignore_errors=True)

    def _check_probabilities(self, name: str) -> None:
        """Check that the server reports the probabilities that it samples with: 1 for the only allowed token.

        Raises:
            UsageError: it reports others.
        """
        prompt = Prompt(index=0, phase="memory", messages=(Message(role="user", content="?"),), max_tokens=1)
        row = self._chat.encode(prompt, self.window)
        written, _ = self._server.write(name, row, prompt, temperature=self.temperature, allowed_token_ids=row[:1])
        if abs(written.logprobs.token_logprobs[0]) > 1e-3:
            problem = f"{self._server.address} tells other probabilities than those that it samples with"
            raise UsageError(f"{problem}; start it with --logprobs-mode processed_logprobs")


class _Server(OpenAIBackend):
    """A vLLM server: token ids for token ids, and its adapters."""

    def __init__(self, base_url: str, api_key: str | None, concurrency: int, timeout: float) -> None:
        super().__init__("vLLM", base_url=base_url, api_key=api_key, concurrency=concurrency, timeout=timeout)
        self.address = f"vLLM at {self._address.rstrip('/')}"

    def fetch_window(self) -> int | None:
        """Return the window that the server gives its model."""
        listed = self._ask("models")
        try:
            models = _MODELS.validate_python(listed).data
        except ValidationError as error:
            problem = files.first_error(error)
            raise BackendError(f"{self.address} does not list its models as vLLM does: {problem}") from error
        return next((model.max_model_len for model in models if model.max_model_len), None)

    def load(self, name: str, path: Path, *, rank: int) -> None:
        """Have the server load an adapter."""
        try:
            self._ask("load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, seconds=_LOADING_SECONDS)
        except BackendError as error:
            if refused := self._refused(error, path, rank):
                raise refused from error
            raise

    def unload(self, name: str) -> None:
        """Have the server forget an adapter."""
        self._ask("unload_lora_adapter", {"lora_name": name}, seconds=_LOADING_SECONDS)

    def write(self, model: str, row: Sequence[int], prompt: Prompt, **more: Any) -> tuple[_Choice, int]:
        """Return what the model writes after the token ids, and how many of these the server had in its cache."""
        body = {
            "model": model,
            "prompt": list(row),
            "max_tokens": prompt.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            **_ALL_TOKENS,
            **more,
        }
        with self._slot(prompt):
            answer = self._ask("completions", body, seconds=self._seconds(prompt))
        expected = f"{self.address} does not answer with token ids and their probabilities, as vLLM does"
        try:
            completion = _COMPLETION.validate_python(answer)
        except ValidationError as error:
            raise BackendError(f"{expected}: {files.first_error(error)}") from error
        if len(completion.choices) != 1:
            raise BackendError(f"{expected}: it has {len(completion.choices) or 'no'} choices")
        [choice] = completion.choices
        if choice.finish_reason not in ("stop", "length"):
            raise BackendError(f"{self.address} gave up the prompt ({choice.finish_reason})", retryable=True)
        if choice.prompt_token_ids != list(row) or not 0 < len(choice.token_ids) == len(choice.logprobs.token_logprobs):
            problem = "answered to another prompt, or with a probability for some of the tokens alone"
            raise BackendError(f"{self.address} {problem}")
        return choice, completion.cached

    def _refused(self, error: BackendError, path: Path, rank: int) -> UsageError | None:
        """Return an error that says how to start the server, if that is why it does not load an adapter."""
        message, status = str(error), error.status
        start = _START.format(rank=served_rank(rank))
        if "No adapter found" in message:
            problem = f"{self.address} does not see {path}, where this process has written its adapter"
            advice = "they have to run on one machine, or `folder` has to be one that both see under this path"
            return UsageError(f"{problem}: {advice}")
        if "max_lora_rank" in message:
            return UsageError(f"{self.address} takes no adapter of rank {rank}; start it so: {start}")
        if status == 404 or "LoRA is not enabled" in message:
            return UsageError(f"{self.address} loads no adapters while it runs; start it so: {start}")
        return None


@dataclass(frozen=True, kw_only=True)
class _Model:
    max_model_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Models:
    data: list[_Model]


@dataclass(frozen=True, kw_only=True)
class _Logprobs:
    token_logprobs: list[FiniteFloat]


@dataclass(frozen=True, kw_only=True)
class _Choice:
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Details:
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Usage:
    prompt_tokens_details: _Details | None = None


@dataclass(frozen=True, kw_only=True)
class _Completion:
    choices: list[_Choice]
    usage: _Usage = field(default_factory=_Usage)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were in the cache; 0 unless the server has --enable-prompt-tokens-details."""
        details = self.usage.prompt_tokens_details
        return details.cached_tokens or 0 if details else 0


_MODELS, _COMPLETION = TypeAdapter(_Models), TypeAdapter(_Completion)

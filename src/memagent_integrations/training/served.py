"""The policy at work on a vLLM server, which gets its adapter anew before every batch; the weights that learn stay in this process."""

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

from memagent_integrations.backends.base import Backend
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.errors import BackendError, MemAgentError, UsageError
from memagent_integrations.files import reason
from memagent_integrations.records import Message, Prompt, Reply
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.export import save_adapter, served_rank
from memagent_integrations.training.gguf_adapter import ADAPTER
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.tables import first

_ALL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""No token is left out or held down, whatever the model's own settings for generation say."""
_LOADING = 120.0  # seconds that the server may take to load an adapter
_START = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server --model MODEL"
    " --enable-lora --max-lora-rank {rank} --logprobs-mode processed_logprobs"
)


class ServedSampler(Sampler):
    """A `Sampler` whose replies are written by a vLLM server at `base_url`; what is computed of them is computed here, with the same weights.

    The server has the same model, and has to let adapters be loaded while it runs (`_START` in an error says how). `publish` writes the adapter
    into a folder of its own, below `folder` or in a temporary one, and has the server load it from there: it runs on this machine, or sees
    `folder` under the same path. Each version has a name of its own. The cache of prefixes goes by it, so nothing that an earlier version
    computed is taken for this one's.

    Calls are independent of one another, `concurrency` of them at a time: the server computes them together. `api_key` defaults to OPENAI_API_KEY,
    `options` are those of `Sampler`.

    Raises:
        UsageError: as `Sampler`, or the address is none.
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
        served = self._server.served()  # before the model is loaded, which takes longer
        super().__init__(model, **options)
        self.batch_size, self.concurrency, self.max_retries = 1, concurrency, self._server.max_retries
        self.window = min(filter(None, (self.window, served)), default=None)
        self._identity |= {"server": self._server.address}
        self._folder, self._versions = folder, 0
        self._written: Path | None = None  # what this process has published

    def publish(self) -> str:
        """The name under which the server has the adapter as it is now. The version before it is taken away.

        Raises:
            UsageError: there is more to publish than an adapter, the adapter cannot be written, or the server was not started for it.
            BackendError: the server does not load it.
        """
        if not isinstance(self.model, PeftModel) or any(
            weights.requires_grad for name, weights in self.model.named_parameters() if "lora_" not in name
        ):
            raise UsageError(
                "only an adapter can be published to a server, and here all weights learn; set lora, or leave the server out"
            )
        self._versions += 1
        name = f"memagent-{secrets.token_hex(4)}-{self._versions:06}"
        path = self._write(name)
        try:
            self._server.load(name, path, rank=self.model.peft_config[ADAPTER].r)  # type: ignore[attr-defined]
            if not self.published:
                self._check(name)
        except MemAgentError:
            self._withdraw(path)
            raise
        self._withdraw(self._written)
        self.published, self._written = name, path
        return name

    def complete(self, prompt: Prompt) -> Sampled:
        """The reply of the server.

        Raises:
            UsageError: nothing is published.
            ContextOverflow: the prompt and the longest reply do not fit into the window.
            BackendError: the call failed.
        """
        if not self.published:
            raise UsageError(
                f"{self._server.address} has no adapter of this policy yet: call publish() first, and after every update"
            )
        started = time.perf_counter()
        row = self._chat.encode(prompt, self.window)
        written, cached = self._server.write(
            self.published, row, prompt, temperature=self.temperature, stop_token_ids=sorted(self._ends)
        )
        return self._sampled(row, written.token_ids, written.logprobs.token_logprobs, started, cached)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """The replies to many prompts, in their order; where one failed, its error."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._outcome, prompts))

    stream = Backend.stream  # the reply in one piece

    def close(self) -> None:
        """Take the adapter from the server and away from the disk, and free the model's memory."""
        self._withdraw(self._written)
        self.published = self._written = None
        if "_home" in self.__dict__ and not self._folder:
            shutil.rmtree(self._home, ignore_errors=True)
        self._server.close()
        super().close()

    @cached_property
    def _home(self) -> Path:
        """Where versions are written."""
        return Path(self._folder or tempfile.mkdtemp(prefix="memagent-")).resolve()

    def _write(self, name: str) -> Path:
        """The folder with the adapter as it is now."""
        try:
            path = self._home / name
            save_adapter(self.model, path)
        except (OSError, ValueError, SafetensorError) as error:  # a path with a NUL in it is a ValueError
            raise UsageError(f"cannot write the adapter to {str(self._folder)!r}: {reason(error)}") from error
        return path

    def _withdraw(self, path: Path | None) -> None:
        """Take a version from the server and from the disk."""
        if path:
            with suppress(MemAgentError):  # a server that was started anew has it no more
                self._server.unload(path.name)
            shutil.rmtree(path, ignore_errors=True)

    def _check(self, name: str) -> None:
        """See that the server tells the probabilities that it samples with: a token that alone is allowed has the probability 1.

        Raises:
            UsageError: it does not.
        """
        prompt = Prompt(index=0, phase="memory", messages=(Message(role="user", content="?"),), max_tokens=1)
        row = self._chat.encode(prompt, self.window)
        written, _ = self._server.write(name, row, prompt, temperature=self.temperature, allowed_token_ids=row[:1])
        if abs(written.logprobs.token_logprobs[0]) > 1e-3:
            raise UsageError(
                f"{self._server.address} tells other probabilities than those that it samples with; start it with --logprobs-mode processed_logprobs"
            )


class _Server(OpenAIBackend):
    """A vLLM server: token ids for token ids, and its adapters."""

    def __init__(self, base_url: str, api_key: str | None, concurrency: int, timeout: float) -> None:
        super().__init__("vLLM", base_url=base_url, api_key=api_key, concurrency=concurrency, timeout=timeout)
        self.address = f"vLLM at {self._address.rstrip('/')}"

    def served(self) -> int | None:
        """The window that the server gives its model."""
        told = self._ask("models")
        try:
            models = _MODELS.validate_python(told).data
        except ValidationError as error:
            raise BackendError(f"{self.address} does not list its models as vLLM does: {first(error)}") from error
        return next((model.max_model_len for model in models if model.max_model_len), None)

    def load(self, name: str, path: Path, *, rank: int) -> None:
        """Load an adapter."""
        try:
            self._ask("load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, seconds=_LOADING)
        except BackendError as error:
            if refused := self._refused(error, path, rank):
                raise refused from error
            raise

    def unload(self, name: str) -> None:
        """Forget an adapter."""
        self._ask("unload_lora_adapter", {"lora_name": name}, seconds=_LOADING)

    def write(self, model: str, row: Sequence[int], prompt: Prompt, **more: Any) -> tuple[_Choice, int]:
        """What the model writes to token ids, and how many of these the server had computed before."""
        body = {
            "model": model,
            "prompt": list(row),
            "max_tokens": prompt.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            **_ALL,
            **more,
        }
        with self._slot(prompt):
            told = self._ask("completions", body, seconds=self._seconds(prompt))
        try:
            completion = _COMPLETION.validate_python(told)
            [choice] = completion.choices
        except ValueError as error:
            said = first(error) if isinstance(error, ValidationError) else "it has no choices"
            raise BackendError(
                f"{self.address} does not answer with token ids and their probabilities, as vLLM does: {said}"
            ) from error
        if choice.finish_reason not in ("stop", "length"):
            raise BackendError(f"{self.address} gave up the prompt ({choice.finish_reason})", retryable=True)
        if choice.prompt_token_ids != list(row) or not 0 < len(choice.token_ids) == len(choice.logprobs.token_logprobs):
            raise BackendError(
                f"{self.address} answered to another prompt, or with a probability for some of the tokens alone"
            )
        return choice, completion.cached

    def _refused(self, error: BackendError, path: Path, rank: int) -> UsageError | None:
        """How the server has to be started, where that is why it does not load an adapter."""
        said, status = str(error), getattr(error.__context__, "status_code", None)
        start = _START.format(rank=served_rank(rank))
        if "No adapter found" in said:
            advice = "they have to run on one machine, or `folder` has to be one that both see under this path"
            return UsageError(
                f"{self.address} does not see {path}, where this process has written its adapter: {advice}"
            )
        if "max_lora_rank" in said:
            return UsageError(f"{self.address} takes no adapter of rank {rank}; start it so: {start}")
        if status == 404 or "LoRA is not enabled" in said:
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
        """Tokens of the prompt that were not computed; known where the server has --enable-prompt-tokens-details."""
        details = self.usage.prompt_tokens_details
        return details.cached_tokens or 0 if details else 0


_MODELS, _COMPLETION = TypeAdapter(_Models), TypeAdapter(_Completion)

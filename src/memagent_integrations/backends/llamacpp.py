"""A GGUF model in this process, through xllamacpp: llama.cpp's own server on the loopback interface, and the endpoint backend as its client."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent_integrations.backends.base import at_least_one
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.errors import BackendError, MissingExtra, UsageError

if TYPE_CHECKING:
    from xllamacpp import Server


class LlamaCppBackend(OpenAIBackend):
    """A GGUF file, run by llama.cpp in this process.

    The server listens on 127.0.0.1 alone, on a free port, behind a key made for the occasion. `window` is split among `parallel` slots by
    llama.cpp, so each of them gets `window` tokens here. `adapter` is a LoRA adapter in GGUF form. Decoding is greedy unless
    `temperature` says otherwise; `sampling` holds further parameters of llama.cpp's own, such as `repeat_penalty`.

    Raises:
        UsageError: the file is missing or not a GGUF file.
        MissingExtra: xllamacpp is not installed.
        BackendError: llama.cpp cannot load the model.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        window: int = 8192,
        parallel: int = 1,
        threads: int | None = None,
        gpu_layers: int = -1,
        temperature: float = 0.0,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        at_least_one(window=window)
        at_least_one(parallel=parallel)
        for path in (model, adapter) if adapter else (model,):
            _check_gguf(Path(path))
        self._server = _serve(Path(model), adapter, window, parallel, threads or os.cpu_count() or 1, gpu_layers, key := secrets.token_urlsafe())
        super().__init__(
            Path(model).stem,
            base_url=f"{self._server.listening_address}/v1",
            api_key=key,
            window=window,
            temperature=temperature,
            seed=seed,
            extra_body={"cache_prompt": True, **(sampling or {})},
            concurrency=parallel,
        )
        self.name = name or f"llamacpp:{model}"

    def close(self) -> None:
        """Stop the server and free the model."""
        super().close()
        self.__dict__.pop("_server", None)


def _serve(model: Path, adapter: str | Path | None, window: int, parallel: int, threads: int, gpu_layers: int, key: str) -> Server:
    try:
        import xllamacpp
    except ImportError as error:
        raise MissingExtra.extra("xllamacpp", "llamacpp") from error
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = window * parallel
    params.n_parallel = parallel
    params.n_gpu_layers = gpu_layers
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.use_jinja = True
    params.ctx_shift = False
    params.api_keys = [key]
    params.verbosity = 0
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise BackendError(f"llama.cpp cannot load {model}: {error}") from error


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the model {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise UsageError(f"{path} is not a GGUF file")

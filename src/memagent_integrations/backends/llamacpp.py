"""A GGUF model in this process, through xllamacpp: llama.cpp's server on the loopback interface, and its client."""

from __future__ import annotations

import atexit
import os
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, Request, build_opener

from memagent_integrations import files
from memagent_integrations.backends.http_replies import decoded
from memagent_integrations.backends.openai import OpenAIBackend
from memagent_integrations.checks import MOST, check_int, check_number, drop_none
from memagent_integrations.errors import BackendError, MissingExtra, UsageError
from memagent_integrations.records import Prompt, Reply

if TYPE_CHECKING:
    from xllamacpp import Server


MAX_PARALLEL = 256
"""Slots that llama.cpp has room for."""
MIN_WINDOW = 16
"""With a smaller window llama.cpp ends the process."""


class LlamaCppBackend(OpenAIBackend):
    """A GGUF file, run by llama.cpp in this process.

    The server listens on a free port of 127.0.0.1, behind a key made for this process. llama.cpp splits its context
    among `parallel` slots; each of them gets `window` tokens here. `adapter` is a LoRA adapter in GGUF form. Decoding
    is greedy unless `temperature` says otherwise; `sampling` holds further parameters of llama.cpp, such as
    `repeat_penalty`.

    llama.cpp notices an abandoned call only after it has read the whole prompt. Closing the backend, and the end of the
    interpreter, wait for that.

    Raises:
        UsageError: the file is missing or not a GGUF file.
        MissingExtra: xllamacpp is not installed.
        BackendError: llama.cpp cannot load the model.
    """

    caches_prefixes = False  # each slot has a cache of its own, and with one slot calls come one after the other anyway
    _proxies = False

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
        top_p: float | None = None,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        check_int(most=MAX_PARALLEL, parallel=parallel)
        check_int(least=MIN_WINDOW, most=MOST // parallel, window=window)
        check_int(most=1024, **drop_none(threads=threads))
        check_int(least=-1, gpu_layers=gpu_layers)
        check_number(temperature=temperature, **drop_none(top_p=top_p))
        if not isinstance(sampling, Mapping | None):
            raise UsageError(f"sampling has to be a mapping of names to values, not {sampling!r}")
        for path in (model, adapter) if adapter else (model,):
            _check_gguf(Path(path))
        self._paused_streams = 0
        self._adapter = str(adapter) if adapter else None
        key = secrets.token_urlsafe()
        self._server: Server | None = _serve(
            Path(model),
            adapter=self._adapter,
            window=window,
            parallel=parallel,
            threads=threads or os.cpu_count() or 1,
            gpu_layers=gpu_layers,
            key=key,
        )
        super().__init__(
            Path(model).stem,
            base_url=f"{self._server.listening_address}/v1",
            api_key=key,
            window=window,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            extra_body={"cache_prompt": True} | dict(sampling or {}),
            concurrency=parallel,
        )
        self.name = name or f"llamacpp:{model}"
        self._file = Path(model).name if name else None
        _OPEN.add(self)

    @property
    def identity(self) -> dict[str, Any]:
        """Sampling parameters, the adapter, and the file if the name is not its."""
        return {**super().identity, "base_url": None, "adapter": self._adapter, **drop_none(file=self._file)}

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply's text in pieces, as the model writes it, and the whole `Reply` last."""
        with closing(super().stream(prompt)) as pieces:
            for piece in pieces:
                with self._paused():
                    yield piece

    async def astream(self, prompt: Prompt) -> AsyncGenerator[str | Reply]:
        """`stream`, async."""
        async with aclosing(super().astream(prompt)) as pieces:
            async for piece in pieces:
                with self._paused():
                    yield piece

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Count one stream as waiting for its consumer."""
        with self._lock:
            self._paused_streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._paused_streams -= 1

    def _free(self) -> None:
        with self._lock:
            server, self._server = self._server, None
        if server:
            while self._busy(server):  # freeing the server waits for that too, but would hold the interpreter lock
                time.sleep(0.05)
        super()._free()

    def _busy(self, server: Server) -> bool:
        """Return whether the server is computing anything."""
        with self._errors():
            slots: Any = decoded(self._client.get(f"{server.listening_address}/slots"))
        return any(slot["is_processing"] for slot in slots)


_OPEN: weakref.WeakSet[LlamaCppBackend] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End every server before the interpreter ends: freeing one with a request under way would never return.

    Such a request may be that of a daemon thread.
    """
    for backend in list(_OPEN):
        backend.close()
        while backend._calls > backend._paused_streams:
            time.sleep(0.05)
        backend._free()


def _serve(
    model: Path, *, adapter: str | None, window: int, parallel: int, threads: int, gpu_layers: int, key: str
) -> Server:
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
    params.endpoint_slots = True
    params.cache_ram_mib = 0  # otherwise it keeps the state of every prompt that it has read, up to 8 GiB
    params.verbosity = 0
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    try:
        # Ctrl-C interrupts the main thread alone, where it could have a server freed that is not up yet
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_started, partial(xllamacpp.Server, params), key).result()
    except (OSError, RuntimeError) as error:
        raise BackendError(f"llama.cpp cannot load {model}: {error}") from error


def _started(make: Callable[[], Server], key: str) -> Server:
    """Return a server whose loop runs: freeing one before that would never end."""
    server = make()
    slots = Request(f"{server.listening_address}/slots", headers={"Authorization": f"Bearer {key}"})
    with build_opener(ProxyHandler({})).open(slots):  # the loop replies to this
        return server


def _check_gguf(path: Path) -> None:
    with files.accessing("read", path), path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UsageError(f"{path} is not a GGUF file")

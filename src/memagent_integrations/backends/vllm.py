"""vLLM in this process: many prompts at once, a cache of the prefixes that they share, LoRA adapters."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memagent_integrations.backends.failures import way_out
from memagent_integrations.backends.in_process import BatchBackend, ChatTokenizer, one_line
from memagent_integrations.backends.prepared import weights_of
from memagent_integrations.errors import BackendClosed, BackendError, MemAgentError, MissingExtra, UsageError
from memagent_integrations.records import Prompt, Reply, Usage

try:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
except ImportError as error:
    raise MissingExtra.extra(error.name or str(error), "vllm") from error

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts for max_lora_rank


class VLLMBackend(BatchBackend):
    """A model by its Hugging Face name, in a folder, or an embedded one, run by vLLM's own engine.

    The prefix cache is on: what a prompt shares with an earlier one is not computed again, and `usage.cached_tokens` is
    the number of tokens that this saved. Calls from several threads, streams among them, are computed together.

    `adapter` is a LoRA adapter in PEFT's form, `window` the longest context to reserve memory for (default: the value
    in the model's config). Decoding is greedy unless `temperature` says otherwise; with `seed`, the same prompt gives
    the same reply. `batch_size` is the number of readings that `Reader.read_many` runs at a time.
    `chat_template_kwargs` go to the chat template, and `engine` options to `vllm.LLM` (dtype, enforce_eager,
    gpu_memory_utilization, tensor_parallel_size, ...).

    vLLM starts a second process, which imports the main script: keep the script's own work under
    `if __name__ == "__main__"`.

    Raises:
        UsageError: a setting is wrong, or the model or its adapter cannot be found.
        MissingExtra: vllm is not installed.
        BackendError: the engine does not start.
    """

    structured = True

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        window: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        batch_size: int = 64,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        super().__init__(
            f"vllm:{model}",
            batch_size=batch_size,
            window=window,
            adapter=adapter,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        with _loading(str(adapter)):
            lora = _lora_options(adapter)
        with _loading(str(model)):
            SamplingParams(**self._sampling)  # refuses wrong settings before the model is loaded
            options = {"enable_prefix_caching": True, "max_model_len": window, **lora, **engine}
            llm = LLM(model=str(weights_of(model)), **options)
        self._engine: _Engine | None = _Engine(llm.llm_engine)
        try:
            with _loading(str(adapter)):
                self._adapter = self._engine.adapter(str(adapter)) if adapter else None
            self.window = int(llm.llm_engine.model_config.max_model_len)
            self._chat = ChatTokenizer(llm.get_tokenizer(), chat_template_kwargs)
        except BaseException:
            self.close()
            raise

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts; vLLM decides how many of them it computes side by side."""
        started = time.perf_counter()
        calls = [self._start(prompt, RequestOutputKind.FINAL_ONLY) for prompt in prompts]
        try:
            return [call if isinstance(call, MemAgentError) else self._finish(call, started) for call in calls]
        finally:
            for call in calls:
                if isinstance(call, _Call):
                    call.cancel()

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply's text in pieces, and the whole `Reply` last. Closing the stream cancels the prompt."""
        started = time.perf_counter()
        call = self._start(prompt, RequestOutputKind.DELTA)
        if isinstance(call, MemAgentError):
            raise call
        texts: list[str] = []
        written = 0
        try:
            with _errors(self.name):
                for output in call:
                    texts.append(output.outputs[0].text)
                    written += len(output.outputs[0].token_ids)
                    if texts[-1]:
                        yield texts[-1]
        finally:
            call.cancel()
        yield _reply(call, output, "".join(texts), written, started)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        engine, self._engine = self._engine, None
        if engine:
            engine.shutdown(BackendClosed(self.name))

    def _start(self, prompt: Prompt, kind: RequestOutputKind) -> _Call | MemAgentError:
        """Submit a prompt to the engine; return the call, or the error that prevents it."""
        try:
            engine = self._engine
            if engine is None:
                raise BackendClosed(self.name)
            ids = self._chat.encode(prompt, self.window)
            with _errors(self.name):
                schema = None if prompt.schema is None else StructuredOutputsParams(json=dict(prompt.schema))
                params = SamplingParams(
                    max_tokens=prompt.max_tokens, output_kind=kind, structured_outputs=schema, **self._sampling
                )
            return _Call(engine, ids, params, self._adapter)
        except MemAgentError as error:
            return error

    def _finish(self, call: _Call, started: float) -> Reply | MemAgentError:
        try:
            with _errors(self.name):
                [output] = call
            return _reply(call, output, output.outputs[0].text, len(output.outputs[0].token_ids), started)
        except MemAgentError as error:
            return error


class _Engine:
    """One engine for many threads: a thread that waits for an output runs the next step and delivers outputs to all."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._stepping = False
        self._actions: list[Callable[[], None]] = []
        self._inboxes: dict[str, list[Any]] = {}
        self._numbers = itertools.count()

    def adapter(self, path: str) -> Any:
        """Load a LoRA adapter and return the request that names it."""
        request = LoRARequest("adapter", 1, path)
        self._engine.add_lora(request)
        return request

    def add(self, ids: list[int], params: Any, adapter: Any) -> str:
        """Submit a prompt; return the key for `next` and `drop`. If the engine refuses it, `next` returns the error."""
        key = f"memagent-{next(self._numbers)}"
        self._inboxes[key] = []

        def submit() -> None:
            try:
                [rendered] = self._engine.renderer.render_cmpl([TokensPrompt(prompt_token_ids=ids)])
                self._engine.add_request(key, rendered, params, lora_request=adapter)
            except Exception as error:
                self._inboxes[key].append(error)

        self._between_steps(submit)
        return key

    def next(self, key: str) -> Any:
        """Return the next output of a request, which must not have finished."""
        while True:
            with self._changed:
                while not self._inboxes[key] and self._stepping:
                    self._changed.wait()
                if self._inboxes[key]:
                    return self._inboxes[key].pop(0)
                self._stepping = True
            self._step()

    def drop(self, key: str) -> None:
        """Forget a request, finished or not."""

        def forget() -> None:
            del self._inboxes[key]
            with suppress(Exception):  # an engine that has died has nothing to abort
                self._engine.abort_request([key])

        self._between_steps(forget)

    def shutdown(self, reason: Exception) -> None:
        """Stop the engine after the current step; calls that wait for it get `reason`."""

        def stop() -> None:
            for inbox in self._inboxes.values():
                inbox.append(reason)
            self._engine.engine_core.shutdown()

        self._between_steps(stop)

    def _step(self) -> None:
        outputs = []
        try:
            outputs = self._engine.step()
        finally:
            with self._changed:
                self._stepping = False
                for output in outputs:
                    if output.request_id in self._inboxes:
                        self._inboxes[output.request_id].append(output)
                self._run_actions()
                self._changed.notify_all()

    def _between_steps(self, action: Callable[[], None]) -> None:
        """Run an action between two steps: at once, or by the thread that is running a step, at its end."""
        with self._changed:
            self._actions.append(action)
            if not self._stepping:
                self._run_actions()

    def _run_actions(self) -> None:
        actions, self._actions = self._actions, []
        for action in actions:
            action()


class _Call:
    """A prompt in the engine. Iterating yields its outputs as they come."""

    def __init__(self, engine: _Engine, ids: list[int], params: Any, adapter: Any) -> None:
        self.prompt_tokens = len(ids)
        self._engine = engine
        self._key = engine.add(ids, params, adapter)

    def __iter__(self) -> Iterator[Any]:
        finished = False
        while not finished:
            output = self._engine.next(self._key)
            if isinstance(output, Exception):
                raise output
            finished = output.finished
            yield output

    def cancel(self) -> None:
        """Free what the engine holds for this prompt."""
        self._engine.drop(self._key)


def _reply(call: _Call, output: Any, text: str, written: int, started: float) -> Reply:
    reason = output.outputs[0].finish_reason
    if reason not in ("stop", "length"):
        raise BackendError(f"vLLM gave up the prompt ({reason})", retryable=True)
    cached = output.num_cached_tokens
    return Reply(
        text=text,
        usage=Usage(prompt_tokens=call.prompt_tokens, completion_tokens=written, cached_tokens=cached),
        finish_reason=reason,
        seconds=time.perf_counter() - started,
    )


def _lora_options(adapter: str | Path | None) -> dict[str, Any]:
    """Return the engine's options for an adapter. One on the hub is assumed to have a rank of at most 64."""
    if not adapter:
        return {}
    folder, rank = Path(adapter), 64
    if folder.is_absolute() or folder.exists():
        rank = int(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"])
    return {"enable_lora": True, "max_lora_rank": next((size for size in _RANKS if size >= rank), _RANKS[-1])}


@contextmanager
def _loading(what: str) -> Iterator[None]:
    try:
        yield
    except MemAgentError:
        raise
    except RuntimeError as error:  # from the engine's own process, or from CUDA
        advice = "its log says why; where memory is short, lower window or gpu_memory_utilization"
        raise BackendError(f"vLLM cannot start {what}: {one_line(error)}; {advice}") from error
    except Exception as error:
        raise UsageError(f"vLLM cannot load {what}: {one_line(error)}") from error


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn what vLLM raises into this package's errors."""
    try:
        yield
    except MemAgentError:
        raise
    except Exception as error:
        if advice := way_out(str(error)):
            raise UsageError(f"{name} refuses the request; {advice}: {one_line(error)}") from error
        raise BackendError(f"{name} failed: {one_line(error)}") from error

"""Any causal language model of Hugging Face transformers, on the CPU or a GPU, optionally with a LoRA adapter."""

from __future__ import annotations

import importlib
import logging
import threading
import time
import traceback
import warnings
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from memagent_integrations import files
from memagent_integrations.backends.in_process import BatchBackend, ChatTokenizer, one_line
from memagent_integrations.backends.prefixes import bundles, whole
from memagent_integrations.backends.prepared import weights_of
from memagent_integrations.checks import check_number
from memagent_integrations.errors import BackendClosed, BackendError, MemAgentError, MissingExtra, UsageError
from memagent_integrations.records import Prompt, Reply, Usage

try:
    import torch
    import transformers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        StoppingCriteria,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

    from memagent_integrations.backends.past import PrefixCache, SharedStart
except ImportError as error:
    raise MissingExtra.extra(error.name or str(error), "transformers") from error

_log = logging.getLogger(__name__)

# CUDA's message, and the CPU allocator's on Linux and on Windows
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


_BFLOAT16 = {"amx_bf16", "sve_bf16", "bf16", "svebf16"}
"""The names of instructions that multiply in bfloat16, as torch and Linux write them, on x86 and ARM.

Not avx512_bf16: torch 2.13 multiplies half as fast with it as in float32 (135 and 258 GFLOPS on two cores).
"""


class TransformersBackend(BatchBackend):
    """A model by its Hugging Face name, in a folder, in a GGUF file, which is de-quantised, or an embedded one.

    `adapter` is a LoRA adapter, in PEFT's form or in a GGUF file. `device` defaults to "cuda" if there is a CUDA
    device, else "cpu"; `dtype` to bfloat16 on a GPU and on a CPU that computes it in hardware, else float32; `window`
    to the value in the model's config. Up to `batch_size` prompts are computed together. `chat_template_kwargs` go to
    the chat template, other `options` to `AutoModelForCausalLM.from_pretrained` (revision, attn_implementation,
    device_map, quantization_config).

    Decoding is greedy unless `temperature` says otherwise. Of the model's own generation settings only the end-of-text
    tokens are used: a repetition penalty, for one, would keep the model from copying its memory. With `seed`, the same
    batch gives the same replies.

    Where prompts begin alike for half of their length and more, as those of many questions about one section do with
    the layout "section-shared", that beginning is computed once; `usage.cached_tokens` says of how many tokens that
    saved the computation. The last such beginning is kept for the next call. Without `share`, and for models whose
    layers do not all see the whole text, each prompt is computed as a whole.

    Calls from several threads run one after the other. `model` is the torch module, `tokenizer` that of transformers.

    Raises:
        UsageError: a setting is wrong, or the model or its adapter cannot be loaded.
        MissingExtra: torch or transformers is not installed, or peft or gguf where it is needed.
        BackendError: the model does not fit into the memory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        batch_size: int = 8,
        share: bool = True,
        window: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            f"transformers:{model}",
            batch_size=batch_size,
            window=window,
            adapter=adapter,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        check_number(temperature=temperature)
        check_number(least=1e-6, most=1, top_p=top_p)
        self.temperature, self._top_p, self._seed = temperature, top_p, seed
        self._lock = threading.Lock()
        self.share, self._prefixes = share, PrefixCache()
        options["trust_remote_code"] = trust_remote_code
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        with _loading(str(model), "give a Hugging Face name, a folder that save_pretrained wrote, or a GGUF file"):
            weights = weights_of(model)
            self.tokenizer = load_tokenizer(weights, options)
            self.model: Any = load_model(weights, device, dtype, options)
        self._ends = _ends(self.model, self.tokenizer)
        self.model.generation_config = GenerationConfig.from_dict({})  # generate() takes what we leave unset from here
        text_config = self.model.config.get_text_config(decoder=True)
        self.window = window or getattr(text_config, "max_position_embeddings", None)
        if adapter:
            self.model = _with_adapter(self.model, adapter)
        self._chat = ChatTokenizer(self.tokenizer, chat_template_kwargs)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """Return the replies to many prompts, computing `batch_size` prompts of similar length together.

        `Reply.seconds` is the time of the whole batch in which a reply was computed.
        """
        outcomes: dict[int, Reply | MemAgentError] = {}
        rows: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            try:
                rows[index] = self._chat.encode(prompt, self.window)
            except MemAgentError as error:
                outcomes[index] = error
        limits = {index: prompts[index].max_tokens for index in rows}
        for group, shared in self._groups(rows, limits):
            replies = self._replies([rows[index] for index in group], [limits[index] for index in group], shared)
            outcomes.update(zip(group, replies, strict=True))
        return [outcomes[index] for index in range(len(prompts))]

    def _groups(self, rows: Mapping[int, Sequence[int]], limits: Mapping[int, int]) -> Iterator[tuple[list[int], int]]:
        """Yield indices of rows to compute together, and how many tokens at their start to compute once for all."""
        indices = list(rows)
        prompts = [array("i", rows[index]) for index in indices]
        for bundle in bundles(prompts) if self.share else [whole(prompts)]:
            order = sorted((indices[number] for number in bundle.rows), key=lambda index: len(rows[index]))
            for start in range(0, len(order), self.batch_size):
                yield order[start : start + self.batch_size], bundle.shared

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """Yield the reply's text in pieces, and the whole `Reply` last.

        Closing the stream ends the computation after the current token.
        """
        started = time.perf_counter()
        row = self._chat.encode(prompt, self.window)
        tokens = _Tokens()
        worker = threading.Thread(target=self._work, args=(row, prompt.max_tokens, tokens), name=f"{self.name} stream")
        worker.start()
        written: list[int] = []
        sent = ""
        try:
            for token in tokens:
                written.append(token)
                text = self._text(written)
                incomplete = text.endswith("\ufffd")  # its last character lacks some bytes
                if len(text) > len(sent) and text.startswith(sent) and not incomplete:
                    yield text[len(sent) :]
                    sent = text
        finally:
            tokens.abandoned.set()
            worker.join()
        reply = self._reply(row, written, 0, started)
        if rest := reply.text.removeprefix(sent):
            yield rest
        yield reply

    def close(self) -> None:
        """Free the model's memory."""
        with self._lock:
            self.model = None
            self._prefixes.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _replies(self, rows: list[list[int]], limits: list[int], shared: int) -> list[Reply | MemAgentError]:
        started = time.perf_counter()
        try:
            start = self._start(rows, shared)
            past: dict[str, Any] = {"shared": start.tokens, "past_key_values": start.cache} if start else {}
            written = self._generate(rows, limits, **past)
        except BackendError as error:  # a copy for each prompt, since each is raised on its own
            return [copy_error(error) for _ in rows]
        cached = start.cached if start else [0] * len(rows)
        return [self._reply(*each, started) for each in zip(rows, written, cached, strict=True)]

    def _start(self, rows: list[list[int]], shared: int) -> SharedStart | None:
        """Return what the rows begin with, already computed; None: each is computed as a whole."""
        with self._lock, self._errors(len(rows)):
            try:
                return self._prefixes.start(self.model, rows, shared) if self.share and self.model else None
            except ValueError as error:
                _log.info("%s shares no beginnings of prompts: %s", self.name, error)
                self.share = False
                return None

    def _reply(self, row: list[int], written: list[int], cached: int, started: float) -> Reply:
        return Reply(
            text=self._text(written),
            usage=Usage(prompt_tokens=len(row), completion_tokens=len(written), cached_tokens=cached),
            finish_reason="stop" if written[-1] in self._ends else "length",
            seconds=time.perf_counter() - started,
        )

    def _work(self, row: list[int], limit: int, tokens: _Tokens) -> None:
        """Run in the thread of a stream: queue its tokens, then None or the error that ended it."""
        try:
            self._generate([row], [limit], tokens)
            tokens.queue.put(None)
        except BaseException as error:
            tokens.queue.put(error)

    def _generate(
        self, rows: list[list[int]], limits: list[int], tokens: _Tokens | None = None, shared: int = 0, **more: Any
    ) -> list[list[int]]:
        """Return the tokens that the model writes after each row of token ids.

        Each result has at most as many tokens as its limit and ends with the end-of-text token, if that comes first.
        The first `shared` tokens are the same in all rows; padding of shorter rows follows them. `more` goes to
        `generate`.
        """
        width = max(map(len, rows))
        with self._lock, self._errors(len(rows)), self._seeded():
            if self.model is None:
                raise BackendClosed(self.name)
            ids, mask = [], []
            for row in rows:
                padding = width - len(row)
                ids.append(row[:shared] + [self._pad] * padding + row[shared:])
                mask.append([1] * shared + [0] * padding + [1] * (len(row) - shared))
            output = self.model.generate(
                input_ids=torch.tensor(ids, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                generation_config=self._config(max(limits)),
                stopping_criteria=StoppingCriteriaList([_Stop(width, limits, tokens)]),
                streamer=tokens,
                **more,
            )
            written: list[list[int]] = output[:, width:].tolist()
        return [self._cut(ids, limit) for ids, limit in zip(written, limits, strict=True)]

    def _config(self, limit: int) -> GenerationConfig:
        settings: dict[str, Any] = {
            "max_new_tokens": limit,
            "eos_token_id": sorted(self._ends) or None,
            "pad_token_id": self._pad,
            "do_sample": bool(self.temperature),
        }
        if self.temperature:
            settings |= {"temperature": self.temperature, "top_p": self._top_p, "top_k": 0}
        return GenerationConfig.from_dict(settings)

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        end = next((number for number, token in enumerate(ids, start=1) if token in self._ends), limit)
        return ids[: min(end, limit)]

    def _text(self, ids: list[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] in self._ends else ids
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def _sizes(self) -> str:
        """The settings that determine how much is computed at once, for an error message."""
        return f"batch_size (now {self.batch_size}) or chunk_tokens"

    @cached_property
    def _pad(self) -> int:
        """The token that pads shorter rows; it is masked, so any will do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self._ends, default=0)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Sample from the seed inside the block, and leave the process's own random state as it was."""
        if self._seed is None or not self.temperature:
            yield
            return
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(self._seed)
            yield

    @contextmanager
    def _errors(self, rows: int) -> Iterator[None]:
        """Turn what torch and transformers raise into this package's errors."""
        try:
            yield
        except MemAgentError:
            raise
        except Exception as error:
            if not out_of_memory(error):
                raise BackendError(f"{self.name} failed: {one_line(error)}") from error
            release_tensors(error)
            message = f"{self.name} ran out of memory over {rows} prompts at once; lower {self._sizes}"
            raise BackendError(message) from error


class _Tokens(BaseStreamer):
    """Tokens on their way from the thread that generates them. Setting `abandoned` makes that thread stop."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self.abandoned = threading.Event()
        self._expects_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take a token from `generate`, which passes the prompt first."""
        if self._expects_prompt:
            self._expects_prompt = False
            return
        for token in value.flatten().tolist():
            self.queue.put(token)

    def end(self) -> None:
        """Do nothing at the end of `generate`: the thread marks the end itself."""

    def __iter__(self) -> Iterator[int]:
        while (item := self.queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class _Stop(StoppingCriteria):
    """Ends each row at its own limit, and all rows when the stream is abandoned."""

    def __init__(self, width: int, limits: list[int], tokens: _Tokens | None) -> None:
        self._width, self._limits, self._tokens = width, limits, tokens

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        abandoned = self._tokens is not None and self._tokens.abandoned.is_set()
        written = input_ids.shape[1] - self._width
        done = [abandoned or written >= limit for limit in self._limits]
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]


def copy_error(error: BackendError) -> BackendError:
    """Return a copy of the error, for another call that failed with it."""
    copy = BackendError(str(error), retryable=error.retryable)
    copy.__cause__ = error.__cause__
    return copy


@contextmanager
def ignore_peft_warning() -> Iterator[None]:
    """Ignore the warning of transformers that PEFT causes by using a deprecated name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        yield


def release_tensors(error: Exception) -> None:
    """Release the tensors that the frames of an error's traceback hold."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _loading(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except MemAgentError:
        raise
    except Exception as error:
        if out_of_memory(error):
            advice = "use a smaller model or dtype"
            raise BackendError(f"{what} does not fit into the memory of the device; {advice}") from error
        raise UsageError(f"cannot load {what}: {one_line(error)}; {advice}") from error


def out_of_memory(error: Exception) -> bool:
    """Return whether the error reports that the memory of a GPU or of the machine is exhausted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)
    )


def _location(model: str | Path) -> tuple[str, dict[str, str]]:
    """Return the name and the keyword arguments by which `from_pretrained` finds this model."""
    path = Path(model)
    if path.suffix.lower() != ".gguf":
        return str(model), {}
    if not path.is_file():
        raise UsageError(f"cannot read the model {path}: there is no such file")
    if not find_spec("gguf"):
        raise MissingExtra.extra("gguf", "transformers")
    return str(path.parent), {"gguf_file": path.name}


def load_tokenizer(model: str | Path, options: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a model by its name, its folder or its GGUF file."""
    name, file = _location(model)
    relevant = {key: value for key, value in options.items() if key in ("trust_remote_code", "revision")}
    return AutoTokenizer.from_pretrained(name, **file, **relevant)


def load_model(model: str | Path, device: str, dtype: str | torch.dtype | None, options: Mapping[str, Any]) -> Any:
    """Return a model by its name, its folder or its GGUF file, which is de-quantised."""
    name, file = _location(model)
    coarse = torch.device(device).type != "cpu" or computes_bfloat16()
    dtype = dtype or (torch.bfloat16 if coarse else torch.float32)
    gguf_config = getattr(transformers, "GgufConfig", None)  # without it transformers always de-quantises
    if file and gguf_config:  # weights that stayed packed would be computed in float32, and could not be trained
        options = {"quantization_config": gguf_config(dequantize=True)} | dict(options)
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **file, **options)
    return loaded if "device_map" in options else loaded.to(device)


@cache
def computes_bfloat16() -> bool:
    """Return whether the CPU multiplies matrices of bfloat16 in hardware: on others they are slower than float32."""
    if hasattr(torch.cpu, "get_capabilities"):
        features = {name for name, present in torch.cpu.get_capabilities().items() if present is True}
    else:  # torch before 2.11
        try:
            features = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
        except OSError:
            features = set()
    return bool(features & _BFLOAT16)


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a reply: those of the model's generation settings and that of the tokenizer."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def _with_adapter(model: Any, adapter: str | Path) -> Any:
    in_gguf = Path(adapter).suffix == ".gguf"
    try:
        from peft import PeftModel

        gguf_adapter = importlib.import_module("memagent_integrations.backends.gguf_adapter") if in_gguf else None
    except ImportError as error:
        raise MissingExtra.extra(error.name or "peft", "transformers") from error
    if gguf_adapter:
        with ignore_peft_warning(), files.accessing("read", adapter):
            return gguf_adapter.read(model, adapter)
    advice = "adapter has to be a folder or Hugging Face name of a LoRA adapter made for this model"
    with ignore_peft_warning(), _loading(str(adapter), advice):
        warnings.filterwarnings("error", "Found missing adapter keys")  # weights missing from it would stay random
        # In the dtype of the model, so that nothing is cast where the adapter is computed.
        return PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)

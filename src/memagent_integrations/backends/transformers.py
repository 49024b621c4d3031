"""Any causal language model of Hugging Face transformers, on the CPU or a GPU, with a LoRA adapter if wanted."""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from memagent_integrations.backends.base import closed
from memagent_integrations.backends.in_process import BatchBackend, ChatTokenizer, one_line
from memagent_integrations.checks import check_int, check_number, drop_none
from memagent_integrations.errors import BackendError, MemAgentError, MissingExtra, UsageError
from memagent_integrations.records import Prompt, Reply, Usage

try:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        StoppingCriteria,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer
except ImportError as error:
    raise MissingExtra.extra(error.name or str(error), "transformers") from error

_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
)  # CUDA, and the CPU allocator on Linux and on Windows


class TransformersBackend(BatchBackend):
    """A model by its Hugging Face name, in a folder, or in a GGUF file (which is de-quantised: 4 bytes a parameter in float32).

    `adapter` is a LoRA adapter in PEFT's form. `device` defaults to "cuda" where there is one, else "cpu"; `dtype` to bfloat16 on a GPU and
    float32 on the CPU; `window` to what the model's config says. Up to `batch_size` prompts are computed together. Decoding is greedy unless
    `temperature` says otherwise; of the model's own generation settings only the end-of-text tokens count, so that a repetition penalty
    does not keep it from copying its memory. With `seed`, the same batch gives the same replies. `chat_template_kwargs` go to the chat
    template, other `options` to `AutoModelForCausalLM.from_pretrained` (revision, attn_implementation, device_map, quantization_config).

    `usage.cached_tokens` is 0: nothing is kept from one call to the next. Calls from several threads wait for one another. `model` is the torch
    module, `tokenizer` that of transformers.

    Raises:
        UsageError: a setting is wrong, or the model or its adapter cannot be loaded.
        MissingExtra: torch, transformers, or peft or gguf where they are needed, are not installed.
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
        window: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_int(batch_size=batch_size, **drop_none(window=window))
        check_number(temperature=temperature)
        check_number(least=1e-6, most=1, top_p=top_p)
        self.name = f"transformers:{model}"
        self.batch_size = batch_size
        self._identity = {
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "adapter": str(adapter) if adapter else None,
        }
        self.temperature, self._top_p, self._seed = temperature, top_p, seed
        self._lock = threading.Lock()
        options["trust_remote_code"] = trust_remote_code
        with _loading(str(model), "give a Hugging Face name, a folder that save_pretrained wrote, or a GGUF file"):
            self.tokenizer = _load_tokenizer(model, options)
            self.model: Any = _load_model(
                model, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype, options
            )
        self._ends = _ends(self.model, self.tokenizer)
        self.model.generation_config = GenerationConfig.from_dict({})  # generate() fills what we leave unset from here
        self.window = window or getattr(
            self.model.config.get_text_config(decoder=True), "max_position_embeddings", None
        )
        if adapter:
            self.model = _with_adapter(self.model, adapter)
        self._chat = ChatTokenizer(self.tokenizer, chat_template_kwargs)

    def complete_batch(self, prompts: Sequence[Prompt]) -> list[Reply | MemAgentError]:
        """The replies to many prompts, `batch_size` of them computed together, those of similar length side by side.

        `Reply.seconds` is the time of the whole batch that a reply came with.
        """
        outcomes: dict[int, Reply | MemAgentError] = {}
        rows: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            try:
                rows[place] = self._chat.encode(prompt, self.window)
            except MemAgentError as error:
                outcomes[place] = error
        limits = {place: prompts[place].max_tokens for place in rows}
        for group, shared in self._groups(rows, limits):
            replies = self._replies([rows[place] for place in group], [limits[place] for place in group], shared)
            outcomes.update(zip(group, replies, strict=True))
        return [outcomes[place] for place in range(len(prompts))]

    def _groups(self, rows: Mapping[int, Sequence[int]], limits: Mapping[int, int]) -> Iterator[tuple[list[int], int]]:
        """Which rows are computed together, and with how many tokens in common that are computed once."""
        order = sorted(rows, key=lambda place: len(rows[place]))
        yield from ((order[start : start + self.batch_size], 0) for start in range(0, len(order), self.batch_size))

    def stream(self, prompt: Prompt) -> Generator[str | Reply]:
        """The reply in pieces. Leaving the stream ends the computation after the token that it is at."""
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
                if (
                    len(text) > len(sent) and text.startswith(sent) and not text.endswith("\ufffd")
                ):  # U+FFFD: half a character so far
                    yield text[len(sent) :]
                    sent = text
        finally:
            tokens.left.set()
            worker.join()
        reply = self._reply(row, written, started)
        if rest := reply.text.removeprefix(sent):
            yield rest
        yield reply

    def close(self) -> None:
        """Free the model's memory."""
        with self._lock:
            self.model = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _replies(self, rows: list[list[int]], limits: list[int], shared: int) -> list[Reply | MemAgentError]:
        started = time.perf_counter()
        try:
            written = self._generate(rows, limits, shared=shared)
        except BackendError as error:  # one for each, since each travels on its own
            return [copied(error) for _ in rows]
        return [self._reply(row, ids, started) for row, ids in zip(rows, written, strict=True)]

    def _reply(self, row: list[int], written: list[int], started: float) -> Reply:
        return Reply(
            text=self._text(written),
            usage=Usage(prompt_tokens=len(row), completion_tokens=len(written), cached_tokens=0),
            finish_reason="stop" if written[-1] in self._ends else "length",
            seconds=time.perf_counter() - started,
        )

    def _work(self, row: list[int], limit: int, tokens: _Tokens) -> None:
        """The thread of a stream: its tokens, and in the end None or what went wrong, go into the queue."""
        try:
            self._generate([row], [limit], tokens)
            tokens.queue.put(None)
        except BaseException as error:
            tokens.queue.put(error)

    def _generate(
        self, rows: list[list[int]], limits: list[int], tokens: _Tokens | None = None, shared: int = 0, **more: Any
    ) -> list[list[int]]:
        """What the model writes to each row of token ids: at most so many tokens, up to and with the end of the text.

        The first `shared` tokens are the same in all rows: shorter ones are filled up behind these. `more` goes to `generate`.
        """
        width = max(map(len, rows))
        with self._lock, self._errors(len(rows)), self._seeded():
            if self.model is None:
                raise closed(self.name)
            device = self.model.device
            output = self.model.generate(
                input_ids=torch.tensor(
                    [row[:shared] + [self._pad] * (width - len(row)) + row[shared:] for row in rows], device=device
                ),
                attention_mask=torch.tensor(
                    [[1] * shared + [0] * (width - len(row)) + [1] * (len(row) - shared) for row in rows], device=device
                ),
                generation_config=self._config(max(limits)),
                stopping_criteria=StoppingCriteriaList([_Stop(width, limits, tokens)]),
                streamer=tokens,
                **more,
            )
            written: list[list[int]] = output[:, width:].tolist()
        return [self._cut(ids, limit) for ids, limit in zip(written, limits, strict=True)]

    def _config(self, limit: int) -> GenerationConfig:
        sampling = (
            {"do_sample": True, "temperature": self.temperature, "top_p": self._top_p, "top_k": 0}
            if self.temperature
            else {"do_sample": False}
        )
        ends = sorted(self._ends) or None
        return GenerationConfig.from_dict(
            {"max_new_tokens": limit, "eos_token_id": ends, "pad_token_id": self._pad, **sampling}
        )

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        end = next((place + 1 for place, token in enumerate(ids) if token in self._ends), limit)
        return ids[: min(end, limit)]

    def _text(self, ids: list[int]) -> str:
        ids = ids[:-1] if ids and ids[-1] in self._ends else ids
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @property
    def _sizes(self) -> str:
        """The settings that say how much is computed at once."""
        return f"batch_size (now {self.batch_size}) or chunk_tokens"

    @cached_property
    def _pad(self) -> int:
        """The token that fills shorter rows up; it is masked, so any will do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self._ends, default=0)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Start sampling from the seed, and leave the process's own random state as it was."""
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
            freed(error)
            raise BackendError(
                f"{self.name} ran out of memory over {rows} prompts at once; lower {self._sizes}"
            ) from error


class _Tokens(BaseStreamer):
    """Tokens on their way from the thread that generates them. `left` tells that thread that nobody waits for more."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self.left = threading.Event()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`, with the prompt first and then with each token."""
        if self._prompt:
            self._prompt = False
            return
        for token in value.flatten().tolist():
            self.queue.put(token)

    def end(self) -> None:
        """Called by `generate` when it is through."""

    def __iter__(self) -> Iterator[int]:
        while (item := self.queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class _Stop(StoppingCriteria):
    """Ends each row at its own limit, and all of them when the stream has been left."""

    def __init__(self, width: int, limits: list[int], tokens: _Tokens | None) -> None:
        self._width, self._limits, self._tokens = width, limits, tokens

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        left = self._tokens is not None and self._tokens.left.is_set()
        written = input_ids.shape[1] - self._width
        done = [left or written >= limit for limit in self._limits]
        return torch.tensor(done, device=input_ids.device)  # type: ignore[return-value]


def copied(error: BackendError) -> BackendError:
    """The error once more, for another call that it ended."""
    copy = BackendError(str(error), retryable=error.retryable)
    copy.__cause__ = error.__cause__
    return copy


@contextmanager
def adapting() -> Iterator[None]:
    """Without the warning that PEFT causes when it asks transformers by an old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        yield


def freed(error: Exception) -> None:
    """Let go of the tensors that the frames of an error hold."""
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
            raise BackendError(
                f"{what} does not fit into the memory of the device; use a smaller model or dtype"
            ) from error
        raise UsageError(f"cannot load {what}: {one_line(error)}; {advice}") from error


def out_of_memory(error: Exception) -> bool:
    """Whether it says that the memory, of a GPU or of the machine, does not suffice."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MEMORY)
    )


def _place(model: str | Path) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` takes for this model."""
    path = Path(model)
    if path.suffix.lower() != ".gguf":
        return str(model), {}
    if not path.is_file():
        raise UsageError(f"cannot read the model {path}: there is no such file")
    if not find_spec("gguf"):
        raise MissingExtra.extra("gguf", "transformers")
    return str(path.parent), {"gguf_file": path.name}


def _load_tokenizer(model: str | Path, options: Mapping[str, Any]) -> Any:
    name, file = _place(model)
    own = {key: value for key, value in options.items() if key in ("trust_remote_code", "revision")}
    return AutoTokenizer.from_pretrained(name, **file, **own)


def _load_model(model: str | Path, device: str, dtype: str | torch.dtype | None, options: Mapping[str, Any]) -> Any:
    name, file = _place(model)
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **file, **options)
    return loaded if "device_map" in options else loaded.to(device)


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a reply: those of the model's generation settings and that of the tokenizer."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def _with_adapter(model: Any, adapter: str | Path) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtra.extra("peft", "transformers") from error
    with (
        adapting(),
        _loading(str(adapter), "adapter has to be a folder or Hugging Face name of a LoRA adapter made for this model"),
    ):
        warnings.filterwarnings("error", "Found missing adapter keys")  # weights that are not in it would stay random
        return PeftModel.from_pretrained(model, str(adapter))

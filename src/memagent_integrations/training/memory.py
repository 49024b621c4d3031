"""How many tokens are computed at once: as many as the free memory holds, of the GPU or of the machine."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memagent_integrations.backends.prefixes import whole
from memagent_integrations.errors import UsageError
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import forwards

_SHARE = 0.6  # of the free memory: the rest is for what torch keeps between passes, and for other programs
_MOST = 16_384  # tokens; more at once is not faster
_LEAST = 256
_ON_THE_WAY = 1.25  # what a backward pass computes, relative to what the forward pass kept for it
_PER_WEIGHT = 16  # bytes: the master, its gradient and the two means of AdamW, in float32
_UNKNOWN = 4 << 30  # bytes assumed to be free where the system does not say


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a forward and backward pass can hold: `tokens` at once by default, and rows of at most `longest` tokens."""

    tokens: int
    longest: int

    def check(self, rows: Sequence[Sampled]) -> None:
        """Check that each row can learn.

        Raises:
            UsageError: the longest row does not fit into the memory.
        """
        tokens = max((len(row.prompt_ids) + len(row.output_ids) for row in rows), default=0)
        if tokens > self.longest:
            problem = f"a prompt with its reply has {tokens:,} tokens, and the free memory holds {self.longest:,}"
            raise UsageError(f"{problem}: lower chunk_tokens, or take gradient_checkpointing")


def room(model: Any, *, gradient_checkpointing: bool = False, processes: int = 1) -> Room:
    """Return what a model that is ready to learn can hold in the memory that is free now.

    `processes` train on this machine; on the CPU they share its memory. The default of `tokens` is a power of 2, so
    that it is the same whenever about as much memory is free.
    """
    numbers = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    free = available(model.device) // (processes if model.device.type == "cpu" else 1)
    fitting = int(_SHARE * free - _PER_WEIGHT * numbers) // _bytes_of_token(model, gradient_checkpointing)
    return Room(tokens=_power(fitting, _MOST), longest=max(fitting, 0))


def sampling_tokens(model: Any, most: int) -> int:
    """Return how many tokens a model can write at once, prompts included: at most `most`, and a power of 2."""
    config = model.config.get_text_config(decoder=True)
    hidden = config.hidden_size
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or hidden // heads
    kept = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * size
    computed = 4 * hidden + 3 * (getattr(config, "intermediate_size", None) or 4 * hidden)
    bytes_of_token = 2 * kept * model.dtype.itemsize + 4 * computed  # the cache is copied whenever it grows
    return _power(int(_SHARE * available(model.device)) // bytes_of_token, most)


def available(device: torch.device) -> int:
    """Return the bytes that this process can still take on a device, within the limits of its control groups."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return max(min([_of_the_machine(), *_left_by_control_groups()]), 0)


def _bytes_of_token(model: Any, gradient_checkpointing: bool) -> int:
    """Return the bytes that a token takes in a forward and backward pass, measured on two short rows."""
    config = model.config.get_text_config(decoder=True)
    kept = (_bytes_kept(model, 128) - _bytes_kept(model, 64)) / 64
    logits: int = config.vocab_size * model.dtype.itemsize
    if gradient_checkpointing:  # the input of each layer, and all that one layer computes
        layers = config.num_hidden_layers
        kept = max(kept - logits, 0) / layers + layers * config.hidden_size * model.dtype.itemsize + logits
    return int(_ON_THE_WAY * kept + logits)  # the logits have a gradient too


def _bytes_kept(model: Any, tokens: int) -> int:
    """Return the bytes that a forward pass keeps for the backward pass of a row that wrote all of its tokens."""
    row = Sampled(text="", prompt_ids=array("i", [0]), output_ids=array("i", [0] * (tokens - 1)), logprobs=array("f"))
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        parts = list(forwards(model, [row], [whole([row])], temperature=1.0, tokens=tokens))
    del parts  # until here, so that no storage was freed and counted as another
    return sum(sizes.values())


def _power(tokens: int, most: int) -> int:
    return most if tokens >= most else max(1 << max(tokens, 1).bit_length() - 1, _LEAST)


def _of_the_machine() -> int:
    """Return the bytes that programs can still take without swapping; without /proc/meminfo, half of the memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    except (AttributeError, OSError, ValueError):
        return _UNKNOWN


def _left_by_control_groups(root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the bytes left by each limit on this process's memory (Linux control groups, both versions)."""
    for limit, usage, names in (
        ("memory.max", "memory.current", root),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", root / "memory"),
    ):
        for folder in _groups(names):
            try:
                most = int((folder / limit).read_text())  # "max" is no limit
                used = int((folder / usage).read_text()) - _reclaimable(folder)
            except (OSError, ValueError):
                continue
            yield most - used


def _groups(root: Path) -> list[Path]:
    """Return the folder of this process's control group, and those of the groups around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    paths = [line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] in ("", "memory")]
    groups = [root / path.lstrip("/") for path in paths]
    return list({folder for group in groups for folder in (group, *group.parents) if folder.is_relative_to(root)})


def _reclaimable(folder: Path) -> int:
    """Return the bytes of the file cache that count as used, and that the system takes back when they are needed."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split()[0] == "inactive_file")

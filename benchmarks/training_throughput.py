"""Compare the tokens per second of a training step with those of a minimal loop by hand, and of another checkout.

    python benchmarks/training_throughput.py [--weights adapter|all] [--other SRC] [--output FILE]

One supervised step on replies to prompts of a reading's lengths, with random tokens: forward and backward passes, the
norm of the gradient, AdamW. The embedded model (SmolLM2-135M, de-quantised) learns in the dtype that is the default
here. The loop by hand does the same arithmetic in the same dtype over the same rows with the same padding: its own LoRA
layers, hidden states picked out before the head, masters in float32. Both take turns. `--other` names the `src` folder
of another checkout, whose step is measured in a process of its own, in that checkout's default dtype.

Times are processor seconds of the process divided by its threads, which other programs hardly change, and real seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from memagent_integrations.backends import embedded
from memagent_integrations.backends.prefixes import whole
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import forwards
from memagent_integrations.training.policy import start, trainable
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Lora, Settings

RANK, LEARNING_RATE, MULTIPLE, TOGETHER = 16, 1e-4, 64, 8
Step = Callable[[], None]


def conversations(count: int, vocabulary: int) -> list[Sampled]:
    """Return prompts of 520 to 720 tokens, with replies of 4 tokens ("no change") or of 20 to 120."""
    dice = random.Random(0)

    def ids(tokens: int) -> array[int]:
        return array("i", (dice.randrange(vocabulary) for _ in range(tokens)))

    lengths = [(dice.randint(520, 720), dice.choice((4, 4, dice.randint(20, 120)))) for _ in range(count)]
    return [
        Sampled(text="", prompt_ids=ids(prompt), output_ids=ids(output), logprobs=array("f", [0.0] * output))
        for prompt, output in lengths
    ]


def with_package(policy: Sampler, rows: Sequence[Sampled], lora: bool) -> Step:
    """Return a step of this package; also that of an older checkout, whose optimizer is torch's."""
    start(policy, Settings(lora=Lora(rank=RANK, alpha=2 * RANK) if lora else None))
    weights = list(trainable(policy.model).values())
    try:
        from memagent_integrations.training.optimizer import MasterAdamW
    except ImportError:
        optimizer: Any = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
        masters = weights
    else:
        optimizer = MasterAdamW(weights, learning_rate=LEARNING_RATE, weight_decay=0.0)
        masters = optimizer.masters
    written = sum(len(row.output_ids) for row in rows)
    tokens = TOGETHER * _width(rows)

    def step() -> None:
        for part in forwards(policy.model, rows, [whole(rows)], temperature=1.0, tokens=tokens):
            torch.autograd.backward(-part.logprobs.sum() / written)
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class ByHand(nn.Module):
    """A linear layer with a LoRA adapter in its own dtype."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        options = {"dtype": base.weight.dtype}
        self.down = nn.Parameter(torch.randn(RANK, base.in_features, **options) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK, **options))

    def forward(self, states: Tensor) -> Tensor:
        """Return what the layer and its adapter make of the states."""
        added: Tensor = self.base(states) + linear(linear(states, self.down), self.up) * 2.0
        return added


def by_hand(policy: Sampler, rows: Sequence[Sampled], lora: bool) -> Step:
    """Return a step of the minimal loop."""
    model = policy.model
    model.requires_grad_(not lora)
    model.get_input_embeddings().requires_grad_(False)
    for name, module in list(model.named_modules()) if lora else ():
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, ByHand(module))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    masters = [weight.detach().float().clone().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.0)
    written = sum(len(row.output_ids) for row in rows)
    ordered = sorted(rows, key=lambda row: -len(row.prompt_ids) - len(row.output_ids))

    def step() -> None:
        for first in range(0, len(ordered), TOGETHER):
            batch = ordered[first : first + TOGETHER]
            width = _width(batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            where: list[int] = []
            for number, row in enumerate(batch):
                text = (row.prompt_ids + row.output_ids).tolist()
                ids[number, : len(text)] = torch.tensor(text)
                begin = number * width + len(row.prompt_ids) - 1
                where += range(begin, begin + len(row.output_ids))
            targets = torch.tensor([token for row in batch for token in row.output_ids])
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[where]
            loss = cross_entropy(model.lm_head(states).float(), targets, reduction="sum")
            torch.autograd.backward(loss / written)
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)

    return step


def _width(rows: Sequence[Sampled]) -> int:
    longest = max(len(row.prompt_ids) + len(row.output_ids) for row in rows)
    return -(-longest // MULTIPLE) * MULTIPLE


def measured(steps: dict[str, Step], repeat: int) -> dict[str, list[tuple[float, float]]]:
    """Return the processor seconds per thread and the real seconds of each step; a first round is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(repeat + 1):
        for name, step in steps.items():
            processor, real = time.process_time(), time.perf_counter()
            step()
            elapsed = (time.process_time() - processor) / torch.get_num_threads(), time.perf_counter() - real
            seconds[name].append(elapsed)
    return {name: rounds[1:] for name, rounds in seconds.items()}


def figures(seconds: Sequence[tuple[float, float]], rows: Sequence[Sampled], dtype: torch.dtype) -> dict[str, Any]:
    tokens = sum(len(row.prompt_ids) + len(row.output_ids) for row in rows)
    processor, real = (median(times) for times in zip(*seconds, strict=True))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tokens per second": round(tokens / processor),
        "tokens per second by the clock": round(tokens / real),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=("adapter", "all"), default="adapter")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--other", type=Path, help="the src folder of another checkout")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    load = partial(Sampler, embedded.pull("smollm2-raw"), device="cpu")
    policies = {"package": load()} if args.alone else {"package": load(), "by hand": load()}
    rows = conversations(args.rows, len(policies["package"].tokenizer))
    makers = {"package": with_package, "by hand": by_hand}
    steps = {name: makers[name](policy, rows, args.weights == "adapter") for name, policy in policies.items()}
    seconds = measured(steps, args.repeat)
    ways = {name: figures(seconds[name], rows, policy.model.dtype) for name, policy in policies.items()}
    if args.alone:
        print(json.dumps(ways["package"]))
        return
    result: dict[str, Any] = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "threads": torch.get_num_threads(),
        "rows": args.rows,
        **ways,
        "of the loop by hand": _ratio(ways["package"], ways["by hand"]),
    }
    if args.other:
        options = ["--alone", "--weights", args.weights, "--rows", str(args.rows), "--repeat", str(args.repeat)]
        done = subprocess.run(
            [sys.executable, __file__, *options],
            env=os.environ | {"PYTHONPATH": str(args.other)},
            stdout=subprocess.PIPE,
            check=True,
        )
        result["other"] = json.loads(done.stdout)
        result["times the other"] = _ratio(ways["package"], result["other"])
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float(round(one["tokens per second"] / other["tokens per second"], 2))


if __name__ == "__main__":
    main()

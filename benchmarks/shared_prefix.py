"""A training step with the section of a group computed once, against the plain computation: seconds, and how far the gradients are apart.

    python benchmarks/shared_prefix.py [--group 8] [--section 768] [--output 64] [--repeat 3]

One group of conversations over the embedded model (SmolLM2-135M, de-quantised, float32) with a LoRA adapter, in this package's own prompts: a
question, a section of words, memories and replies that differ. Forward and backward are timed, one way after the other, in one run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from memagent_integrations.backends import embedded
from memagent_integrations.prompts import PromptSet
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import forwards
from memagent_integrations.training.policy import named, start
from memagent_integrations.training.prefixes import Bundle, bundles, whole
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Lora, Settings

WORDS = "the of a house river letter morning captain road stone evening window answered walked carried under between seven green"


def text(tokens: int, seed: object, policy: Sampler) -> str:
    """About so many tokens of words."""
    drawn = random.Random(str(seed))
    words: list[str] = []
    while policy.count(" ".join(words)) < tokens:
        words += [drawn.choice(WORDS.split()) for _ in range(8)]
    return " ".join(words)


def conversations(policy: Sampler, group: int, section: int, memory: int, output: int) -> list[Sampled]:
    """The prompts of one step of a group, and replies of `output` tokens."""
    asked, read, vocabulary = PromptSet.default(), text(section, "section", policy), len(policy.tokenizer)
    rows = []
    for number in range(group):
        noted = text(memory, number, policy)
        messages = asked.update_messages(
            question="Who wrote the letter?", memory=noted, section=read, memory_tokens=memory
        )
        shown = policy.shown(messages, "")
        reply = array("i", (random.Random(f"{number}/{place}").randrange(vocabulary) for place in range(output)))
        rows.append(
            Sampled(text="", prompt_ids=shown.prompt_ids, output_ids=reply, logprobs=array("f", [0.0] * output))
        )
    return rows


def step(model: Any, rows: Sequence[Sampled], plan: Sequence[Bundle]) -> tuple[float, torch.Tensor]:
    """Seconds of forward and backward, and the gradient."""
    model.zero_grad()
    began = time.perf_counter()
    for part in forwards(model, rows, plan, temperature=1.0, tokens=16_384):
        torch.autograd.backward(part.logprobs.mean())
    seconds = time.perf_counter() - began
    return seconds, torch.cat([parameter.grad.flatten() for parameter in named(model).values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--section", type=int, default=768)
    parser.add_argument("--memory", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    told = parser.parse_args()
    policy = Sampler(embedded.pull("smollm2"))
    start(policy, Settings(lora=Lora(rank=16, alpha=32)))
    torch.manual_seed(0)
    for parameter in named(policy.model).values():  # an adapter that does something: a new one has zeros
        torch.nn.init.normal_(parameter, std=0.02)
    rows = conversations(policy, told.group, told.section, told.memory, told.output)
    ways = {"plain": [whole(rows)], "shared": bundles([row.prompt_ids for row in rows])}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(told.repeat):
        for name, plan in ways.items():
            taken, gradients[name] = step(policy.model, rows, plan)
            seconds[name].append(taken)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    apart = (gradients["shared"] - gradients["plain"]).norm() / gradients["plain"].norm()
    print(
        json.dumps(
            {
                "prompt tokens": [len(row.prompt_ids) for row in rows],
                "shared tokens": ways["shared"][0].shared,
                "seconds": {name: [round(one, 2) for one in taken] for name, taken in seconds.items()},
                "times faster": round(median["plain"] / median["shared"], 2),
                "relative difference of the gradients": apart.item(),
                "threads": torch.get_num_threads(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

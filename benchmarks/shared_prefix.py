"""Time a training step that computes a group's section once against the plain computation, and compare the gradients.

    python benchmarks/shared_prefix.py [--group 8] [--section 768] [--output 64] [--repeat 3]

One group of conversations with the embedded model (SmolLM2-135M, de-quantised, float32) and a LoRA adapter, in this
package's own prompts: the same question and section, different memories and replies. Forward and backward passes of
both ways are timed in turn, in one run.
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
from memagent_integrations.backends.prefixes import Bundle, bundles, whole
from memagent_integrations.prompts import PromptSet
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.forward import forwards
from memagent_integrations.training.policy import start, trainable
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Lora, Settings

WORDS = (
    "the of a house river letter morning captain road stone evening window "
    "answered walked carried under between seven green"
)


def text(tokens: int, seed: object, policy: Sampler) -> str:
    """Return about so many tokens of random words."""
    dice = random.Random(str(seed))
    words: list[str] = []
    while policy.count(" ".join(words)) < tokens:
        words += [dice.choice(WORDS.split()) for _ in range(8)]
    return " ".join(words)


def conversations(policy: Sampler, group: int, section: int, memory: int, output: int) -> list[Sampled]:
    """Return the prompts of one step of a group, with random replies of `output` tokens."""
    prompts, section_text, vocabulary = PromptSet.default(), text(section, "section", policy), len(policy.tokenizer)
    rows = []
    for number in range(group):
        messages = prompts.update_messages(
            question="Who wrote the letter?",
            memory=text(memory, number, policy),
            section=section_text,
            memory_tokens=memory,
        )
        prompt_ids = policy.encode_reply(messages, "").prompt_ids
        reply = array("i", (random.Random(f"{number}/{place}").randrange(vocabulary) for place in range(output)))
        rows.append(Sampled(text="", prompt_ids=prompt_ids, output_ids=reply, logprobs=array("f", [0.0] * output)))
    return rows


def step(model: Any, rows: Sequence[Sampled], plan: Sequence[Bundle]) -> tuple[float, torch.Tensor]:
    """Return the seconds of a forward and backward pass, and the gradient."""
    model.zero_grad()
    began = time.perf_counter()
    for part in forwards(model, rows, plan, temperature=1.0, tokens=16_384):
        torch.autograd.backward(part.logprobs.mean())
    seconds = time.perf_counter() - began
    return seconds, torch.cat([parameter.grad.flatten() for parameter in trainable(model).values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--section", type=int, default=768)
    parser.add_argument("--memory", type=int, default=32)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    policy = Sampler(embedded.pull("smollm2-raw"), dtype="float32")
    start(policy, Settings(lora=Lora(rank=16, alpha=32)))
    torch.manual_seed(0)
    for parameter in trainable(policy.model).values():  # a new adapter is all zeros and would do nothing
        torch.nn.init.normal_(parameter, std=0.02)
    rows = conversations(policy, args.group, args.section, args.memory, args.output)
    plans = {"plain": [whole(rows)], "shared": bundles([row.prompt_ids for row in rows])}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    gradients: dict[str, torch.Tensor] = {}
    for _ in range(args.repeat):
        for name, plan in plans.items():
            elapsed, gradients[name] = step(policy.model, rows, plan)
            seconds[name].append(elapsed)
    median = {name: statistics.median(runs) for name, runs in seconds.items()}
    difference = (gradients["shared"] - gradients["plain"]).norm() / gradients["plain"].norm()
    results = {
        "prompt tokens": [len(row.prompt_ids) for row in rows],
        "shared tokens": plans["shared"][0].shared,
        "seconds": {name: [round(run, 2) for run in runs] for name, runs in seconds.items()},
        "times faster": round(median["plain"] / median["shared"], 2),
        "relative difference of the gradients": difference.item(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

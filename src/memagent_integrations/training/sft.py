"""Supervised fine-tuning on demonstrations, for a model too small to find the form of a memory by chance.

A step shows a number of replies; the loss is the mean of -log p over their tokens. Replies to prompts that begin with
the same section are shown in the same step, where the section is computed once (`prefixes`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import ConfigDict

from memagent_integrations.backends.prefixes import bundles
from memagent_integrations.checks import check_int
from memagent_integrations.errors import UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.training.base import Training, policy_of
from memagent_integrations.training.batches import deal
from memagent_integrations.training.conversations import Sampled
from memagent_integrations.training.demonstrations import Example
from memagent_integrations.training.forward import forwards
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.policy import recomputing
from memagent_integrations.training.settings import Schedule, Settings

_FROM_TRAINING = ("lora", "embeddings", "gradient_checkpointing", "seed")
"""Settings of the other training that decide what this one computes."""


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """The settings of a training on demonstrations; those that are not here are those of `Settings`.

    Args:
        readings: constructed readings whose replies a recipe shows.
        passes: how often each reply is shown, in another order each time.
        batch: replies per optimizer step, over all processes.
        learning_rate: of AdamW, after `warmup` steps in which it rises from 0.
        schedule: of the learning rate after that, as of `Settings`.
        weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
        share: compute what the prompts of a step begin with in common once, as of `Settings`.
        evaluate_every: steps between evaluations; 0: none.
        save_every: steps between checkpoints.
        keep: checkpoints to keep.

    Raises:
        UsageError: a setting is out of range.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    readings: int = 1000
    passes: int = 1
    batch: int = 32
    learning_rate: float = 1e-4
    schedule: Schedule = "constant_with_warmup"
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    share: bool = True
    evaluate_every: int = 50
    save_every: int = 50
    keep: int = 2

    def __post_init__(self) -> None:
        check_int(readings=self.readings, passes=self.passes, batch=self.batch)
        self.over(Settings(), steps=1)  # checks the others

    def over(self, training: Settings, *, steps: int) -> Settings:
        """Return the settings of a training of so many steps: these, and the others of `training`."""
        own = asdict(self)
        for name in ("readings", "passes", "batch"):
            del own[name]
        return replace(training, **own, steps=steps, updates=1, kl=0.0)


class SftTrainer(Training):
    """Train the policy of a reader on demonstrations; `train` yields the metrics of each step.

    Another trainer with the same arguments resumes from what is in `folder`. The policy learns in place: a training in
    another folder needs one that is loaded anew.

    Args:
        reader: how the policy reads: its prompts, its budgets, and a `Sampler` as its backend.
        demonstrations: the prompts and their replies. All are kept in memory, as tokens.
        settings: see `SftSettings`.
        folder: for metrics and checkpoints.
        training: further settings, of which lora, embeddings, tokens, gradient_checkpointing and seed matter here.
        validation: by name, questions that are not in the training data; each is answered greedily every
            `evaluate_every` steps.
        accelerator: the processes, which share the replies of a step, and the trackers begun with `init_trackers`; by
            default what the process was launched with.
        origin: what `demonstrations` and `validation` were made of, in JSON: with another origin a training does not
            resume.

    Raises:
        UsageError: there are no demonstrations, one does not fit the memory, or as of `Trainer`.
        ContextOverflow: a prompt and its reply do not fit the window.
    """

    def __init__(
        self,
        reader: Reader,
        demonstrations: Iterable[Example],
        settings: SftSettings,
        folder: str | Path,
        *,
        training: Settings | None = None,
        validation: Mapping[str, Sequence[Drawn]] | None = None,
        accelerator: Accelerator | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        policy, training = policy_of(reader), training or Settings()
        examples = list(demonstrations)
        if not examples:
            raise UsageError("there are no demonstrations to train on")
        self._rows = [policy.encode_reply(example.messages, example.target) for example in examples]
        self._order = _order(examples, self._rows, settings.passes, training.seed)
        self._batch = settings.batch
        others = {name: value for name, value in asdict(training).items() if name in _FROM_TRAINING}
        super().__init__(
            reader,
            settings.over(training, steps=math.ceil(len(self._order) / settings.batch)),
            folder,
            validation=validation,
            accelerator=accelerator,
            recorded={
                **others,
                **asdict(settings),
                "demonstrations": _digest(self._rows),
                "origin": dict(origin or {}),
            },
        )
        self._room.check(self._rows)

    def batch(self) -> dict[str, float]:
        """Show the replies of the next step, and return its metrics."""
        settings, model, step = self.settings, self.policy.model, self.progress.step
        sums, began = Sums(), time.perf_counter()
        rows = [self._rows[number] for number in self._order[step * self._batch : (step + 1) * self._batch]]
        prompt_tokens = sum(len(row.prompt_ids) for row in rows)
        reply_tokens = sum(len(row.output_ids) for row in rows)
        mine = deal(rows, self.accelerator.num_processes, share=self.policy.share)[self.accelerator.process_index]
        with self._advise_on_memory(rows), recomputing(model):
            for part in forwards(model, rows, mine, temperature=1.0, tokens=settings.tokens):
                torch.autograd.backward(-part.logprobs.sum() / reply_tokens)
                sums.add("loss", -part.logprobs)
        saved = float(sum(bundle.saved() for bundle in mine))
        sums.add("shared", [saved], prompt_tokens / self.accelerator.num_processes)
        learning_rate = float(self.scheduler.get_last_lr()[0])
        norm = self._update()
        seconds = time.perf_counter() - began
        tokens = prompt_tokens + reply_tokens
        return sums.means(self.accelerator, ("loss", "shared")) | {
            "learning_rate": learning_rate,
            "gradient_norm": norm,
            "tokens": tokens,
            "learn_seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }


def _order(examples: Sequence[Example], rows: Sequence[Sampled], passes: int, seed: int) -> list[int]:
    """Return the row numbers in the order in which they are shown, pass after pass.

    A pass is shuffled, and the first one begins with the lower stages. Memory updates whose prompts begin with the same
    section stay together, so that it is computed once; answers do not, though their prompts may begin alike.
    """
    updates = [number for number, example in enumerate(examples) if example.phase == "memory"]
    together: list[tuple[int, ...]] = [
        (number,) for number, example in enumerate(examples) if example.phase == "answer"
    ]
    for bundle in bundles([rows[number].prompt_ids for number in updates]):
        numbers = tuple(updates[index] for index in bundle.rows)
        together += [numbers] if bundle.shared else [(number,) for number in numbers]
    order: list[int] = []
    for number in range(passes):
        shuffled = sorted(together)
        random.Random(f"sft/{seed}/{number}").shuffle(shuffled)
        if not number:
            shuffled.sort(key=lambda unit: examples[unit[0]].stage)
        order += [row for unit in shuffled for row in unit]
    return order


def _digest(rows: Sequence[Sampled]) -> str:
    """Return a digest of what is shown."""
    shown = sha256()
    for row in rows:
        for ids in (row.prompt_ids, row.output_ids):
            shown.update(f"{len(ids)} ".encode() + ids.tobytes())
    return shown.hexdigest()

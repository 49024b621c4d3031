"""The settings of a training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from memagent_integrations.checks import check_int, check_number, drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.training.losses import Clip

Schedule = Literal["constant_with_warmup", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA adapter (arXiv:2106.09685).

    Args:
        rank: its rank.
        alpha: the adapter is scaled by `alpha` / `rank`.
        targets: names of the layers that get one; "all-linear": all linear layers but the output.
    """

    rank: int = 32
    alpha: int = 64
    targets: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        check_int(lora_rank=self.rank, lora_alpha=self.alpha)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of multi-conversation DAPO.

    The defaults of group, questions, updates, learning_rate, schedule, warmup, temperature, clip and kl are those of
    MemAgent (arXiv:2507.02259); the options beyond them are those of DAPO (arXiv:2503.14476).

    Args:
        steps: batches of rollouts.
        questions: questions per batch, over all processes.
        group: rollouts per question.
        updates: optimizer steps per batch, however many turns the documents take.
        learning_rate: of AdamW, after `warmup` optimizer steps in which it rises from 0.
        schedule: of the learning rate after that: "constant_with_warmup", or falling to 0 at the end of the run,
            "linear" or "cosine".
        weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
        temperature: sampling temperature of rollouts.
        clip: how far a token's probability may move in a batch.
        kl: weight of the divergence from the start policy, whose weights are kept for it; 0: none.
        scale: divide advantages by the standard deviation of their group.
        dynamic: drop groups whose rewards are all equal, and draw more questions in their place.
        refills: how many times `dynamic` draws more questions for one batch.
        overlong: tokens before the output limit at which a reply begins to lose reward; 0: none.
        rescore: recompute the log-probabilities of the rollouts before the first update; else use those of sampling.
        correction: the largest weight of a token whose sampler and trainer compute other probabilities (needs
            `rescore`); None: all tokens weigh 1.
        format_reward: added to the reward of an answer in the prescribed form.
        lora: the adapter to train; None: all weights, unless the policy has an adapter already. An adapter usually
            needs a higher `learning_rate`; the recipes use 1e-5.
        embeddings: where all weights learn, the embeddings of the tokens learn too.
        share: compute the common prefix of the rollouts of a question once. A model that cannot do so is trained the
            plain way.
        tokens: most tokens of one forward pass, padding included; a shared prefix counts once. 0: as many as the free
            memory holds.
        gradient_checkpointing: recompute activations instead of keeping them; it rules out `share`.
        seed: of everything random.
        evaluate_every: batches between evaluations; 0: none.
        save_every: batches between checkpoints.
        keep: checkpoints to keep.
        readings_every: batches between readings that are saved for a person to look at; 0: none.

    Raises:
        UsageError: a setting is out of range, or two of them exclude each other.
    """

    steps: int = 200
    questions: int = 128
    group: int = 16
    updates: int = 16
    learning_rate: float = 1e-6
    schedule: Schedule = "constant_with_warmup"
    warmup: int = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    clip: Clip = field(default_factory=Clip)
    kl: float = 1e-3
    scale: bool = False
    dynamic: bool = False
    refills: int = 3
    overlong: int = 0
    rescore: bool = True
    correction: float | None = None
    format_reward: float = 0.0
    lora: Lora | None = None
    embeddings: bool = False
    share: bool = True
    tokens: int = 0
    gradient_checkpointing: bool = False
    seed: int = 0
    evaluate_every: int = 10
    save_every: int = 1
    keep: int = 2
    readings_every: int = 10

    def __post_init__(self) -> None:
        check_int(
            steps=self.steps,
            questions=self.questions,
            updates=self.updates,
            save_every=self.save_every,
            keep=self.keep,
        )
        check_int(least=2, group=self.group)
        if self.schedule not in get_args(Schedule):
            raise UsageError(f"schedule has to be one of {', '.join(get_args(Schedule))}, not {self.schedule!r}")
        check_int(least=0, tokens=self.tokens)
        check_int(least=0, warmup=self.warmup, overlong=self.overlong, seed=self.seed, refills=self.refills)
        check_int(least=0, evaluate_every=self.evaluate_every, readings_every=self.readings_every)
        check_number(
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            kl=self.kl,
        )
        check_number(least=0.01, temperature=self.temperature)
        check_number(least=1, **drop_none(correction=self.correction))
        check_number(format_reward=self.format_reward)
        if self.correction and not self.rescore:
            problem = "correction compares the probabilities of training with those of sampling"
            raise UsageError(f"{problem}: it takes rescore=True")

"""Does training work? A model of a third of a million parameters learns to carry a fact through a document of any length.

    python benchmarks/carry_a_fact.py --output docs/results/carry_a_fact.json

A document is a row of facts, a key with a value each, in one sign; four of them are a chunk. The question names a key that stands in one of the
first two of five chunks and nowhere else, and the memory holds a fact or two: the answer needs it carried through at least four conversations. The
model knows nothing at first. It is shown some constructed readings (the warm start), then it learns from the reward of its own answers alone. In the
control the advantages of a batch are shuffled among its rollouts: what is learned then is noise. The policy of a training is the one that did best on
questions of validation, as with `memagent train run`; what the last batch left is told too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.prompts import PromptSet
from memagent_integrations.reader import Reader
from memagent_integrations.training.checkpoints import load
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings
from memagent_integrations.training.trainer import Batch, Trainer
from memagent_integrations.training.warmstart import Shown, warm_start

KEYS, VALUES, FACTS, CHUNKS = 4, 4, 4, 5
FORGETS = 0.55
"""How often the readings of the warm start lose their note at a chunk that does not repeat it."""
SETTINGS: dict[str, Any] = {
    "questions": 24,
    "group": 8,
    "updates": 2,
    "learning_rate": 5e-4,
    "warmup": 5,
    "weight_decay": 0.0,
    "kl": 0.0,
    "rescore": False,
    "evaluate_every": 25,
    "readings_every": 0,
}
PROMPTS = PromptSet(
    update="question {question} section {section} memory {memory} new",
    answer="question {question} memory {memory} answer",
    empty_memory="none",
)


def fact(key: int, value: int) -> str:
    """A key with its value, in one sign."""
    return chr(0x4E00 + VALUES * key + value)


def model_of(folder: Path, seed: int) -> Path:
    """A Llama of a third of a million parameters that knows nothing, and a tokenizer with a word a fact."""
    facts = [fact(key, value) for key in range(KEYS) for value in range(VALUES)]
    words = [
        "<pad>",
        "<end>",
        "<unknown>",
        *facts,
        *(f"k{key}" for key in range(KEYS)),
        *(f"v{value}" for value in range(VALUES)),
    ]
    words += ["question", "section", "memory", "new", "answer", "none"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Steps([WhitespaceSplit(), Split(Regex(f"[{facts[0]}-{facts[-1]}]"), "isolated")])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def sample(seed: object, length: int = 1) -> Sample:
    """A document `length` times as long as those of the training, its fact in the first 40 % of it."""
    dice = random.Random(f"carry/{seed}")
    key, chunks = dice.randrange(KEYS), CHUNKS * length
    place = dice.randrange(FACTS * (2 * chunks // 5))
    value = dice.randrange(VALUES)
    others = [other for other in range(KEYS) if other != key]
    facts = [fact(dice.choice(others), dice.randrange(VALUES)) for _ in range(FACTS * chunks)]
    facts[place] = fact(key, value)
    return Sample(
        id=f"carry/{seed}",
        question=f"k{key}",
        answers=(f"v{value}",),
        document=lambda: iter(["".join(facts)]),
        details={"fact": facts[place]},
    )


TASK = Task(
    name="carry", metric="em", make=lambda length, seed, number, count: sample((seed, number), length), unit=None
)


def drawn(seed: object, length: int = 1) -> Drawn:
    """A question of the training."""
    return Drawn(task=TASK, length=length, sample=sample(seed, length))


def constructed(reader: Reader, readings: int, seed: int) -> Iterator[Shown]:
    """Prompts and replies of readings by somebody who knows what to note, and forgets it at the next chunk more often than not."""
    careless = random.Random(f"careless/{seed}")
    for number in range(readings):
        one = sample(("shown", seed, number))
        wanted, memory = one.details["fact"], ""
        for chunk in reader.chunks(one.document()):
            new = wanted if wanted in chunk.text or (memory == wanted and careless.random() > FORGETS) else "none"
            yield (
                PROMPTS.update_messages(question=one.question, memory=memory, section=chunk.text, memory_tokens=2),
                new,
            )
            memory = new
        yield PROMPTS.answer_messages(question=one.question, memory=memory), one.answers[0]


def reader_of(folder: Path, kind: type[Sampler] = Sampler, **options: Any) -> Reader:
    """A reader with a model of `model_of`."""
    return Reader(
        kind(folder, tokens=8192, **options),
        prompts=PROMPTS,
        chunk_tokens=FACTS,
        memory_tokens=2,
        output_tokens=2,
        question_tokens=4,
    )


def correct(reader: Reader, count: int, seed: object, length: int = 1) -> list[float]:
    """For each held-out question whether it is answered rightly, greedily."""
    held = [sample(("held out", seed, number), length) for number in range(count)]
    with reader.backend.greedy():
        readings = reader.read_many([(one.question, one.document()) for one in held])
    return [float(reading.answer == one.answers[0]) for reading, one in zip(readings, held, strict=True)]


class Control(Trainer):
    """A training from noise: every rollout gets the advantage of another one."""

    def collect(self, sums: Sums) -> Batch:
        """As it is, but for whose the advantages are."""
        batch = super().collect(sums)
        random.Random(f"{self.settings.seed}/{self.place.step}").shuffle(batch.advantages)
        return batch


def better(one: Sequence[float], other: Sequence[float], rounds: int = 10_000) -> float:
    """How often the questions, drawn anew with replacement, would show no gain: the p of a paired bootstrap."""
    dice = random.Random(0)
    gains = [mine - theirs for mine, theirs in zip(one, other, strict=True)]
    return sum(sum(dice.choices(gains, k=len(gains))) <= 0 for _ in range(rounds)) / rounds


def train(
    folder: Path,
    start: Path,
    kind: type[Trainer],
    steps: int,
    seed: int,
    schedule: str,
    told: Callable[[str], None] = print,
) -> tuple[Reader, list[float]]:
    """The reader of `start` after so many batches, and the mean reward of each."""
    reader = reader_of(start)
    settings = Settings(**SETTINGS, steps=steps, seed=seed, schedule=schedule, save_every=steps)
    validation = {"carry": [drawn(("validation", seed, number)) for number in range(64)]}
    trainer = kind(
        reader, lambda number, share: drawn(("train", seed, number)), settings, folder, validation=validation
    )
    rewards = []
    for metrics in trainer.train():
        rewards.append(metrics["reward"])
        if not len(rewards) % 10:
            told(f"{kind.__name__} {len(rewards)}: reward {metrics['reward']:.3f}, entropy {metrics['entropy']:.3f}")
    return reader, rewards


def warmed(folder: Path, readings: int, seed: int) -> Path:
    """A model that was shown some readings."""
    reader = reader_of(model_of(folder, seed))
    for _ in warm_start(reader.backend, constructed(reader, readings, seed), batch=96, learning_rate=2e-3):
        pass
    reader.backend.model.save_pretrained(folder)
    return folder


def experiment(
    folder: Path,
    seed: int,
    *,
    steps: int,
    control: int,
    held: int,
    long: int,
    readings: int = 1500,
    schedule: str = "constant_with_warmup",
) -> dict[str, Any]:
    """Share of right answers after the warm start, after the training, and after that of the control; `long` of them about 64 times the length."""
    torch.set_num_threads(1)  # the fastest for a model of this size
    begun = time.perf_counter()
    start = warmed(folder / "start", readings, seed)
    before = correct(reader_of(start), held, seed)
    told: dict[str, Any] = {"seed": seed, "warm start": mean(before), "warm start seconds": time.perf_counter() - begun}
    for kind, batches in ((Trainer, steps), (Control, control)):
        began = time.perf_counter()
        reader, rewards = train(folder / kind.__name__, start, kind, batches, seed, schedule)
        seconds, last = time.perf_counter() - began, correct(reader, held, seed)
        load(reader.backend.model, folder / kind.__name__ / "best")
        after = correct(reader, held, seed)
        name = "trained" if kind is Trainer else "control"
        told |= {name: mean(after), f"{name} p": better(after, before), f"{name}, last batch": mean(last)}
        told |= {f"{name} seconds": seconds, f"{name} rewards": rewards}
        if kind is Trainer and long:
            told["64 times as long"] = mean(correct(reader, long, seed, 64))
    return told


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The mean reward of each batch, a line a seed."""
    figure = Figure(figsize=(6, 3.2), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for result in results:
        for name, colour in (("trained", "C0"), ("control", "C3")):
            rewards = result[f"{name} rewards"]
            smooth = [mean(rewards[max(end - 10, 0) : end]) for end in range(1, len(rewards) + 1)]
            axes.plot(
                range(1, len(rewards) + 1),
                smooth,
                color=colour,
                alpha=0.8,
                label=name if result is results[0] else None,
            )
    axes.set(xlabel="batch", ylabel="mean reward, 10 batches", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="batches of rollouts")
    parser.add_argument("--control", type=int, default=50, help="batches of the control")
    parser.add_argument(
        "--readings",
        type=int,
        default=3000,
        help="that the warm start shows: with too few it never copies some of the facts",
    )
    parser.add_argument("--schedule", default="linear", help="of the learning rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held", type=int, default=256, help="held-out questions")
    parser.add_argument("--long", type=int, default=128, help="held-out questions of 64 times the length")
    parser.add_argument("--output", type=Path, help="a JSON file; the picture is beside it")
    told = parser.parse_args()
    results = []
    for seed in range(told.seeds):
        with tempfile.TemporaryDirectory() as folder:
            sizes = {
                "steps": told.steps,
                "control": told.control,
                "held": told.held,
                "long": told.long,
                "readings": told.readings,
            }
            results.append(experiment(Path(folder), seed, **sizes, schedule=told.schedule))
        print(
            json.dumps({name: value for name, value in results[-1].items() if not name.endswith("rewards")}, indent=1),
            flush=True,
        )
    if told.output:
        told.output.write_text(
            json.dumps({"command": sys.argv[1:], "results": results}, indent=1) + "\n", encoding="utf-8"
        )
        draw(results, told.output.with_suffix(".png"))


if __name__ == "__main__":
    main()

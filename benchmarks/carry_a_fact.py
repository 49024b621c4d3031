"""Does training work? A model of a third of a million parameters learns to carry a fact through any document.

    python benchmarks/carry_a_fact.py --output docs/results/carry_a_fact.json

A document is a row of facts, each a key with a value in one sign; four facts are a chunk. The question names a key that
occurs once, in one of the first two of five chunks, and the memory holds a fact or two: to answer, the model has to
carry the fact through at least four conversations. The model starts with random weights. The warm start shows it some
constructed readings; then it learns from the reward of its own answers alone. The control shuffles the advantages of a
batch among its rollouts, so that it learns from noise. As with `memagent train run`, the policy of a training is the
one with the best validation score; the one after the last batch is reported too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from memagent_integrations.training.demonstrations import Example
from memagent_integrations.training.metrics import Sums
from memagent_integrations.training.mixture import Drawn
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings
from memagent_integrations.training.sft import SftSettings, SftTrainer
from memagent_integrations.training.trainer import Batch, Trainer

KEYS, VALUES, FACTS, CHUNKS = 4, 4, 4, 5
FORGETS = 0.55
"""How often a reading of the warm start loses its fact at a chunk that does not repeat it."""
SETTINGS: dict[str, Any] = {
    "questions": 24,
    "group": 8,
    "updates": 2,
    "learning_rate": 5e-4,
    "warmup": 5,
    "weight_decay": 0.0,
    "kl": 0.0,
    "embeddings": True,
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
    """Return the sign of a key with its value."""
    return chr(0x4E00 + VALUES * key + value)


def model_of(folder: Path, seed: int) -> Path:
    """Save a Llama with a third of a million random weights, and a tokenizer with one token per fact."""
    facts = [fact(key, value) for key in range(KEYS) for value in range(VALUES)]
    keys, values = [f"k{key}" for key in range(KEYS)], [f"v{value}" for value in range(VALUES)]
    template = ["question", "section", "memory", "new", "answer", "none"]
    words = ["<pad>", "<end>", "<unknown>", *facts, *keys, *values, *template]
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
    """Return a document `length` times as long as in training, with the fact in its first 40 %."""
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
    """Return a question to train or validate on."""
    return Drawn(task=TASK, length=length, sample=sample(seed, length))


def constructed(reader: Reader, readings: int, seed: int) -> Iterator[Example]:
    """Yield the prompts and replies of readings that note the right fact, and forget it at later chunks.

    Their stages have them shown in this order.
    """
    dice = random.Random(f"careless/{seed}")
    for number in range(readings):
        document = sample(("shown", seed, number))
        question, wanted, memory = document.question, document.details["fact"], ""
        for chunk in reader.chunks(document.document()):
            kept = wanted in chunk.text or (memory == wanted and dice.random() > FORGETS)
            note = wanted if kept else "none"
            prompt = PROMPTS.update_messages(question=question, memory=memory, section=chunk.text, memory_tokens=2)
            yield Example(messages=prompt, target=note, phase="memory", stage=number)
            memory = note
        prompt = PROMPTS.answer_messages(question=question, memory=memory)
        yield Example(messages=prompt, target=document.answers[0], phase="answer", stage=number)


def reader_of(folder: Path, kind: type[Sampler] = Sampler, **options: Any) -> Reader:
    """Return a reader with a model of `model_of`."""
    return Reader(
        kind(folder, tokens=8192, dtype="float32", **options),
        prompts=PROMPTS,
        chunk_tokens=FACTS,
        memory_tokens=2,
        output_tokens=2,
        question_tokens=4,
        on_lost_section="skip",
    )


def correct(reader: Reader, count: int, seed: object, length: int = 1) -> list[float]:
    """Return for each held-out question 1.0 or 0.0, whether a greedy reading answers it right."""
    held_out = [sample(("held out", seed, number), length) for number in range(count)]
    with reader.backend.greedy():
        readings = reader.read_many([(each.question, each.document()) for each in held_out])
    return [float(reading.answer == each.answers[0]) for reading, each in zip(readings, held_out, strict=True)]


class Control(Trainer):
    """A training on noise: every rollout gets the advantage of a random one."""

    def collect(self, sums: Sums) -> Batch:
        """Shuffle the advantages of a batch."""
        batch = super().collect(sums)
        random.Random(f"{self.settings.seed}/{self.progress.step}").shuffle(batch.advantages)
        return batch


def better(after: Sequence[float], before: Sequence[float], rounds: int = 10_000) -> float:
    """Return the p-value of a gain by a paired bootstrap: the share of resamples of the questions without one."""
    dice = random.Random(0)
    gains = [new - old for new, old in zip(after, before, strict=True)]
    return sum(sum(dice.choices(gains, k=len(gains))) <= 0 for _ in range(rounds)) / rounds


def train(
    folder: Path,
    start: Path,
    kind: type[Trainer],
    steps: int,
    seed: int,
    settings: Mapping[str, Any],
    log: Callable[[str], None] = print,
) -> tuple[Reader, list[float]]:
    """Train the model in `start`; return its reader and the mean reward of each batch."""
    reader = reader_of(start)
    validation = {"carry": [drawn(("validation", seed, number)) for number in range(64)]}
    trainer = kind(
        reader,
        lambda number, share: drawn(("train", seed, number)),
        Settings(**settings, steps=steps, seed=seed, save_every=steps),
        folder,
        validation=validation,
    )
    rewards = []
    for metrics in trainer.train():
        rewards.append(metrics["reward"])
        if not len(rewards) % 10:
            log(f"{kind.__name__} {len(rewards)}: reward {metrics['reward']:.3f}, entropy {metrics['entropy']:.3f}")
    return reader, rewards


def warmed(folder: Path, readings: int, batch: int, seed: int) -> Path:
    """Save a model after a warm start on some constructed readings, and return its folder."""
    reader = reader_of(model_of(folder, seed))
    settings = SftSettings(batch=batch, learning_rate=2e-3, evaluate_every=0, save_every=10**6)
    shown, learns = constructed(reader, readings, seed), Settings(embeddings=True)
    for _ in SftTrainer(reader, shown, settings, folder / "sft", training=learns).train():
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
    readings: int,
    warm_batch: int = 96,
    settings: Mapping[str, Any] = SETTINGS,
) -> dict[str, Any]:
    """Return the share of right answers after the warm start, the training and the control.

    `held` questions are asked each time, and `long` of 64 times the length after the training.
    """
    torch.set_num_threads(1)  # the fastest for a model of this size
    begun = time.perf_counter()
    start = warmed(folder / "start", readings, warm_batch, seed)
    before = correct(reader_of(start), held, seed)
    results: dict[str, Any] = {
        "seed": seed,
        "warm start": mean(before),
        "warm start seconds": time.perf_counter() - begun,
    }
    for name, kind, batches in (("trained", Trainer, steps), ("control", Control, control)):
        began = time.perf_counter()
        reader, rewards = train(folder / name, start, kind, batches, seed, settings)
        seconds, last = time.perf_counter() - began, correct(reader, held, seed)
        load(reader.backend.model, folder / name / "best")
        after = correct(reader, held, seed)
        results |= {name: mean(after), f"{name} p": better(after, before), f"{name}, last batch": mean(last)}
        results |= {f"{name} seconds": seconds, f"{name} rewards": rewards}
        if kind is Trainer and long:
            results["64 times as long"] = mean(correct(reader, long, seed, 64))
    return results


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the mean reward of each batch, one line per seed."""
    figure = Figure(figsize=(6, 3.2), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for result in results:
        for name, colour in (("trained", "C0"), ("control", "C3")):
            rewards = result[f"{name} rewards"]
            smooth = [mean(rewards[max(end - 10, 0) : end]) for end in range(1, len(rewards) + 1)]
            label = name if result is results[0] else None
            axes.plot(range(1, len(rewards) + 1), smooth, color=colour, alpha=0.8, label=label)
    axes.set(xlabel="batch", ylabel="mean reward, 10 batches", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="batches of rollouts")
    parser.add_argument("--control", type=int, default=50, help="batches of the control")
    parser.add_argument(
        "--readings", type=int, default=3000, help="of the warm start: with too few it never copies some of the facts"
    )
    parser.add_argument("--schedule", default="linear", help="of the learning rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held", type=int, default=256, help="held-out questions")
    parser.add_argument("--long", type=int, default=128, help="held-out questions of 64 times the length")
    parser.add_argument("--output", type=Path, help="a JSON file; the picture is beside it")
    args = parser.parse_args()
    results = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            result = experiment(
                Path(folder),
                seed,
                steps=args.steps,
                control=args.control,
                held=args.held,
                long=args.long,
                readings=args.readings,
                settings=SETTINGS | {"schedule": args.schedule},
            )
        results.append(result)
        shown = {name: value for name, value in result.items() if not name.endswith("rewards")}
        print(json.dumps(shown, indent=1), flush=True)
    if args.output:
        written = {"command": sys.argv[1:], "results": results}
        args.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        draw(results, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""Do the tasks make the documents that the published generators make from the same random choices?

Our task makes a sample. The choices that it made (words, values, places, orders, distractors) are read from its
document and given to the published generator in place of random ones; a choice that it could not have made is a
disagreement. Its document and its answers have to be ours, where runs of white space count as one: `white space` is the
number of documents that differ in it. Sentences are split by ours, because the published code needs a trained splitter.

What is not compared: how many units of text make a length, the depths, and the wording of questions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd  # like the two below imported before any stand-in: they cannot be imported twice
import scipy.special
import wonderwords.random_word as wonderwords
import yaml
from published_code import module, revision, stand_ins

from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data, for_training
from memagent_integrations.evaluation.samples import Sample

SIZES = (1500, 5000)  # words of a document, or paragraphs below
PARAGRAPHS = (50, 200)
NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.")
GOLDEN = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")  # their texts are ours to commit
RULER = "scripts/data/synthetic"
MEMAGENT = "taskutils/memory_data/processing.py"
BABILONG = "babilong/babilong_utils.py"

Made = tuple[str, Sequence[str]]  # a document and its answers


class Impossible(Exception):
    """The published code could not have made a choice."""


def words(text: str) -> int:
    """Count words: the tokenizer of all samples."""
    return len(text.split())


def possible(holds: bool, what: object) -> None:
    """Raise an error unless the published code can make the choice."""
    if not holds:
        raise Impossible(str(what))


class Draws:
    """Stands for the module `random`: its choices are those given, after a look whether they are possible."""

    def __init__(
        self,
        *,
        samples: Iterable[Callable[[Sequence[Any]], Sequence[Any]]] = (),
        orders: Iterable[Callable[[Sequence[Any]], Sequence[Any]]] = (),
        texts: Iterable[str] = (),
    ) -> None:
        self._samples, self._orders, self._texts = iter(samples), iter(orders), iter(texts)

    def Random(self, _: object) -> Draws:  # noqa: N802 - the name of the class that it stands for
        """Return itself: the seed does not matter."""
        return self

    def sample(self, population: Sequence[Any], k: int) -> list[Any]:
        """Return the next sample."""
        chosen = list(next(self._samples)(population))
        possible(len(chosen) == k, f"{len(chosen)} chosen, {k} wanted")
        return chosen

    def shuffle(self, items: list[Any]) -> None:
        """Put the items into the next order."""
        ordered = list(next(self._orders)(items))
        possible(Counter(ordered) == Counter(items), "other items than those to shuffle")
        items[:] = ordered

    def choices(self, population: Sequence[Any], k: int) -> list[Any]:
        """Return the letters of the next text."""
        letters = list(next(self._texts))
        possible(len(letters) == k and set(letters) <= set(population), letters)
        return letters


def fixed(items: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a choice that does not depend on what there is to choose from."""
    return lambda _: items


class Generators:
    """RULER's generators, each run as its own configuration says, in a copy with data sets in their form."""

    def __init__(self, folder: Path, made: Path, data: Path) -> None:
        shutil.copytree(folder / "scripts/data", made, dirs_exist_ok=True)
        self._path = made / "synthetic"
        self._settings = yaml.safe_load((folder / "scripts/synthetic.yaml").read_text("utf-8"))
        (self._path / "json/english_words.json").write_text("{}", "utf-8")  # for lists longer than those here
        essays = "\n".join(path.read_text("utf-8") for path in sorted((data / "paul_graham").glob("*.txt")))
        for name, value in {
            "PaulGrahamEssays": {"text": essays},
            "squad": squad(data),
            "hotpotqa": hotpotqa(data),
        }.items():
            (self._path / f"json/{name}.json").write_text(json.dumps(value), "utf-8")

    @cache  # noqa: B019 - there is one of these
    def run(self, task: str, size: int = 4096, **options: object) -> ModuleType:
        """Return the module that generates a task, whose prompt is the document alone."""
        settings = self._settings[task]
        fixed_options = {
            **dict.fromkeys(("save_dir", "save_name", "tokenizer_path"), "."),
            "max_seq_length": size,
            "tokens_to_generate": 1,
            "num_samples": 1,
            "template": "{context}",
        }
        flags = {**fixed_options, **settings["args"], **options}
        argv = ["generate", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
        packages = ("tokenizer", "manifest_utils", "nltk", "nltk.tokenize", "tqdm")
        paths = [str(self._path), *sys.path]
        nowords = settings["task"] == "niah"  # it would take long to pair all of them: `paired` looks them up
        lists = (lambda _: []) if nowords else wonderwords._get_words_from_text_file
        given = patch.multiple(sys, argv=argv, path=paths)
        with stand_ins(*packages), given, patch.object(wonderwords, "_get_words_from_text_file", lists):
            made = module(self._path / f"{settings['task']}.py")
        made.TOKENIZER = SimpleNamespace(text_to_tokens=lambda _: ())  # type: ignore[attr-defined]
        return made


def squad(data: Path) -> dict[str, Any]:
    """Return the articles of SQuAD that are not for training, in the form of its file."""
    articles: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows(data / "squad/paragraphs.jsonl"):
        if not for_training(row["title"]):
            articles.setdefault(row["title"], {})[row["paragraph"]] = {"context": row["context"].strip(), "qas": []}
    for row in rows(data / "squad/questions.jsonl"):
        if row["title"] in articles:
            answers = [{"text": answer} for answer in row["answers"]]
            asked = {"question": row["question"], "answers": answers, "is_impossible": row["is_impossible"]}
            articles[row["title"]][row["paragraph"]]["qas"].append(asked)
    return {"data": [{"paragraphs": list(paragraphs.values())} for paragraphs in articles.values()]}


def hotpotqa(data: Path) -> list[dict[str, Any]]:
    """Return the questions of HotpotQA in the form of its file."""
    return [
        row | {"context": [(title, ["".join(sentences).strip()]) for title, sentences in row["context"]]}
        for row in rows(data / "hotpotqa/dev.jsonl")
    ]


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file."""
    for line in path.read_text("utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


def places(units: Sequence[str], texts: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return before which of the other units these texts stand, and the other units."""
    found, others = [], []
    for unit in units:
        if unit in texts:
            found.append(len(others))
        else:
            others.append(unit)
    return found, others


def needles(generators: Generators, name: str, sample: Sample, text: str, data: Data) -> Made:
    """Return what RULER makes of the needles, the places and the haystack."""
    haystack = sample.details["haystack"]
    made = generators.run(name)
    facts = [fact.text for fact in sample.facts]
    hidden = facts if haystack == "needle" else [match[0] for match in NEEDLE.finditer(text)]
    pairs = [NEEDLE.fullmatch(needle).groups() for needle in hidden]  # type: ignore[union-attr]
    ranks = {answer: rank for rank, answer in enumerate(sample.answers)}
    pairs.sort(key=lambda pair: ranks.get(pair[1], len(ranks)))
    values: dict[str, list[str]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    drawn = [item for key, those in values.items() for item in (key, *those)]
    asked = fixed(range(made.args.num_needle_q))
    if haystack == "essay":
        corpus, units = data.essays, sample.details["units"]
        sentences = [corpus.sentence(n % len(corpus.starts)) for n in range(units)]
        positions = between(text, sentences, hidden)
        depths = [100.0 if place == units else 100 * (place + 0.25) / units for place in positions]

        def split(cut: str) -> list[str]:
            possible(cut == " ".join(sentences), "another text of the same number of words")
            return sentences

        made.sent_tokenize = split  # type: ignore[attr-defined]
        made.random = Draws(orders=[fixed(hidden)], samples=[fixed(depths), asked])  # type: ignore[attr-defined]
        size = len(" ".join(sentences).split(" "))
    else:
        positions, others = places(text.split("\n"), hidden)
        if haystack == "needle":
            drawn += [item for line in others for item in NEEDLE.fullmatch(line).groups()]  # type: ignore[union-attr]
        orders = [fixed(hidden[::-1])]
        made.random = Draws(orders=orders, samples=[fixed(positions), asked])  # type: ignore[attr-defined]
        size = len(others)
    queue = iter(drawn)

    def generate(kind: str) -> str:
        item = next(queue)
        checks = {"uuids": is_uuid, "numbers": lambda number: 10**6 <= int(number) < 10**7, "words": paired}
        possible(checks[kind](item), item)
        return item

    made.generate_random = generate  # type: ignore[attr-defined]
    return made.generate_input_output(size)  # type: ignore[no-any-return]


def is_uuid(text: str) -> bool:
    """Return whether the text is a random UUID."""
    return uuid.UUID(text).version == 4


@cache
def listed_words(kind: str) -> frozenset[str]:
    """Return the words of a list from which RULER draws."""
    return frozenset(wonderwords._get_words_from_text_file(f"{kind}list.txt"))


def paired(text: str) -> bool:
    """Return whether the text is an adjective and a noun of RULER's lists."""
    hyphens = (match.start() for match in re.finditer("-", text))
    adjectives, nouns = listed_words("adjective"), listed_words("noun")
    return any(text[:at] in adjectives and text[at + 1 :] in nouns for at in hyphens)


def between(text: str, sentences: Sequence[str], hidden: Sequence[str]) -> list[int]:
    """Return before which sentence each needle stands."""
    found: list[int] = []
    start = number = 0
    while start < len(text):
        if len(found) < len(hidden) and text.startswith(hidden[len(found)], start):
            found.append(number)
            start += len(hidden[len(found) - 1]) + 1
        else:
            start, number = start + len(sentences[number]) + 1, number + 1
    return found


def chain(generators: Generators, name: str, sample: Sample, text: str, _: Data) -> Made:
    """Return what RULER makes of the variables, the value and the places."""
    made = generators.run(name)
    facts = [fact.text for fact in sample.facts]
    positions, others = places(text.split("\n"), facts)
    value = int(facts[0].rpartition(" ")[2])
    made.random = Draws(texts=sample.answers, samples=[fixed(positions)])  # type: ignore[attr-defined]
    made.np = SimpleNamespace(random=SimpleNamespace(randint=lambda low, high: value))  # type: ignore[attr-defined]
    return made.generate_input_output(len(others), 1, 4)  # type: ignore[no-any-return]


def common(generators: Generators, name: str, sample: Sample, text: str, _: Data) -> Made:
    """Return what RULER makes of the words and their order."""
    listed = re.findall(r"\d+\. (\S+)", text)
    distinct = [*sample.answers, *(word for word in dict.fromkeys(listed) if word not in sample.answers)]
    made = generators.run(name, 4096 if sample.details["often"] == 30 else 2048, num_fewshot=0)
    possible(set(distinct) <= set(made.words), set(distinct) - set(made.words))
    made.random = Draws(samples=[fixed(distinct)], orders=[fixed(listed)])  # type: ignore[attr-defined]
    document, answers = made.generate_input_output(len(distinct))
    return document.removeprefix("\n"), answers


def frequent(generators: Generators, name: str, sample: Sample, text: str, _: Data) -> Made:
    """Return what RULER makes of the coded words and their order, with the vocabulary that it has at this length."""
    listed = text.split(" ")
    ranked = [word for word, _ in Counter(listed).most_common()]
    ranked = ["...", *sample.answers, *(word for word in ranked if word not in ("...", *sample.answers))]
    made = generators.run(name)
    counts = np.arange(1, len(ranked) + 1) ** -2.0 / scipy.special.zeta(2.0)
    wanted = next(n for n in range(len(listed), 2 * len(listed)) if (n * counts).astype(int).sum() == len(listed))
    vocabulary = max(int(sample.id.split("/")[1]) // 50, len(ranked))
    more = [f"{'z' * 4}{first}{second}" for first in "abcdefgh" for second in "abcdefghijklmnopqrstuvwxyz"]
    coded = [*ranked[1:], *(word for word in more if word not in ranked)][:vocabulary]

    def order(items: Sequence[str]) -> Sequence[str]:
        return listed if "..." in items else [coded[-1], *coded[:-1]]

    made.random = Draws(texts=coded, orders=[order] * 9)  # type: ignore[attr-defined]
    document, answers, _ = made.generate_input_output(10**9, num_words=wanted, vocab_size=vocabulary)
    return document, answers


def paragraphs(made: ModuleType, sample: Sample, text: str) -> tuple[int, int]:
    """Give the choice and the order of our paragraphs to the code that stacks them; return its question and size."""
    number, ours, rest = 1, [], text.removeprefix("Document 1:\n")
    while True:
        number += 1
        paragraph, found, rest = rest.partition(f"\n\nDocument {number}:\n")
        ours.append(paragraph)
        if not found:
            break
    index = next(
        n
        for n, asked in enumerate(made.QAS)
        if asked["query"] == sample.question and tuple(dict.fromkeys(asked["outputs"])) == sample.answers
    )
    taken = {made.DOCS[n] for n in made.QAS[index]["context"]}

    def choose(population: Sequence[int]) -> Sequence[int]:
        near = {made.DOCS[n] for n in made.QAS[index].get("more_context", ())}
        known = {made.DOCS[n]: n for n in population}
        beside = taken if near & known.keys() else taken | near
        return [known[paragraph] for paragraph in ours if paragraph not in beside and paragraph in known]

    made.random = Draws(samples=[choose], orders=[fixed(ours)])  # type: ignore[attr-defined]
    return index, len(ours)


def questions(generators: Generators, name: str, sample: Sample, text: str, _: Data) -> Made:
    """Return what RULER makes of the paragraphs and their order."""
    made = generators.run(name)
    document, answers = made.generate_input_output(*paragraphs(made, sample, text))
    return document, tuple(dict.fromkeys(answers))


def stacked(folder: Path, data: Path) -> Callable[[str, Sample, str, Data], Made]:
    """Return what gives the paragraphs and their order to the generator of RULER-HQA."""
    with stand_ins("pandas", "transformers"):
        made = module(folder / MEMAGENT)
    with tempfile.TemporaryDirectory() as written:
        file = Path(written) / "hotpotqa.json"
        file.write_text(json.dumps(hotpotqa(data)), "utf-8")
        made.QAS, made.DOCS = made.read_hotpotqa(file)  # type: ignore[attr-defined]

    def make(name: str, sample: Sample, text: str, _: Data) -> Made:
        row = made.generate_input_output(*paragraphs(made, sample, text))
        return row["context"], row["reward_model"]["ground_truth"]

    return make


def stories(folder: Path, data: Path) -> Callable[[str, Sample, str, Data], Made]:
    """Return what reads bAbI and hides a story with BABILong's code, between the same pieces of a book."""
    with stand_ins("nltk", "torch", "torch.utils", "torch.utils.data"):
        sys.modules["torch.utils.data"].Dataset = object  # type: ignore[attr-defined]
        made = module(folder / BABILONG)
    with pd.option_context("future.infer_string", False):  # as when that code was written
        read = {n: made.TaskDataset(next((data / "babi").glob(f"qa{n}_*_train.txt"))) for n in range(1, 6)}

    def make(name: str, sample: Sample, text: str, ours: Data) -> Made:
        task = int(name[-1])
        kept = [n for n, story in enumerate(ours.babi(task)) if not for_training("".join(story.facts[:1]))]
        story = read[task][kept[sample.details["question"]]]
        pieces, positions, rest = [], [], text
        for fact in story["facts"]:
            piece, found, rest = rest.partition(fact)
            possible(bool(found), fact)
            pieces += [piece.strip()] if piece.strip() else []
            positions.append(len(pieces))
        pieces += [rest.strip()] if rest.strip() else []
        background = SimpleNamespace(get_sample=lambda _: [list(f" {piece}") for piece in pieces])
        hidden = made.NoiseInjectionDataset([story], background, Signs(), sample_size=len(text))
        hidden.gen = SimpleNamespace(choice=lambda where, number: np.array(positions))
        possible(sample.question.startswith(story["question"]), story["question"])
        gold = {fact.text for fact in sample.facts}
        possible(gold == set(story["references"]), story["references"])
        return "".join(hidden[0]["input_tokens"]).strip(), [story["answer"], *sample.answers[1:]]

    return make


class Signs:
    """A tokenizer whose tokens are characters."""

    def __call__(self, texts: Any, **_: Any) -> dict[str, Any]:
        """Return the characters of a text or of several."""
        return {"input_ids": list(texts) if isinstance(texts, str) else [list(text) for text in texts]}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Tasks, where the published code is that makes them, and what makes a sample with it from our choices."""

    names: Sequence[str]
    marker: str
    make: Callable[[str, Sample, str, Data], Made]
    sizes: Sequence[int] = SIZES


def compared(folders: Sequence[Path], made: Path, data: Path) -> Iterator[tuple[Path, Compared]]:
    """Yield what the checkouts can be compared with."""
    for folder in folders:
        if (folder / RULER).is_dir():
            generators = Generators(folder, made, data)
            makers = {
                needles: (*(f"niah_single_{n}" for n in (1, 2, 3)), *(f"niah_multikey_{n}" for n in (1, 2, 3))),
                chain: ("vt",),
                common: ("cwe",),
                frequent: ("fwe",),
                questions: ("qa_1", "qa_2"),
            }
            makers[needles] += ("niah_multivalue", "niah_multiquery")
            for maker, names in makers.items():
                yield folder, Compared(names=names, marker=RULER, make=partial(maker, generators))
        if (folder / MEMAGENT).is_file():
            make_stack = stacked(folder, data)
            yield folder, Compared(names=("ruler_hqa",), marker=MEMAGENT, make=make_stack, sizes=PARAGRAPHS)
        if (folder / BABILONG).is_file():
            names = tuple(f"babilong_qa{n}" for n in range(1, 6))
            yield folder, Compared(names=names, marker=BABILONG, make=stories(folder, data))


def documents(folders: Sequence[Path], data: Path, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the table, and digests of documents for the tests."""
    table: dict[str, Any] = {}
    golden: list[dict[str, Any]] = []
    logging.disable(logging.INFO)  # of the generators
    with tempfile.TemporaryDirectory() as written:
        ours = Data(_own_folder(data, Path(written)))
        for folder, those in compared(folders, Path(written) / "ruler", data):
            for name in those.names:
                row = {"source": f"{folder.name}/{those.marker}", "revision": revision(folder), "documents": 0}
                row |= {"disagreements": 0, "white space": 0}
                task = tasks.load(name, ours)
                for size in those.sizes:
                    for n in range(number):
                        sample = task.make(size, 0, n, words)
                        text = "".join(sample.document())
                        differs, theirs = _compare(name, those, sample, text, ours)
                        row["documents"] += 1
                        row["disagreements"] += differs
                        row["white space"] += not differs and theirs != text
                        if name in GOLDEN and n < 2 and not differs:
                            golden.append({"task": name, "length": size, "number": n, "digest": digest(theirs)})
                table[name] = row
    return table, golden


def _own_folder(data: Path, written: Path) -> Path:
    """Return a folder with the data sets that the published code has too: distractors are those of the questions."""
    folder = written / "data"
    (folder / "hotpotqa").mkdir(parents=True)
    for name in ("squad", "babi", "books", "paul_graham", "hotpotqa/dev.jsonl"):
        (folder / name).symlink_to((data / name).resolve())
    return folder


def _compare(name: str, those: Compared, sample: Sample, text: str, data: Data) -> tuple[bool, str]:
    try:
        with contextlib.redirect_stdout(None):
            document, answers = those.make(name, sample, text, data)
    except (Impossible, StopIteration) as error:
        print(f"{sample.id}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return True, ""
    differs = document.split() != text.split() or tuple(answers) != sample.answers
    if differs:
        pairs = zip(document.split(), text.split(), strict=False)
        at = next((n for n, (there, here) in enumerate(pairs) if there != here), 0)
        there, here = (" ".join(made.split()[max(at - 5, 0) : at + 10]) for made in (document, text))
        print(f"{sample.id}: {there!r}, {answers} there; {here!r}, {sample.answers} here", file=sys.stderr)
    return differs, document


def digest(text: str) -> str:
    """Return the SHA-256 of a text with single spaces for white space."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()

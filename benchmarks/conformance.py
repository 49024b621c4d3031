r"""Do the metrics give the scores that the published code gives, and the tasks its documents?

    python benchmarks/conformance.py --reference DIR DIR DIR DIR --data DATA --output docs/results/conformance.json

Each DIR is a checkout of one of the repositories NVIDIA/RULER, BytedTsinghua-SIA/MemAgent, THUDM/LongBench and
booydar/babilong. Their code is run on random and adversarial inputs, and the scores are compared with those of our
metric of that name: `disagreements` has to be 0. `right` is the share of the inputs that score above 0, `no score` the
number of those for which the published code has none (it skips an empty output, and stops with an error at some broken
boxes); ours has to be 0 there.

`prompts`: filled templates of MemAgent's evaluation and of its training, filled by their code and by
`PromptSet.from_reference`, have to be equal byte for byte.

`documents`, with a folder of data sets: see `conformance_documents.py`.

MemAgent's evaluation is run as a whole, in its configurations "recurrent" and "boxed", with outputs in place of a
model. Packages that the published code imports and does not need here are replaced by empty ones. With `--golden FILE`
some of the inputs are written with their scores, half of them above 0, for the tests.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import importlib
import io
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from conformance_documents import documents
from published_code import module, revision, stand_ins

from memagent_integrations.evaluation.official import babilong_golds
from memagent_integrations.evaluation.published import prompts_named
from memagent_integrations.evaluation.scoring import METRICS
from memagent_integrations.evaluation.tasks.babilong import LABELS
from memagent_integrations.prompts import PromptSet

GOLDEN = 60  # inputs of each scorer
PROMPTS = 1000
TEXT = (
    "the a an The AN Paris paris London New-York 42 3.14 0.5 .5 yes no noanswer None É été İstanbul ß U.S. O'Neill "
    "river big theatre another 東京 x² ½ A + -- ... ' ! 10% $5 5\\% \\frac{1}{2} \\dfrac{1}{2} \\tfrac12 { } {} {. "
    "\\left(1\\right) 90^\\circ 90^{\\circ} \\! \\\\ \\$ \\text{Ann} *bold* **Ann** Ann Lee Bill"
)
WORDS = TEXT.split()
GLUE = (" ", " ", " ", " ", "", "\n", "\t", "  ", "\u00a0", ". ", ", ")
PLAIN = ("{}", "{}", "{}.", "It is {}.", "({})", "**{}**", '"{}"', "{}\n", "*{}*", "{}..", "<b>{}</b>")
STATED = (
    *(
        "Therefore, the answer is {}.",
        "the answer is {}",
        "The answer is {}",
        "So the answer is: **{}**.",
        "the answer is",
    ),
    *("the answer is {}<｜end▁of▁sentence｜>", "the answer is the answer is {} ", "<think>the answer is {}"),
    *("*the* answer is {}", "{}</think>", "</think>{}", "<think>{}</think> the answer is 7", "<｜Assistant｜>{}"),
)
BOXED = (
    *(
        "\\boxed{{{}}}",
        "\\boxed{{{}",
        "\\boxed {}",
        "\\boxed {{{}}}",
        "\\BOXED{{{}}}",
        "\\fbox{{{}}}",
        "\\boxed{{}}",
        "\\boxed",
    ),
    *(
        "\\boxed\n{{{}}}",
        "\\boxed{{\\text{{{}}}}}",
        "$\\boxed{{{}}}$",
        "\\boxed {}$ and",
        "\\boxed}}{{{}}}",
        "\\boxed{{a}} {}",
    ),
    *("{}</think>", "</think>{}"),
)
LISTED = ("<context>{}", "{}<example>", "Question {}", "{} is in the kitchen", "the hallway. {}", "{}. Or the office.")
FRAMES = PLAIN + STATED + BOXED + LISTED
USUAL = {"memagent_sub_em": STATED, "memagent_boxed_sub_em": BOXED, "verl_boxed_em": BOXED, "babilong": LISTED}
SIGNS = "\\{}$%.! \n*<>/thebxdafrckinw'\"-_,^0é\u2028İ"
QUESTIONS = (
    *("Where is the {}?", "Where is {}?", "Where was the {} before the kitchen?", "What is north of the {}?"),
    "What did {} give to Fred?",
)
NAMES = "Mary John Bill football apple Sandra hallway office Bathroom".split()  # noqa: SIM905

Input = tuple[str, Sequence[str]]
Scores = list[float | None]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A metric of ours: the file by which the published code is found, and what runs that code on inputs."""

    metric: str
    marker: str
    scores: Callable[[Path, Sequence[Any]], Scores]


def phrase(dice: random.Random, most: int = 4) -> str:
    """Return some words with something between them."""
    return "".join(dice.choice(WORDS) + dice.choice(GLUE) for _ in range(dice.randint(1, most)))


def text(dice: random.Random, golds: Sequence[str], usual: Sequence[str] = PLAIN) -> str:
    """Return an answer that may hold a gold, a part of it or more than it, in frames, most often in a usual one."""
    if dice.random() < 0.1:
        return "".join(dice.choice(SIGNS) for _ in range(dice.randint(0, 40)))
    gold = dice.choice(golds)
    less, more = gold[dice.randrange(len(gold)) :], f"{gold} {phrase(dice)}"
    spelt = (gold.upper(), gold.replace(" ", ""), gold.replace("frac", "tfrac"), f"\\!{gold}\\%", f"the {gold}!")
    said = dice.choice((gold, gold, gold, less, more, phrase(dice), *spelt))
    for _ in range(dice.randint(0, 2)):
        said = dice.choice(FRAMES).format(said)
    if dice.random() < 0.7:
        said = dice.choice(usual).format(said)
    if dice.random() < 0.3:
        said = phrase(dice, 100 if dice.random() < 0.2 else 5) + said
    if dice.random() < 0.2:
        said += phrase(dice, 100 if dice.random() < 0.2 else 5)
    return said


def inputs(metric: str, number: int) -> Iterator[Input]:
    """Yield answers with golds."""
    dice = random.Random(metric)
    for _ in range(number):
        golds = [phrase(dice, 3).strip() or "x" for _ in range(dice.randint(1, 3))]
        yield text(dice, golds, USUAL.get(metric, PLAIN)), golds


def stories(metric: str, number: int) -> Iterator[tuple[str, Sequence[str], str, Sequence[str]]]:
    """Yield answers with golds for BABILong, and the question and labels that the golds were made from."""
    dice = random.Random(metric)
    for _ in range(number):
        labels = dice.choice(list(LABELS.values()))
        question = dice.choice(QUESTIONS).format(dice.choice(NAMES))
        target = dice.choice([label for label in labels if label.lower() not in question.lower()])
        others = dice.choices((*labels, "nowhere", *NAMES), k=dice.randint(0, 3))
        said = text(dice, [target, target, " ".join(others) or "x"], USUAL[metric])
        yield said, babilong_golds(target, question, labels), question, labels


def ruler(name: str) -> Callable[[Path, Sequence[Input]], Scores]:
    """Return what runs one of RULER's scorers, which give percents."""

    def scores(folder: Path, drawn: Sequence[Input]) -> Scores:
        theirs = getattr(module(folder / "scripts/eval/synthetic/constants.py"), name)
        return [theirs([answer], [golds]) / 100 for answer, golds in drawn]

    return scores


def longbench(folder: Path, drawn: Sequence[Input]) -> Scores:
    """Return LongBench's scores, by its own way from the F1 of each gold to the score of a sample, as percent."""
    with stand_ins("jieba", "fuzzywuzzy", "rouge", "difflib", "numpy"):
        theirs = module(folder / "LongBench/metrics.py").qa_f1_score
    return [max(0.0, *(theirs(answer, gold) for gold in golds)) for answer, golds in drawn]


def babilong(folder: Path, drawn: Sequence[tuple[str, Sequence[str], str, Sequence[str]]]) -> Scores:
    """Return BABILong's scores."""
    theirs = module(folder / "babilong/metrics.py").compare_answers
    return [float(theirs(golds[0], answer, question, labels)) for answer, golds, question, labels in drawn]


def reward(folder: Path, drawn: Sequence[Input]) -> Scores:
    """Return the rewards of MemAgent's training."""
    theirs = module(folder / "verl/utils/reward_score/hotpotqa.py").compute_score
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the errors that it catches
        return [theirs(answer, golds) for answer, golds in drawn]


def evaluation(api: str) -> Callable[[Path, Sequence[Input]], Scores]:
    """Return what runs MemAgent's evaluation of RULER-HQA in one of its configurations."""

    async def output(item: dict[str, Any], *_: Any, **__: Any) -> str:
        return str(item["output"])

    async def one_by_one(calls: Sequence[Any], _: int = 1) -> list[str]:
        return [await call for call in calls]

    def scores(folder: Path, drawn: Sequence[Input]) -> Scores:
        tools = folder / "taskutils/memory_eval"
        names = ("datasets", "transformers", "tiktoken", "torch", "torch.multiprocessing", "uvloop", "tqdm")
        with stand_ins(*names, f"utils.{api}", "utils.aio"), patch.object(sys, "path", [str(tools), *sys.path]):
            sys.modules[f"utils.{api}"].async_query_llm = output  # type: ignore[attr-defined]
            sys.modules["utils.aio"].async_main = one_by_one  # type: ignore[attr-defined]
            sys.modules["utils.aio"].close_async_client = lambda: asyncio.sleep(0)  # type: ignore[attr-defined]
            sys.modules["uvloop"].run = asyncio.run  # type: ignore[attr-defined]
            utils = importlib.import_module("utils")
            broken = {n for n, (answer, _) in enumerate(drawn) if api == "boxed" and stops(utils, answer)}
            items = [
                {"_id": n, "output": answer, "answers": list(golds), "context": ""}
                for n, (answer, golds) in enumerate(drawn)
                if n not in broken
            ]
            with tempfile.TemporaryDirectory() as made, contextlib.redirect_stdout(io.StringIO()):
                settings = SimpleNamespace(model="any", tokenizer="any", api=api, n_proc=1, force=True, length=0)
                module(tools / "ruler_hqa.py").get_pred(items, settings, f"{made}/out.jsonl")
                rows = [json.loads(line) for line in Path(made, "out.jsonl").read_text("utf-8").split("\n") if line]
        by_number = {row["_id"]: float(row["judge_sub_em"]) for row in rows}
        return [by_number.get(n) for n in range(len(drawn))]

    return scores


def filled(folder: Path) -> Iterator[tuple[str, tuple[str, ...], Callable[[str, dict[str, str]], str]]]:
    """Yield files of MemAgent with prompts, the names of the templates, and what fills them as the code there does."""
    path = "taskutils/memory_eval/utils/recurrent.py"
    tools = folder / "taskutils/memory_eval"
    quiet = contextlib.redirect_stdout(io.StringIO())
    with stand_ins("utils.aio"), patch.object(sys, "path", [str(tools), *sys.path]), quiet:
        asked = importlib.import_module("utils.recurrent")
    yield path, ("TEMPLATE", "TEMPLATE_FINAL"), lambda name, parts: str(getattr(asked, name).format(**parts))

    path = "recurrent/impls/memory.py"
    assigned = (node for node in ast.parse((folder / path).read_text("utf-8")).body if isinstance(node, ast.Assign))
    trained = {ast.unparse(node.targets[0]): ast.literal_eval(node.value) for node in assigned if is_text(node.value)}
    with stand_ins("torch", "numpy", "transformers", "tensordict", "verl"):
        torch: Any = sys.modules["torch"]
        torch.tensor, torch.cat = lambda signs, **_: list(signs), lambda parts, **_: list(chain.from_iterable(parts))
        template = module(folder / "recurrent/utils.py").TokenTemplate

        def fill(name: str, parts: dict[str, str]) -> str:
            made = template(trained[name], Signs())
            return "".join(made.format(**{part: list(text) for part, text in parts.items()}))

        yield path, ("TEMPLATE", "TEMPLATE_FINAL_BOXED"), fill


def is_text(node: ast.expr) -> bool:
    """Return whether the expression is a text as it stands."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Signs:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, **_: Any) -> list[str]:
        """Return the characters."""
        return list(text)


def prompts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return how many filled prompts differ, for each file."""
    dice = random.Random("prompts")
    table: dict[str, dict[str, Any]] = {}
    for path, (update, answer), fill in filled(folder):
        ours, wrong = PromptSet.from_reference(folder / path), 0
        for _ in range(PROMPTS):
            question, memory, section = (phrase(dice, 20).replace("<", "") for _ in range(3))
            pairs = (
                (
                    fill(update, {"prompt": question, "memory": memory, "chunk": section}),
                    ours.update_messages(question=question, memory=memory, section=section, memory_tokens=1024),
                ),
                (
                    fill(answer, {"prompt": question, "memory": memory}),
                    ours.answer_messages(question=question, memory=memory),
                ),
            )
            wrong += sum([message.content for message in messages] != [text] for text, messages in pairs)
        table[path] = {"templates": prompts_named(ours), "inputs": 2 * PROMPTS, "disagreements": wrong}
    return table


def stops(utils: ModuleType, answer: str) -> bool:
    """Return whether the evaluation of MemAgent would end with an error at this output."""
    said, whole = utils.extract_solution(answer.strip())
    try:
        utils.extract_boxed_answer(said or whole)
    except AssertionError:
        return True
    return False


SCORERS = (
    Scorer(metric="string_match_all", marker="scripts/eval/synthetic/constants.py", scores=ruler("string_match_all")),
    Scorer(metric="string_match_part", marker="scripts/eval/synthetic/constants.py", scores=ruler("string_match_part")),
    Scorer(metric="memagent_sub_em", marker="taskutils/memory_eval/ruler_hqa.py", scores=evaluation("recurrent")),
    Scorer(metric="memagent_boxed_sub_em", marker="taskutils/memory_eval/ruler_hqa.py", scores=evaluation("boxed")),
    Scorer(metric="verl_boxed_em", marker="verl/utils/reward_score/hotpotqa.py", scores=reward),
    Scorer(metric="longbench_f1", marker="LongBench/metrics.py", scores=longbench),
    Scorer(metric="babilong", marker="babilong/metrics.py", scores=babilong),
)


def compare(scorer: Scorer, folder: Path, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row of the table for a scorer, and inputs with their scores for the tests."""
    drawn: list[Any] = list((stories if scorer.metric == "babilong" else inputs)(scorer.metric, number))
    theirs = scorer.scores(folder, drawn)
    ours = [METRICS[scorer.metric](one[0], one[1]) for one in drawn]
    # RULER rounds its percents to two digits
    wrong = [n for n in range(number) if abs(ours[n] - (theirs[n] or 0.0)) > 5.1e-5]
    for n in wrong[:5]:
        print(f"{scorer.metric}: {drawn[n]!r}: {theirs[n]} there, {ours[n]} here", file=sys.stderr)
    row = {
        "source": f"{folder.name}/{scorer.marker}",
        "revision": revision(folder),
        "inputs": number,
        "disagreements": len(wrong),
        "right": round(sum(map(bool, theirs)) / number, 3),
        "no score": theirs.count(None),
    }
    short = [n for n in range(number) if len(drawn[n][0]) < 400]
    some = [n for n in short if theirs[n]][: GOLDEN // 2] + [n for n in short if not theirs[n]][: GOLDEN // 2]
    golden = [
        {"metric": scorer.metric, "answer": drawn[n][0], "golds": list(drawn[n][1]), "score": theirs[n]} for n in some
    ]
    return row, golden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, nargs="+", required=True, metavar="DIR", help="checkouts")
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="for each scorer [100,000]")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the data sets of the tasks, to compare documents")
    parser.add_argument("--documents", type=int, default=25, metavar="N", help="of each task and length [25]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--golden", type=Path, metavar="FILE", help="write inputs with their scores here")
    parser.add_argument("--golden-documents", type=Path, metavar="FILE", help="write digests of documents here")
    args = parser.parse_args()
    table, golden = {}, []
    for scorer in SCORERS:
        folder = next((folder for folder in args.reference if (folder / scorer.marker).is_file()), None)
        if folder is None:
            print(f"{scorer.metric}: no folder has {scorer.marker}", file=sys.stderr)
            continue
        table[scorer.metric], rows = compare(scorer, folder, args.inputs)
        golden += rows
    agent = next((folder for folder in args.reference if (folder / "recurrent/impls/memory.py").is_file()), None)
    templates = prompts(agent) if agent else {}
    made, digests = documents(args.reference, args.data, args.documents) if args.data else ({}, [])
    command = f"python benchmarks/conformance.py --reference DIR... --inputs {args.inputs}"
    if args.data:
        command += f" --data DIR --documents {args.documents}"
    written = json.dumps({"command": command, "scorers": table, "prompts": templates, "documents": made}, indent=1)
    print(written)
    if args.output:
        args.output.write_text(written + "\n", encoding="utf-8")
    if args.golden:
        args.golden.write_text("".join(json.dumps(row) + "\n" for row in golden), encoding="utf-8")
    if args.golden_documents:
        args.golden_documents.write_text("".join(json.dumps(row) + "\n" for row in digests), encoding="utf-8")
    sys.exit(any(row["disagreements"] for row in (*table.values(), *templates.values(), *made.values())))


if __name__ == "__main__":
    main()

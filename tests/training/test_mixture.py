"""What a training draws: the same at the same position, every question before one repeats, none of evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.data import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from memagent_integrations.backends.scripted import ScriptedBackend
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation import data as sets
from memagent_integrations.evaluation import tasks
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.samples import Sample
from memagent_integrations.training.mixture import SEEDS, Mixture, Part

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MADE = (Part(name="vt", lengths=(512, 1024), weight=2.0), Part(name="cwe", lengths=(1024,)))

count = ScriptedBackend([]).count


@cache
def local() -> Data:
    if not DATA.is_dir():
        pytest.skip("shared/data is not here")
    return Data(DATA)


def text(sample: Sample) -> str:
    return "".join(sample.document())


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(number: int) -> list[dict[str, object]]:
    return [{"question": f"Q{n}?", "answers": [f"A{n}"], "context": f"It is A{n}."} for n in range(number)]


# the file


def test_the_recipe_is_a_mixture() -> None:
    mixture = Mixture.load(RECIPES / "small_mixture.toml")
    assert (mixture.curriculum, [part.name for part in mixture.parts]) == (
        "growing",
        ["niah_single_1", "vt", "hqa_train"],
    )
    assert mixture.parts[0] == Part(name="niah_single_1", lengths=(512, 1024, 2048), weight=2.0)
    data = local()
    names = [mixture.draw(position, seed=0, share=1, data=data, count=count).task.name for position in range(40)]
    assert Counter(names) == {"niah_single_1": 20, "vt": 10, "hqa_train": 10}


def test_the_mixture_of_the_small_model_can_be_drawn_from_the_beginning_to_the_end() -> None:
    mixture, data = Mixture.load(RECIPES / "smollm2" / "mixture.toml"), local()
    names = {part.name for part in mixture.parts}
    assert mixture.curriculum == "growing"
    assert {*tasks.prose.TRAINING, *tasks.needles.TRAINING, "vt_train", "squad_train", "hqa_train"} <= names
    assert names <= set(tasks.TRAINING)
    seen = Counter[str]()
    for share in (0.0, 0.3, 0.6, 1.0):
        for position in range(round(1000 * share), round(1000 * share) + 300, 3):
            drawn = mixture.draw(position, seed=4, share=share, data=data, count=count)
            seen[drawn.task.name] += 1
            assert "grass is green" not in next(drawn.sample.document())
    assert set(seen) == names
    assert 0.3 < sum(times for name, times in seen.items() if name.startswith("prose")) / seen.total() < 0.6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[[task]]\nname = "vt"\nlenghts = [512]', "no key 'lenghts' in task 1"),
        ('curiculum = "all"\n[[task]]\nname = "vt"', "no key 'curiculum'"),
        ('curriculum = "slow"\n[[task]]\nname = "vt"', "curriculum: Input should be 'all' or 'growing'"),
        ('[[task]]\nname = "vt"\n[[task]]\nweight = 2', "task 2 name: Field required"),
        ('[[task]]\nname = "vt"\nlengths = [512, 1.5]', "task 1 lengths 2: Input should be a valid integer"),
        ('[[task]]\nname = "vt"\nlengths = [true]', "task 1 lengths 1: Input should be a valid integer"),
        ('[[task]]\nname = "vt"\nlengths = [0]', "lengths has to be a whole number of at least 1, not 0"),
        ('[[task]]\nname = "vt"\nweight = 0', "the weight of vt has to be more than 0"),
        ('[[task]]\nname = "vt"\nweight = inf', "weight has to be a number of at least 0"),
        ('[[task]]\nname = "vt"\nweight = "2"', "task 1 weight: Input should be a valid number"),
        ('[[task]]\nname = "vt"\n[[task]]\nname = "vt"', "the task vt stands in the mixture twice"),
        ("", "task: Field required"),
        ("task = []", "at least one task"),
        ("[[task", "is no mixture: "),
        ("\ud83d", "is no mixture: "),
    ],
)
def test_a_file_that_is_no_mixture_is_named_with_its_key(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mixture.toml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError) as caught:
        Mixture.load(path)
    assert str(caught.value).startswith(f"{path} is no mixture: ")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path, "nul\0.toml"):
        with pytest.raises(UsageError, match="cannot read"):
            Mixture.load(path)


def test_a_mixture_made_in_python_is_checked_too() -> None:
    with pytest.raises(UsageError, match="curriculum has to be all or growing"):
        Mixture(parts=MADE, curriculum="slow")  # type: ignore[arg-type]


# the tasks


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(name="niah", lengths=(512,)), "unknown task 'niah'"),
        (Part(name="vt"), r"vt needs lengths, in tokens"),
        (Part(name="hqa_train"), r"hqa_train needs lengths, in paragraphs"),
        (Part(name="ruler_hqa", lengths=(4,)), "the questions of ruler_hqa are for evaluation; train on hqa_train"),
        (Part(name="qa_1", lengths=(4096,)), "for evaluation; train on squad_train"),
        (Part(name="babilong_qa3", lengths=(4096,)), "for evaluation; train on babilong_train_qa3"),
        (Part(name="prose_hops", lengths=(4096,)), "for evaluation; train on prose_train_hops"),
    ],
)
def test_a_task_that_cannot_be_trained_on(part: Part, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mixture(parts=(part,)).tasks(local() if part.name in tasks.NAMES else Data())


def test_a_file_has_the_lengths_that_it_has(tmp_path: Path) -> None:
    name = f"jsonl:{write(tmp_path / 'own.jsonl', rows(3))}"
    with pytest.raises(UsageError, match="leave out its lengths"):
        Mixture(parts=(Part(name=name, lengths=(3,)),)).tasks(Data())
    drawn = Mixture(parts=(Part(name=name),)).draw(0, seed=0, share=0, data=Data(), count=count)
    assert (drawn.length, drawn.task.name, text(drawn.sample)) == (0, name, f"It is {drawn.sample.answers[0]}.")


def test_a_task_is_loaded_once_and_kept() -> None:
    mixture, data = Mixture(parts=MADE), Data()
    assert [id(task) for task in mixture.tasks(data)] == [id(task) for task in mixture.tasks(data)]
    assert mixture.draw(0, seed=0, share=1, data=data, count=count).task in mixture.tasks(data)


# drawing


def test_a_position_is_a_question() -> None:
    mixture, data = Mixture(parts=MADE), Data()

    def drawn(position: int, seed: int = 0) -> tuple[str, str]:
        question = Mixture(parts=MADE).draw(position, seed=seed, share=1, data=data, count=count)
        return question.sample.id, text(question.sample)

    assert drawn(7) == drawn(7)
    assert len({drawn(position) for position in range(30)}) == len({drawn(position)[1] for position in range(30)}) == 30
    assert drawn(7, seed=1) != drawn(7)
    for position, seed, share in ((-1, 0, 0.5), (True, 0, 0.5), (0, -1, 0.5), (0, 0, 1.5), (0, 0, -0.1)):
        with pytest.raises(UsageError, match="has to be"):
            mixture.draw(position, seed=seed, share=share, data=data, count=count)


SCRIPT = f"""
from hashlib import sha256
from memagent_integrations.backends.scripted import ScriptedBackend
from memagent_integrations.evaluation.data import Data
from memagent_integrations.training.mixture import Mixture, Part

mixture = Mixture(parts={MADE!r})
for position in range(8):
    drawn = mixture.draw(position, seed=3, share=1, data=Data(), count=ScriptedBackend([]).count)
    print(drawn.sample.id, sha256("".join(drawn.sample.document()).encode()).hexdigest())
"""


@pytest.mark.heavy
def test_another_process_draws_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "5"}  # strings have other hashes there than here
    other = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True)
    exec(SCRIPT, {})
    here = capsys.readouterr().out
    assert other.stdout.decode().splitlines() == here.splitlines()
    assert here.count("\n") == 8


def test_a_finite_task_is_used_up_before_a_question_comes_again(tmp_path: Path) -> None:
    one, other = (f"jsonl:{write(tmp_path / f'{size}.jsonl', rows(size))}" for size in (10, 7))
    mixture, data = Mixture(parts=(Part(name=one, weight=0.7), Part(name=other, weight=0.3))), Data()
    questions_of: dict[str, list[str]] = {one: [], other: []}
    for position in range(100):
        drawn = mixture.draw(position, seed=5, share=0, data=data, count=count)
        questions_of[drawn.task.name].append(drawn.sample.question)
    assert [len(questions) for questions in questions_of.values()] == [70, 30]
    epochs = [questions_of[one][start : start + 10] for start in range(0, 70, 10)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7, "each epoch has an order of its own"
    assert all(len(set(questions_of[other][start : start + 7])) == 7 for start in range(0, 28, 7))
    assert [mixture.used_up(position, seed=5, data=data) for position in (0, 10, 100)] == [False, False, True]
    endless = Mixture(parts=(Part(name=one), MADE[0]))
    assert not endless.used_up(10_000, seed=5, data=data)


@settings(deadline=None, max_examples=50)
@given(
    weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=5),
    seed=st.integers(0, 99),
    start=st.integers(0, 20_000),
)
def test_the_turns_of_a_task_are_its_numbers_in_order(weights: list[float], seed: int, start: int) -> None:
    names = ("vt", "cwe", "fwe", "niah_single_1", "niah_multikey_2")
    mixture, data = (
        Mixture(
            parts=tuple(Part(name=name, lengths=(512,), weight=w) for name, w in zip(names, weights, strict=False))
        ),
        Data(),
    )
    before = dict.fromkeys(names[: len(weights)], -1)
    for position in range(start, start + 60):
        turn = mixture.slot(position, seed=seed, data=data)
        assert before[turn.task.name] in (-1, turn.number - 1)
        before[turn.task.name] = turn.number


def test_weights_are_kept_to_one_in_five_thousand() -> None:
    data = Data()
    for weights in ((2.0, 1.0), (1.0, 1.0, 1.0), (0.7, 0.2, 0.1), (1.0, 0.618)):
        mixture = Mixture(
            parts=tuple(
                Part(name=name, lengths=(512,), weight=w)
                for name, w in zip(("vt", "cwe", "fwe"), weights, strict=False)
            )
        )
        drawn = Counter(mixture.slot(position, seed=1, data=data).task.name for position in range(5040))
        for part in mixture.parts:
            assert drawn[part.name] == pytest.approx(5040 * part.weight / sum(weights), abs=1)


def test_lengths_grow_with_the_share_of_the_run() -> None:
    parts = (Part(name="vt", lengths=(512, 1024, 2048, 4096)),)
    data = Data()

    def lengths(curriculum: str, share: float) -> set[int]:
        mixture = Mixture(parts=parts, curriculum=curriculum)  # type: ignore[arg-type]
        return {mixture.draw(position, seed=0, share=share, data=data, count=count).length for position in range(40)}

    assert lengths("growing", 0) == lengths("growing", 0.24) == {512}
    assert lengths("growing", 0.25) == {512, 1024}
    assert lengths("growing", 0.5) == {512, 1024, 2048}
    assert lengths("growing", 0.75) == lengths("growing", 1) == lengths("all", 0) == {512, 1024, 2048, 4096}


# several questions about a document

SHARED = (
    Part(name="vt", lengths=(512, 1024, 2048, 4096), weight=1.0),
    Part(name="prose_train_latest", lengths=(1024, 2048, 4096), weight=2.0),
    Part(name="needles_train_multivalue", lengths=(1024, 2048, 4096), weight=0.5),
)


def test_questions_about_a_document_are_drawn_in_a_row_and_the_document_is_the_same() -> None:
    mixture, data = Mixture(parts=SHARED, curriculum="growing"), local()
    drawn = [mixture.draw(position, seed=3, share=1, data=data, count=count) for position in range(120)]
    position, documents, lengths = 0, [], Counter[int]()
    while position < 100:
        task = drawn[position].task
        turn = drawn[position : position + task.questions]
        assert {question.task.name for question in turn} == {task.name}
        assert len({text(question.sample) for question in turn}) == len({question.length for question in turn}) == 1
        assert len({question.sample.question for question in turn}) == task.questions
        documents.append(text(drawn[position].sample))
        lengths[drawn[position].length] += 1
        position += task.questions
    assert len(set(documents)) == len(documents)
    assert set(lengths) == {512, 1024, 2048, 4096}


def test_a_weight_is_the_share_of_the_questions_not_of_the_documents() -> None:
    mixture, data = Mixture(parts=SHARED), local()
    drawn = Counter(mixture.slot(position, seed=1, data=data).task.name for position in range(5600))
    total = sum(part.weight for part in SHARED)
    for part in SHARED:
        assert drawn[part.name] == pytest.approx(5600 * part.weight / total, rel=0.02)
    turns = [mixture.slot(position, seed=1, data=data) for position in range(40)]
    for one, other in pairwise(turns):
        if one.task is other.task:
            assert other.number == one.number + 1


# apart from evaluation


def test_seeds_of_training_are_none_of_evaluation() -> None:
    for position in range(100):
        drawn = Mixture(parts=MADE).draw(position, seed=position % 7, share=1, data=Data(), count=count)
        seed = int(drawn.sample.id.split("/")[2])
        assert SEEDS <= seed < 2 * SEEDS


@pytest.mark.parametrize("name", ["qa1", "qa4"])
def test_no_story_is_told_in_training_and_in_evaluation(name: str) -> None:
    data = local()

    def stories(task: str) -> set[str]:
        loaded = tasks.load(task, data)
        assert loaded.size
        return {loaded.make(1024, 0, number, count).oracle for number in range(loaded.size)}

    trained, evaluated = stories(f"babilong_train_{name}"), stories(f"babilong_{name}")
    assert not trained & evaluated
    assert len(trained) > 100
    assert len(evaluated) > 400


def test_no_question_is_asked_in_training_and_in_evaluation() -> None:
    data = local()
    trained, evaluated = (
        {q.question for q in group}
        for group in ((*data.hotpotqa_train, *data.squad_train, *data.musique_train), data.hotpotqa)
    )
    evaluated |= {q.question for q in data.squad}
    assert not trained & evaluated
    assert (len(data.hotpotqa_train), len(data.squad_train), len(data.musique_train)) == (200, 202, 100)
    for names, questions in (
        (("hqa_train", "squad_train", "musique_train"), trained),
        (("ruler_hqa", "qa_1", "qa_2"), evaluated),
    ):
        for name in names:
            task = tasks.load(name, data)
            assert {
                task.make(1000 if task.unit == "tokens" else 8, 0, number, count).question for number in range(20)
            } <= questions


def test_articles_for_training_are_never_shown_in_evaluation() -> None:
    data = local()
    trained, evaluated = (
        {p.text for q in group for p in (*q.gold, *q.near)} for group in (data.squad_train, data.squad)
    )
    assert not trained & evaluated
    assert len(trained) > 50
    assert len(evaluated) > 200


# rows of training sets


def musique(**changed: object) -> dict[str, object]:
    own = [{"title": t, "paragraph_text": f"{t} is here.", "is_supporting": t in "AB"} for t in "ABCC"]
    return {
        "id": "m1",
        "question": "Where?",
        "answer": "here",
        "answer_aliases": ["there", "here"],
        "paragraphs": own,
    } | changed


def test_musique_has_its_aliases_and_supporting_paragraphs(tmp_path: Path) -> None:
    write(tmp_path / "musique/train_small.jsonl", [musique(), musique(id="m2", answer_aliases=[])])
    first, second = Data(tmp_path).musique_train
    assert (first.answers, second.answers) == (("here", "there"), ("here",))
    assert [p.title for p in first.gold] == ["A", "B"]
    assert [p.title for p in first.near] == ["C", "C"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"paragraphs": ["text"]}, "has to be a list of objects"),
        ({"paragraphs": []}, "none of the paragraphs is supporting"),
        ({"paragraphs": [{"title": "A", "is_supporting": True}]}, "'paragraph_text'"),
        ({"answer_aliases": [7]}, "'answer_aliases'"),
        ({"answer": ""}, "'answer'"),
    ],
)
def test_a_broken_row_of_musique_is_named(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    write(tmp_path / "musique/train.jsonl", [musique(), musique(**changed)])
    with pytest.raises(UsageError, match=rf"train\.jsonl, line 2: .*{message}"):
        _ = Data(tmp_path).musique_train


def test_training_sets_of_the_hub_are_its_training_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, str]] = []

    def hub(repository: str, split: str, config: str | None = None) -> list[dict[str, object]]:
        requests.append((repository, split))
        if repository == "dgslibisey/MuSiQue":
            return [musique()]
        if repository == "rajpurkar/squad_v2":
            return [{"id": "s", "title": "T", "context": "C", "question": "Q?", "answers": {"text": ["A"]}}]
        context = {"title": ["A", "B"], "sentences": [["A is here."], ["B too."]]}
        return [
            {
                "id": "h",
                "question": "Q?",
                "answer": "A",
                "supporting_facts": {"title": ["A"], "sent_id": [0]},
                "context": context,
            }
        ]

    monkeypatch.setattr(sets, "hub", hub)
    data = Data()
    assert [len(data.hotpotqa_train), len(data.squad_train), len(data.musique_train)] == [1, 1, 1]
    assert requests == [
        ("hotpotqa/hotpot_qa", "train"),
        ("rajpurkar/squad_v2", "train"),
        ("dgslibisey/MuSiQue", "train"),
    ]

from __future__ import annotations

import math
import random
import subprocess
import sys
import time

import pytest

from memagent_integrations import UsageError
from memagent_integrations.evaluation import scoring
from memagent_integrations.evaluation.scoring import (
    METRICS,
    abstention,
    boxed_em,
    em,
    f1,
    normalise,
    qa_f1,
    string_match_all,
    string_match_part,
    sub_em,
)

WORDS = "the a an Paris paris, London. New-York 42 3.14 yes no noanswer É été U.S. O'Neill river big".split()  # noqa: SIM905


def pairs(number: int = 200) -> list[tuple[str, list[str]]]:
    draw = random.Random("pairs")
    texts = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 5))) for _ in range(number * 4)]
    made = []
    for n in range(number):
        golds = texts[4 * n + 1 : 4 * n + 1 + draw.randint(1, 3)]
        made.append((draw.choice([texts[4 * n], golds[0], f"{texts[4 * n]} {golds[-1].upper()}"]), golds))
    return made


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, brown\tFOX!", "quick brown fox"),
        ("an apple a day", "apple day"),
        ("theatre, another", "theatre another"),
        ("U.S.A.", "usa"),
        ("Zoë’s “É”", "zoë’s “é”"),
        ("A", "a"),
        (" + ", "+"),
        ("", ""),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("metric", "answer", "golds", "value"),
    [
        (em, "The Eiffel Tower.", ["eiffel tower"], 1.0),
        (em, "the tower", ["eiffel tower", "tower"], 1.0),
        (em, "eiffel", ["eiffel tower"], 0.0),
        (em, "", ["x"], 0.0),
        (em, "", ["the"], 0.0),
        (em, "B", ["A"], 0.0),
        (em, "(a)", ["A"], 0.0),
        (em, "a", ["A"], 1.0),
        (f1, "the big red dog", ["a red dog ran"], 2 / 3),  # 2 of 3 words said, 2 of 3 wanted
        (f1, "yes it is", ["Yes."], 0.5),  # precision 1/3, recall 1
        (f1, "", ["x"], 0.0),
        (qa_f1, "no", ["yes", "the no"], 1.0),
        (qa_f1, "no way", ["yes", "no way out"], 0.8),
        (qa_f1, "the big red dog", ["a red dog ran"], 2 / 3),  # 2 of 3 words said, 2 of 3 wanted
        (qa_f1, "red", ["blue", "red hat"], 2 / 3),  # the better gold: precision 1, recall 1/2
        (qa_f1, "to be or not to be", ["to be"], 0.5),  # precision 2/6, recall 2/2
        (qa_f1, "yes", ["yes it is"], 0.0),  # HotpotQA's rule for closed answers
        (qa_f1, "yes it is", ["Yes."], 0.0),
        (qa_f1, "Yes!", ["yes"], 1.0),
        (qa_f1, "", ["x"], 0.0),
        (sub_em, "It was in Paris, France.", ["the Paris"], 1.0),
        (sub_em, "It was in Rome", ["Paris", "rome"], 1.0),
        (sub_em, "Par is", ["Paris"], 0.0),
        (sub_em, "", ["x"], 0.0),
        (sub_em, "anything", ["+"], 0.0),
        (string_match_all, "7, 12 and 30", ["7", "12", "44", "30"], 0.75),
        (string_match_all, "VAR abc", ["ABC"], 1.0),
        (string_match_all, "", ["x", "y"], 0.0),
        (string_match_part, "only 12", ["7", "12"], 1.0),
        (string_match_part, "none", ["7", "12"], 0.0),
        (boxed_em, r"So \boxed{1} or rather \boxed{The Seine.}", ["seine"], 1.0),
        (boxed_em, r"\boxed{\text{x}} y", [r"\text{x}"], 1.0),
        (boxed_em, r"\boxed{seine", ["seine"], 0.0),
        (boxed_em, "seine", ["seine"], 0.0),
        (boxed_em, r"\boxed{}", ["seine"], 0.0),
        (boxed_em, r"\boxed{rhine}", ["seine", "rhine"], 1.0),
        (abstention, "The text does not say.", ["The text does not say.", "Rome"], 1.0),
        (abstention, "It is not mentioned where she was born.", ["Not told", "Rome"], 1.0),
        (abstention, "The text doesn’t explicitly state it, only that Ann lives in Oslo.", ["Not told", "Rome"], 1.0),
        (abstention, "There is no information about this.", ["Not told", "Rome"], 1.0),
        (abstention, "Unknown", ["Not told"], 1.0),
        (abstention, "The memory does not hold the answer.", ["Not told"], 1.0),
        (abstention, "not told", ["Not told", "Rome"], 1.0),
        (abstention, "pas dit", ["Pas dit.", "Rome"], 1.0),
        (abstention, "The text does not say, but perhaps in Rome.", ["Not told", "Rome"], 0.0),
        (abstention, "The text does not say; Romeo might know.", ["Not told", "Rome"], 1.0),
        (abstention, "Rome", ["Not told", "Rome"], 0.0),
        (abstention, "Oslo", ["Not told", "Rome"], 0.0),
        (abstention, "She was born in Oslo, not far from the sea.", ["Not told", "Rome"], 0.0),
        (abstention, "No, a notable clown said", ["Not told", "Rome"], 0.0),
        (abstention, "", ["Not told"], 0.0),
    ],
)
def test_values_worked_out_by_hand(metric: scoring.Metric, answer: str, golds: list[str], value: float) -> None:
    assert metric(answer, golds) == pytest.approx(value)


def test_the_metrics_have_names() -> None:
    assert list(METRICS) == [
        *("em", "f1", "qa_f1", "sub_em", "string_match_all", "string_match_part", "boxed_em", "abstention"),
        *("memagent_sub_em", "memagent_boxed_sub_em", "verl_boxed_em", "babilong", "longbench_f1"),
    ]
    assert METRICS["em"] is em


@pytest.mark.parametrize("name", METRICS)
def test_hostile_input(name: str) -> None:
    metric = METRICS[name]
    for golds in ([], (), [""], ["x", " "], "x"):
        with pytest.raises(UsageError, match="gold"):
            metric("an answer", golds)
        with pytest.raises(UsageError, match="gold"):
            metric(r"\boxed{x}", golds)
    for answer in ("", " ", "\0", "\ud800", "東京", "İ", "e\u0301", "🧭", "{{{", r"\boxed{" * 50):
        assert 0 <= metric(answer, ["東京", "é", "\ud800"]) <= 1
    several = {"sub_em", "string_match_part", "boxed_em", "verl_boxed_em"}
    first = {"string_match_all", "memagent_boxed_sub_em", "babilong"}
    assert metric(r"\boxed{東京}", ["京都", "東京"] if name in several else ["東京"]) == (name in several | first)


@pytest.mark.parametrize("name", METRICS)
def test_a_megabyte_is_scored_in_a_moment(name: str) -> None:
    for part in ("the answer is 42. ", "{", r"\boxed{", "}", "a", " \n", "é", "not ", "not a b ", "no"):
        answer = part * (1_000_000 // len(part))
        begun = time.perf_counter()
        METRICS[name](answer, ["no such thing", "nor this"])
        assert time.perf_counter() - begun < 5


def test_hotpotqa_scores_as_its_own_script_does() -> None:
    """The evaluation script of HotpotQA comes with llama-index-core; it scores one gold."""
    theirs = pytest.importorskip("llama_index.core.evaluation.benchmarks.hotpotqa")
    for answer, golds in pairs():
        # where it leaves nothing of a text, ours differs on purpose
        if all(theirs.normalize_answer(text) for text in (answer, *golds)):
            assert em(answer, golds) == max(theirs.exact_match_score(answer, gold) for gold in golds)
            assert qa_f1(answer, golds) == pytest.approx(max(theirs.f1_score(answer, gold)[0] for gold in golds))
            if not {"yes", "no", "noanswer"} & {normalise(text) for text in (answer, *golds)}:
                assert f1(answer, golds) == qa_f1(answer, golds)


@pytest.mark.heavy
def test_ruler_scores_as_lm_eval_does() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    for answer, golds in pairs():
        assert string_match_all(answer, golds) == pytest.approx(theirs.string_match_all([answer], [golds]))
        part = theirs.string_match_part([answer], [golds])
        if len(golds) == 1:
            assert string_match_part(answer, golds) == part
        # of several golds, it gives their share, where RULER gives 1
        assert string_match_part(answer, golds) == float(part > 0)


def test_em_agrees_with_lm_eval_where_there_are_no_articles() -> None:
    theirs = pytest.importorskip("lm_eval.api.metrics").exact_match_hf_evaluate
    for answer, golds in pairs():
        plain, gold = (
            " ".join(word for word in text.split() if word not in ("the", "a", "an")) or "x"
            for text in (answer.lower(), golds[0].lower())
        )
        assert em(plain, [gold]) == theirs([plain], [gold], ignore_case=True, ignore_punctuation=True)["exact_match"]


@pytest.mark.heavy
def test_scoring_is_light() -> None:
    """A trainer takes its reward from here."""
    script = (
        "import sys\n"
        "for name in ('scipy', 'numpy', 'torch', 'lm_eval', 'datasets', 'matplotlib'): sys.modules[name] = None\n"
        "from memagent_integrations.evaluation import diagnostics, prompt_split, scoring\n"
        "print(scoring.em('a', ['a']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr


def test_a_mean_and_its_interval() -> None:
    stats = pytest.importorskip("scipy.stats")
    from memagent_integrations.evaluation.statistics import Score, score

    # Wilson's interval of 3 of 4: (0.75 + 0.4802) / 1.9604 -+ 1.96 / 1.9604 * sqrt(0.1875 / 4 + 0.0600)
    known = score([1, 0, 1, 1])
    assert (known.mean, known.n, known.stderr) == (0.75, 4, pytest.approx(0.25))
    assert (known.low, known.high) == (pytest.approx(0.3006, abs=1e-4), pytest.approx(0.9544, abs=1e-4))
    for right, n in ((0, 1), (1, 1), (0, 16), (16, 16), (3, 7), (127, 128), (250, 500)):
        theirs = stats.binomtest(right, n).proportion_ci(method="wilson")
        ours = score([1.0] * right + [0.0] * (n - right))
        assert (ours.low, ours.high) == (pytest.approx(theirs.low, abs=1e-9), pytest.approx(theirs.high, abs=1e-9))
    values = [0.2, 0.4, 0.6, 0.5]
    theirs = stats.t.interval(0.95, 3, loc=0.425, scale=stats.sem(values))
    ours = score(values)
    assert (ours.mean, ours.stderr) == (pytest.approx(0.425), pytest.approx(stats.sem(values)))
    assert (ours.low, ours.high) == (pytest.approx(theirs[0]), pytest.approx(theirs[1]))
    assert score([0.5, 0.9, 1.0]).high == 1.0
    assert score([]) == Score(mean=None, n=0, stderr=None, low=0.0, high=1.0)
    assert score([0.5]).stderr is None
    assert score([0.5]).low < 0.1
    assert score([0.5, 0.5]).low < 0.1  # that they do not differ makes two values no certainty
    for bad in ([1.5], [-0.1], [math.nan], [1, math.inf]):
        with pytest.raises(UsageError, match="from 0 to 1"):
            score(bad)


def test_the_interval_holds_the_true_mean_about_95_times_in_100() -> None:
    pytest.importorskip("scipy")
    from memagent_integrations.evaluation.statistics import score

    draw = random.Random("coverage")
    for sample, true in (
        (lambda: float(draw.random() < 0.8), 0.8),
        (lambda: draw.choice((0.0, 0.25, 0.5, 1.0)), 0.4375),
    ):
        scores = [score([sample() for _ in range(64)]) for _ in range(400)]
        assert 0.92 <= sum(one.low <= true <= one.high for one in scores) / 400 <= 0.98


def test_two_readers_are_compared_on_the_same_samples() -> None:
    stats = pytest.importorskip("scipy.stats")
    from memagent_integrations.evaluation.statistics import Comparison, compare

    first, second = [1] * 8 + [0] * 3 + [1] * 20, [0] * 8 + [1] * 3 + [1] * 20
    # McNemar's exact test: of 11 that differ 3 or fewer on one side, 2 * (1 + 11 + 55 + 165) / 2048
    known = compare(first, second)
    assert known == Comparison(n=31, difference=pytest.approx(5 / 31), better=8, worse=3, p=pytest.approx(464 / 2048))
    assert compare(second, first).p == pytest.approx(known.p)
    assert compare([1] * 100, [0] * 100).p == pytest.approx(2 / 2**100)
    # all 8 signs of three differences: only the two where all are alike are as far from 0
    assert compare([0.9, 0.8, 0.7], [0.1, 0.2, 0.3]).p == pytest.approx(2 / 8)
    values = random.Random("compare")
    a, b = ([values.random() for _ in range(60)] for _ in range(2))
    ours, theirs = compare(a, b).p, stats.wilcoxon(a, b).pvalue
    assert abs(ours - theirs) < 0.15  # another test, of nearly the same question
    assert compare(a, b) == compare(a, b)  # drawn by the seed
    assert compare([min(x + 0.3, 1.0) for x in a], a).p < 0.001
    assert (compare([], []).p, compare([1], [1]).p, compare([1], [0]).p) == (1.0, 1.0, 1.0)
    with pytest.raises(UsageError, match="same samples"):
        compare([1], [1, 0])
    with pytest.raises(UsageError, match="from 0 to 1"):
        compare([2], [1])

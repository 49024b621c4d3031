"""What the benchmarks' generators promise: length, depth, each needle once, the same bytes for the same seed."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.data import DATA
from helpers.samples import BOOKS, ESSAYS, WITHOUT_DATA, count, digests, local, make, text

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation import data as sets
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.diagnostics import fact_places, holds
from memagent_integrations.evaluation.haystacks import GRASS, Corpus, Cycled, stream
from memagent_integrations.evaluation.permutation import Permutation
from memagent_integrations.evaluation.ruler import of_prompt, with_example
from memagent_integrations.evaluation.tasks import NAMES, load, words
from memagent_integrations.tokens import load_counter

MEASURED = (*WITHOUT_DATA, *ESSAYS, *BOOKS, "qa_1", "qa_2")  # in tokens
NEEDLES = tuple(name for name in NAMES if name.startswith("niah"))
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")


# lengths and depths


@pytest.mark.parametrize("length", [4_096, 65_536])
@pytest.mark.parametrize("name", MEASURED)
def test_the_length_is_that_asked_for(name: str, length: int) -> None:
    for number in range(3):
        assert count(text(make(name, length, number=number))) == pytest.approx(length, rel=0.02)


@pytest.mark.parametrize("name", [*WITHOUT_DATA, "niah_single_2", "qa_1", "qa_2", "babilong_qa3"])
def test_the_length_is_measured_with_the_tokenizer_that_is_given(name: str) -> None:
    real = load_counter("tiktoken:o200k_base")
    task = load(name, Data() if name in WITHOUT_DATA else local())
    for length in (4_096, 200_000):
        assert real(text(task.make(length, 5, 1, real))) == pytest.approx(length, rel=0.02)


@pytest.mark.parametrize("name", [*NEEDLES, "vt", "qa_1", "qa_2"])
def test_each_fact_stands_in_the_document_once_at_its_depth(name: str) -> None:
    for number in range(4):
        sample = make(name, 8_192, number=number)
        whole = text(sample)
        assert sample.facts
        for fact in sample.facts:
            assert whole.count(fact.text) == 1
            assert whole.index(fact.text) / len(whole) == pytest.approx(fact.depth, abs=0.03)
            assert fact.text in sample.oracle
        assert [fact.depth for fact in sample.facts] == sorted(fact.depth for fact in sample.facts)


def test_samples_of_a_needle_task_go_through_all_depths() -> None:
    depths = {round(make("niah_single_2", 8_192, number=number).facts[0].depth, 1) for number in range(40)}
    assert depths == {n / 10 for n in range(11)}


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2"])
def test_a_needle_stands_anywhere_among_equal_sentences(name: str) -> None:
    depths = sorted(make(name, 2_048, number=number).facts[0].depth for number in range(60))
    assert 0 <= depths[0] < 0.1
    assert 0.9 < depths[-1] < 1
    assert len({round(depth * 39, 6) % 1 for depth in depths}) > 10, "not RULER's 40 depths"
    assert all(abs(depth - n / 60) < 0.2 for n, depth in enumerate(depths)), "uniform"


def test_hyphenated_words_are_words() -> None:
    assert {"high-pitched", "arm-rest", "x-ray"} <= {
        *words.lists("adjective"),
        *words.lists("noun"),
        *words.lists("verb"),
    }
    assert not {word for category in ("adjective", "noun", "verb") for word in words.lists(category) if " " in word}
    single = words.singles("key")
    texts = [single(n) for n in range(9_000)]
    assert len(set(texts)) == 9_000
    assert {"arm-rest", "x-ray"} <= set(texts)


@pytest.mark.parametrize("name", NEEDLES)
def test_an_answer_is_in_the_document_once(name: str) -> None:
    sample = make(name, 8_192, number=2)
    whole = text(sample)
    queries, values = 4 if name == "niah_multiquery" else 1, 4 if name == "niah_multivalue" else 1
    assert len(sample.answers) == queries * values
    assert all(whole.count(answer) == 1 for answer in sample.answers)
    assert {key for fact in sample.facts for key in fact.keys} == set(sample.answers)
    found = {(key, value) for _, key, value in NEEDLE.findall(whole)}
    assert {value for key, value in found if key in sample.question} == set(sample.answers)
    if name in ("niah_multikey_2", "niah_multikey_3"):
        assert len(found) > 100, "the haystack is made of needles"
    else:
        assert len(found) == (1 if "single" in name else 4)


@pytest.mark.parametrize(
    ("name", "kind"), [("niah_multikey_2", r"\d{7}"), ("niah_multikey_3", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")]
)
def test_a_haystack_of_needles_has_no_key_and_no_value_twice(name: str, kind: str) -> None:
    lines = text(make(name, 65_536)).split("\n")
    found = [NEEDLE.fullmatch(line) for line in lines]
    assert all(found)
    assert len({match[2] for match in found if match}) == len({match[3] for match in found if match}) == len(lines)
    assert all(re.fullmatch(kind, match[3]) for match in found if match)


def test_a_variable_is_assigned_from_the_one_before() -> None:
    sample = make("vt", 8_192)
    lines = [line for line in text(sample).split("\n") if line.startswith("VAR")]
    assert lines == [fact.text for fact in sample.facts]
    value = re.search(r"\d{5}", sample.question)
    assert value is not None
    assert lines[0] == f"VAR {sample.answers[0]} = {value[0]}"
    assert lines[1:] == [f"VAR {after} = VAR {before}" for before, after in pairwise(sample.answers)]


def test_ten_words_are_common() -> None:
    for length, often, seldom in ((4_096, 30, 3), (2_000, 6, 1), (200_000, 30, 3)):
        sample = make("cwe", length)
        whole = text(sample)
        entries = re.findall(r"(\d+)\. (\S+)", whole)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counted = Counter(word for _, word in entries)
        assert {word for word, times in counted.items() if times == often} == set(sample.answers)
        assert {times for word, times in counted.items() if word not in sample.answers} == {seldom}
        assert Counter(re.findall(r"\d+\. (\S+)", sample.oracle)) == dict.fromkeys(sample.answers, often)
        for fact in sample.facts:
            assert f" {whole} ".count(f" {fact.text} ") == 1


def test_vt_and_cwe_have_an_example() -> None:
    tasks = {name: with_example(load(name, Data())) for name in ("vt", "cwe")}
    one, other = (tasks["vt"].make(4_096, 1, number, count) for number in (0, 1))
    assert one.question.startswith(f"{make('vt', 4_096).question}\n\nAn example")
    shown = one.question.partition("An example")[2]
    names = shown.rpartition(": ")[2].split()
    assert re.findall(r"VAR (\w+) =", shown) == names
    assert len(names) == len(set(names)) == 5
    assert not set(names) & set(one.answers)
    assert shown != other.question.partition("An example")[2]
    entries, _, common = (
        tasks["cwe"].make(4_096, 1, 0, count).question.partition("An example")[2].partition("\n\nthe 10")
    )
    counted = Counter(re.findall(r"\d+\. (\S+)", entries))
    assert sorted(counted.values()) == [1] * 10 + [3] * 10
    assert {word for word, times in counted.items() if times == 3} == set(re.findall(r"\d+\. (\S+)", common))
    needles = load("niah_single_1", Data())
    assert with_example(needles) is needles


@pytest.mark.parametrize("name", ["niah_single_1", "vt", "cwe", "fwe"])
def test_a_length_may_be_that_of_the_prompt(name: str) -> None:
    task = of_prompt(with_example(load(name, Data())))
    sample = task.make(4_096, 1, 0, count)
    (message,) = plain(sample.question, text(sample))
    assert count(message.content) + task.answer_tokens == pytest.approx(4_096, rel=0.02)
    assert sample.question.startswith(make(name, 4_096).question)
    if name == "cwe":
        assert sample.details["often"] == 30


def test_a_prompt_has_to_fit_its_length() -> None:
    with pytest.raises(UsageError, match="without a document has"):
        of_prompt(with_example(load("cwe", Data()))).make(200, 0, 0, count)
    with pytest.raises(UsageError, match="not in tokens"):
        of_prompt(replace(load("vt", Data()), unit="paragraphs"))


def test_three_words_are_frequent() -> None:
    for length in (4_096, 65_536):
        sample = make("fwe", length)
        ranked = Counter(text(sample).split(" ")).most_common(5)
        assert [word for word, _ in ranked[:4]] == ["...", *sample.answers]
        assert [times for _, times in ranked[1:4]] == sample.details["counts"]
        assert ranked[3][1] > ranked[4][1]


def test_the_story_is_told_in_its_order() -> None:
    for name in BOOKS:
        sample = make(name, 8_192, number=3)
        whole, place = text(sample), 0
        for sentence in sample.oracle.split("\n"):
            place = whole.index(sentence, place) + 1
        assert sample.facts
        for fact in sample.facts:
            assert fact.text in sample.oracle
            assert any(
                abs(match.start() / len(whole) - fact.depth) < 0.02
                for match in re.finditer(re.escape(fact.text), whole)
            )
            assert len(fact.keys) >= 2
            assert all(key in fact.text for key in fact.keys)


# paragraphs


def test_hqa_has_so_many_paragraphs_and_the_gold_ones_once() -> None:
    for length in (2, 50, 400):
        for number in range(3):
            sample = make("ruler_hqa", length, number=number)
            whole = text(sample)
            shown = re.split(r"(?:^|\n\n)Document \d+:\n", whole)[1:]
            assert len(shown) == len(set(shown)) == length
            assert [int(n) for n in re.findall(r"(?m)^Document (\d+):$", whole)] == list(range(1, length + 1))
            assert len(sample.facts) == 2
            assert all(whole.count(fact.text) == 1 for fact in sample.facts)
            assert sample.details["reused"] == 0


def test_all_lengths_ask_the_same_question() -> None:
    one, other = make("ruler_hqa", 50, number=7), make("ruler_hqa", 200, number=7)
    assert (one.question, {fact.text for fact in one.facts}) == (other.question, {fact.text for fact in other.facts})
    assert make("ruler_hqa", 50, number=8).question != one.question
    assert make("vt", 4_096).answers == make("vt", 8_192).answers


def test_paragraphs_that_are_used_again_are_counted(tmp_path: Path) -> None:
    sample = load("ruler_hqa", small(tmp_path)).make(20, 0, 0, count)
    shown = Counter(re.split(r"(?:^|\n\n)Document \d+:\n", text(sample))[1:])
    assert sum(shown.values()) == 20
    assert sample.details["others"] == 4
    assert sample.details["reused"] == 20 - 2 - 4 == sum(times - 1 for times in shown.values())
    assert all(shown[fact.text] == 1 for fact in sample.facts)


def test_qa_1_takes_other_paragraphs_of_the_article_first() -> None:
    sample = make("qa_1", 65_536)
    shelf = len({paragraph for question in local().squad for paragraph in (*question.gold, *question.near)})
    assert sample.details["reused"] == max(sample.details["paragraphs"] - shelf, 0)
    article = next(question for question in local().squad if question.id == sample.details["question"])
    assert all(text(sample).count(paragraph.text) >= 1 for paragraph in article.near)


def test_qa_1_samples_the_paragraphs_of_the_article() -> None:
    chosen: list[int] = []
    for number in range(12):
        sample = make("qa_1", 1_024, number=number)
        article = next(question for question in local().squad if question.id == sample.details["question"])
        shown = [n for n, paragraph in enumerate(article.near) if paragraph.text in text(sample)]
        assert len(shown) >= sample.details["paragraphs"] - 2  # the last one is chosen by its length
        chosen += shown
    assert max(chosen) > 3 * len(chosen) / 12, "not always the first"


@pytest.mark.parametrize(
    ("names", "most"),
    [(NEEDLES, 128), (("vt",), 30), (("cwe",), 120), (("fwe",), 50), (("qa_1", "qa_2"), 32), (("ruler_hqa",), None)],
)
def test_answers_are_as_short_as_rulers(names: tuple[str, ...], most: int | None) -> None:
    assert {load(name, local()).answer_tokens for name in names} == {most}


def test_an_answer_of_babilong_names_nothing_else() -> None:
    for name in BOOKS:
        task = load(name, local())
        for number in range(30):
            sample = task.make(2_048, 0, number, count)
            assert sample.question.endswith("? Answer with one word.")
            answer, *others = sample.answers
            assert others
            assert not any(other.lower() in sample.question.lower() for other in sample.answers)
            scores = [task.score(said, sample) for said in (f"The {answer}.", f"{answer} or {others[0]}", others[0])]
            assert scores == [1, 0, 0]


def test_the_reserve_is_used_when_the_pool_is(tmp_path: Path) -> None:
    data = small(tmp_path)
    write(
        tmp_path / "2wikimultihopqa/corpus.jsonl",
        [{"title": title, "text": f"{title} again."} for title in ("Ann", "Off", "Two", "More")],
    )
    task = load("ruler_hqa", data)
    assert not re.search(r"Two|More", text(task.make(6, 0, 0, count)))
    sample = task.make(8, 0, 0, count)
    assert (sample.details["others"], sample.details["reused"]) == (6, 0)
    assert sorted(re.findall(r"(\w+) again", text(sample))) == ["More", "Two"]


# seeds


@pytest.mark.parametrize("name", [*MEASURED, "ruler_hqa"])
def test_a_sample_is_the_same_each_time_and_others_differ(name: str) -> None:
    length = 50 if name == "ruler_hqa" else 4_096
    one = make(name, length)
    assert text(one) == text(one)
    assert text(make(name, length)) == text(one)
    others = [text(make(name, length, seed=2)), text(make(name, length, number=1))]
    assert len({text(one), *others}) == 3


def test_threads_make_the_samples_that_one_makes() -> None:
    tasks = [load(name, Data(DATA)) for name in ("niah_single_2", "qa_2") if local()]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: [text(task.make(8_192, 0, n, count)) for task in tasks], range(16)))
    again = [load(name, Data(DATA)) for name in ("niah_single_2", "qa_2")]
    assert found == [[text(task.make(8_192, 0, n, count)) for task in again] for n in range(16)]


@pytest.mark.heavy
def test_another_process_makes_the_same_bytes() -> None:
    script = "from helpers.samples import digests; print(*digests(), sep='\\n')"
    env = {**os.environ, "PYTHONHASHSEED": "1234", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == digests()


# RULER's own generators, as lm_eval has them


def tokens(given: str) -> SimpleNamespace:
    """A tokenizer as lm_eval calls it."""
    return SimpleNamespace(input_ids=re.findall(r" ?\w+|[^\w]", given))


@pytest.fixture
def ruler(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    pytest.importorskip("lm_eval")
    spec = find_spec("llama_index.core")
    if spec is None or spec.origin is None:
        pytest.skip("the data of nltk that llama-index-core brings are not here")
    monkeypatch.setenv("NLTK_DATA", str(Path(spec.origin).parent / "_static" / "nltk_cache"))
    random.seed(0)

    def loaded(name: str) -> Any:
        spec = find_spec(f"lm_eval.tasks.ruler.{name}")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)  # a copy: tests of the adapter have their own
        spec.loader.exec_module(module)
        return module

    return loaded


def test_niah_agrees_with_lm_eval(ruler: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # it makes a list of all pairs
    few = {"nouns": words.lists("noun")[:99], "adjectives": words.lists("adjective")[:99], "verbs": []}
    monkeypatch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=few))
    theirs = ruler("prepare_niah")
    rows = theirs.generate_samples(
        theirs.get_haystack("repeat"),
        tokens,
        max_seq_length=4096,
        type_haystack="repeat",
        type_needle_k="words",
        type_needle_v="numbers",
        template="{context}",
        num_samples=3,
    )
    assert len(rows) == 3
    for number, row in enumerate(rows):
        sample = make("niah_single_1", 4_096, number=number)
        for document, answers in ((row["input"], row["outputs"]), (text(sample), sample.answers)):
            lines = Counter(NEEDLE.sub("the needle", line) for line in document.split("\n"))
            assert lines.pop("the needle") == 1
            assert list(lines) == [GRASS]
            kind, key, value = NEEDLE.findall(document)[0]
            assert (kind, [value]) == ("numbers", list(answers))
            assert re.fullmatch(r"\d{7}", value)
            parts = key.split("-")
            splits = [("-".join(parts[:n]), "-".join(parts[n:])) for n in range(1, len(parts))]
            adjectives, nouns = words.lists("adjective"), words.lists("noun")
            assert any(adjective in adjectives and noun in nouns for adjective, noun in splits)


@pytest.mark.heavy
def test_vt_agrees_with_lm_eval(ruler: Callable[[str], Any]) -> None:
    theirs = ruler("vt_utils")
    example = theirs.sys_vartrack_w_noise_random(tokens, num_samples=1, max_seq_length=500, incremental=5)[0]
    row = theirs.sys_vartrack_w_noise_random(tokens, num_samples=1, max_seq_length=4096, icl_example=example)[0]
    sample = make("vt", 4_096)
    shown = row["input"].rpartition("Memorize and track")[2]
    for document, answers in ((shown, row["outputs"]), (text(sample), sample.answers)):
        chain = re.findall(r"VAR ([A-Z]{5}) = (VAR [A-Z]{5}|\d{5})", document)
        assert [variable for variable, _ in chain] == list(answers)
        assert [value for _, value in chain[1:]] == [f"VAR {variable}" for variable in answers[:-1]]
        assert chain[0][1].isdecimal()
        assert len(chain) == 5
        assert document.count(GRASS) > 100


@pytest.mark.heavy
def test_cwe_agrees_with_lm_eval(ruler: Callable[[str], Any]) -> None:
    row = ruler("cwe_utils").sys_word_pair_random(num_samples=1, max_seq_length=4096, tokenizer=tokens)[0]
    sample = make("cwe", 4_096)
    sizes = []
    for document, answers in ((row["input"], row["outputs"]), (text(sample), sample.answers)):
        entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n|$)", document)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counted = Counter(word for _, word in entries)
        assert {counted[word] for word in answers} == {30}
        assert {times for word, times in counted.items() if word not in answers} == {3}
        assert len(answers) == 10
        sizes.append(len(entries))
    assert sizes[0] <= sizes[1]  # theirs leaves room for an example


@pytest.mark.heavy
def test_fwe_agrees_with_lm_eval(ruler: Callable[[str], Any]) -> None:
    row = ruler("fwe_utils").sys_kwext(tokens, max_seq_length=4096, num_samples=1)[0]
    sample = make("fwe", 4_096)
    shown = row["input"].partition("coded words. ")[2].partition("\nQuestion")[0]
    for document, answers in ((shown, row["outputs"]), (text(sample), sample.answers)):
        ranked = Counter(document.split(" ")).most_common()
        assert [word for word, _ in ranked[:4]] == ["...", *answers]
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked[1:])
        for rank, (_, times) in enumerate(ranked[:6], start=1):
            assert times == pytest.approx(ranked[0][1] / rank**2, abs=1.01)
    assert count(row["input"]) == pytest.approx(count(text(sample)), rel=0.1)  # theirs goes in steps of 128 words


# any length


@pytest.mark.parametrize("name", ["niah_single_1", "vt"])
def test_millions_of_tokens_take_no_memory(name: str) -> None:
    asked = 0

    def watched(given: str) -> int:
        nonlocal asked
        asked += len(given)
        return count(given)

    task = load(name, Data())
    tracemalloc.start()
    try:
        sample = task.make(3_500_000, 1, 0, watched)
        longest = max(map(len, sample.document()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert longest < 1 << 16
    assert asked < 1 << 20  # characters that were counted to know the length
    length, seen, tail = 0, Counter[str](), ""
    for piece in sample.document():
        length += count(piece)
        seen.update({fact.text: (tail + piece).count(fact.text) - tail.count(fact.text) for fact in sample.facts})
        tail = piece[-200:]
    assert length == pytest.approx(3_500_000, rel=0.02)
    assert seen == Counter(fact.text for fact in sample.facts)


def test_a_corpus_is_counted_once_for_each_counter() -> None:
    asked = Counter[str]()

    def watched(given: str) -> int:
        asked[given] += 1
        return count(given)

    corpus = Corpus("".join(f"Sentence number {n} says this and that. " for n in range(1000)))
    filler = Cycled(corpus)
    sizes = [filler.size(tokens, watched) for tokens in (20_000, 60_000, 20_000)]
    assert sizes[0] == sizes[2]
    assert sizes[1] > 2 * 1000
    blocks = {"".join(stream(Cycled(corpus, batch), min(64, 1000 - batch * 64))) for batch in range(16)}
    assert all(asked[f" {block}"] == 1 for block in blocks)


def test_a_text_without_ends_of_sentences_is_cut_between_words() -> None:
    corpus = Corpus("word " * 5000)
    assert max(len(corpus.sentence(n)) for n in range(len(corpus.starts))) <= 400
    assert corpus.join(0, len(corpus.starts)) == corpus.text == ("word " * 5000).strip()


def test_a_permutation_has_each_number_once_and_knows_its_place() -> None:
    for size in (1, 2, 7, 100, 1345):
        order = Permutation(size, "key")
        assert sorted(order) == list(range(size))
        assert [order.index(number) for number in order] == list(range(size))
    assert list(Permutation(100, "key")) != list(Permutation(100, "another")) != list(range(100))
    with pytest.raises(IndexError):
        order[1345]


def test_neighbours_in_a_permutation_have_nothing_to_do_with_one_another() -> None:
    order = list(Permutation(90_000, "key"))
    cells = Counter((one * 10 // 90_000, other * 10 // 90_000) for one, other in pairwise(order))
    assert len(cells) == 100
    chi_square = sum((seen - 900) ** 2 / 900 for seen in cells.values())
    assert chi_square < 170  # with 99 degrees of freedom: p = 1e-5


# files


def small(folder: Path) -> Data:
    write(folder / "hotpotqa/dev.jsonl", [hotpot()])
    write(
        folder / "hotpotqa/paragraph_pool.jsonl",
        [{"title": title, "text": f"{title} is a place."} for title in ("Ann", "Far", "Off", "Far")],
    )
    return Data(folder)


def hotpot(**changed: object) -> dict[str, object]:
    context = [
        ["Ann", ["Ann lives in ", "Bonn."]],
        ["Bonn", ["Bonn is on the Rhine."]],
        ["Cora", ["Cora sings."]],
        ["Dora", ["Dora is Ann's aunt."]],
    ]
    row = {
        "id": "q1",
        "question": "On which river does Ann live?",
        "answer": "Rhine",
        "supporting_facts": [["Ann", 0], ["Bonn", 0]],
        "context": context,
    }
    return {**row, **changed}


def write(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_facts_of_a_question_have_the_answer_or_what_they_are_about(tmp_path: Path) -> None:
    sample = load("qa_2", small(tmp_path)).make(60, 0, 0, count)
    assert {fact.text: fact.keys for fact in sample.facts} == {
        "Ann\nAnn lives in Bonn.": ("Ann",),
        "Bonn\nBonn is on the Rhine.": ("Rhine",),
    }
    assert sample.answers == ("Rhine",)
    assert "Ann is a place" not in text(sample)
    for answer in ("no", "yes", "on"):  # it stands in "Bonn", and yes and no in any text
        write(tmp_path / "hotpotqa/dev.jsonl", [hotpot(answer=answer)])
        sample = load("qa_2", Data(tmp_path)).make(60, 0, 0, count)
        assert {fact.keys for fact in sample.facts} == {("Ann",), ("on",) if answer == "on" else ("Bonn",)}
    write(
        tmp_path / "squad/questions.jsonl",
        [{"id": "1", "title": "U", "paragraph": 0, "question": "Which river?", "answers": ["Rhin", "The Rhin"]}],
    )
    write(
        tmp_path / "squad/paragraphs.jsonl",
        [{"title": "U", "paragraph": n, "context": f"The Rhine has {n} banks."} for n in range(9)],
    )
    (fact,) = load("qa_1", Data(tmp_path)).make(60, 0, 0, count).facts
    assert fact.keys == ("Rhin",), "part of a word, of a paragraph without a title"


def test_longbench_and_files_of_ones_own(tmp_path: Path) -> None:
    context = "Ann did. " * 20_000
    row = {"input": "Who?", "context": context, "answers": ["Ann", "she"], "length": 3, "dataset": "qasper"}
    write(tmp_path / "longbench/qasper.jsonl", [row])
    task = load("longbench_qasper", Data(tmp_path))
    sample = task.make(0, 0, 0, count)
    assert (task.unit, task.size, task.metric, task.answer_tokens) == (None, 1, "longbench_f1", 128)
    assert (sample.answers, text(sample)) == (("Ann", "she"), row["context"])
    assert sample.question.startswith("Who? ")
    assert "unanswerable" in sample.question
    assert max(map(len, sample.document())) <= 65_536
    own = tmp_path / "own.jsonl"
    first = b'\xef\xbb\xbf{"question": "Q", "answers": "A", "context": "line\xe2\x80\xa8sep"}'
    own.write_bytes(first + b'\r\n\r\n{"question": "R", "answers": ["B"], "context": "C"}')
    task = load(f"jsonl:{own}", Data())
    assert (task.size, task.metric, task.answer_tokens) == (2, "f1", None)
    found = {(s.question, s.answers, text(s)) for s in (task.make(0, 3, n, count) for n in range(2))}
    assert found == {("Q", ("A",), "line\u2028sep"), ("R", ("B",), "C")}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "JSON object, not list"),
        (b"\xff\xfe{\x00", "not UTF-8"),
        (b'{"answers": ["A"], "context": "C"}', "'question'"),
        (b'{"question": "Q", "answers": [], "context": "C"}', "'answers'"),
        (b'{"question": "Q", "answers": [3], "context": "C"}', "'answers'"),
        (b'{"question": "Q", "answers": ["A"], "context": " "}', "'context'"),
        (b'{"question": "Q", "answers": ["A"], "context": "half \\ud83d"}', "lone surrogate"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "Q", "answers": ["A"], "context": "whole \\ud83d\\ude00"}\n\n' + line + b"\n")
    with pytest.raises(UsageError, match=rf"rows\.jsonl, line 3: .*{re.escape(said)}"):
        load(f"jsonl:{path}", Data())


def test_files_that_hold_nothing_or_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="has no rows"):
        load(f"jsonl:{tmp_path / 'empty.jsonl'}", Data())
    with pytest.raises(UsageError, match="is not UTF-8 text; give the file another name"):
        load("jsonl:caf\udce9.jsonl", Data())
    for name in ("missing.jsonl", "nul\0", "."):
        with pytest.raises(UsageError, match="cannot read"):
            load(f"jsonl:{tmp_path / name}", Data())
    with pytest.raises(UsageError, match="not a folder"):
        Data(tmp_path / "missing")
    write(tmp_path / "hotpotqa/dev.jsonl", [hotpot(context=[["Ann", 5]])])
    with pytest.raises(UsageError, match=r"dev\.jsonl, line 1: the field 'context' has to hold pairs"):
        load("qa_2", Data(tmp_path))
    write(tmp_path / "hotpotqa/dev.jsonl", [hotpot(supporting_facts=[["Zoe", 0]])])
    with pytest.raises(UsageError, match=r"dev\.jsonl, line 1: a paragraph that supporting_facts names"):
        load("qa_2", Data(tmp_path))
    for folder, content, said in (("paul_graham", b" \n", "is empty"), ("books", b"caf\xe9", "not UTF-8")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.txt").write_bytes(content)
        with pytest.raises(UsageError, match=said):
            _ = Data(tmp_path).essays if folder == "paul_graham" else Data(tmp_path).books


def test_a_broken_story_is_named(tmp_path: Path) -> None:
    path = tmp_path / "babi" / "qa1_single-supporting-fact_train.txt"
    path.parent.mkdir()
    for content in (
        "1 Mary left.\n2 Where is Mary?\tout\t7\n",
        "1 Mary left.\nno number\n",
        "1 Mary left.\n2 Where?\tout\n",
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match=r"train\.txt, line 2: "):
            Data(tmp_path).babi(1)
    path.write_text(
        "1 Mary left.\n2 Sue came.\n3 Where is Mary? \tout\t1\n1 Bob sat.\n2 Where is Bob?\tthere\t1\n",
        encoding="utf-8",
    )
    first, second = Data(tmp_path).babi(1)
    assert first.facts == ("Mary left.", "Sue came.")
    assert (first.question, first.answer, first.support) == ("Where is Mary?", "out", (0,))
    assert second.facts == ("Bob sat.",)


UNREACHABLE = """
import sys
from pathlib import Path
from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.data import Data
from memagent_integrations.evaluation.tasks import load
for name in sys.argv[2:]:
    try:
        load(name, Data(Path(sys.argv[1])))
    except UsageError as error:
        print(name, error)
"""


@pytest.mark.heavy
def test_what_is_missing_and_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    wanted = {
        "niah_single_2": "paul_graham/*.txt",
        "qa_1": "squad/questions.jsonl",
        "qa_2": "hotpotqa/dev.jsonl",
        "ruler_hqa": "hotpotqa/dev.jsonl",
        "babilong_qa1": "babi/qa1_*_train.txt",
        "longbench_musique": "longbench/musique.jsonl",
    }
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-c", UNREACHABLE, str(tmp_path / "data"), *wanted]
    lines = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(wanted)
    for line, (name, file) in zip(lines, wanted.items(), strict=True):
        assert line.startswith(f"{name} there is no {file} ")
        assert "datasets.load_dataset(" in line


def test_rows_of_the_hub_become_those_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = hotpot()
    columns = {
        "supporting_facts": {"title": ["Ann", "Bonn"], "sent_id": [0, 0]},
        "context": {
            "title": [title for title, _ in row["context"]],
            "sentences": [sentences for _, sentences in row["context"]],
        },
    }
    squad = [
        {
            "id": f"s{n}",
            "title": "T",
            "context": f"Text {n // 2} ",
            "question": f"Q{n}?",
            "answers": {"text": ["A", "A"] if n < 3 else [], "answer_start": []},
        }
        for n in range(4)
    ]
    babi = [
        {"passage": "Mary left.\nSue came.\n", "question": "Where?", "answer": "out", "task": task} for task in (1, 2)
    ]
    rows = {
        "hotpotqa/hotpot_qa": [{**row, **columns}],
        "rajpurkar/squad_v2": squad,
        "Muennighoff/babi": babi,
        "baber/paul_graham_essays": [{"text": "One thing."}, {"text": "Another thing."}],
        "Xnhyacinth/LongBench": [{"input": "Q", "context": "C", "answers": ["A"]}],
    }
    monkeypatch.setattr(sets, "hub", lambda repository, split, config=None: rows[repository])
    found = Data()
    assert found.hotpotqa == small(tmp_path).hotpotqa
    assert [paragraph.title for paragraph in found.paragraphs] == ["Ann", "Bonn", "Cora", "Dora"]
    assert [(q.id, q.answers, q.gold[0].text, [p.text for p in q.near]) for q in found.squad] == [
        ("s0", ("A",), "Text 0", ["Text 1"]),
        ("s1", ("A",), "Text 0", ["Text 1"]),
        ("s2", ("A",), "Text 1", ["Text 0"]),
    ]
    assert [story.facts for story in found.babi(2)] == [("Mary left.", "Sue came.")]
    assert found.essays.text == "One thing. Another thing."
    assert found.longbench("qasper")[0].answers == ("A",)


def test_rows_of_the_hub_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "hub", lambda repository, split, config=None: [{"id": "1", "text": 7}])
    for read in (
        lambda: Data().hotpotqa,
        lambda: Data().squad,
        lambda: Data().essays,
        lambda: Data().longbench("qasper"),
    ):
        with pytest.raises(UsageError, match=r"have changed their form|row 0 of .* the field"):
            read()


def test_packages_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"datasets is not installed; run: pip install .*\[eval\]'"
    with pytest.raises(MissingExtra, match=message):
        load("qa_2", Data())
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    words.lists.cache_clear()
    with pytest.raises(MissingExtra, match="wonderwords"):
        make("cwe", 4_096)
    words.lists.cache_clear()


# arguments


def test_a_name_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"unknown task 'niah'; the tasks are niah_single_1, .* and jsonl:PATH"):
        load("niah", Data())
    assert len(NAMES) == len(set(NAMES)) == 13 + 2 + 5 + 6 + 3 + 5 + 8 + 1 + 2 * 5 + 2 + 2


def test_numbers_that_are_wrong() -> None:
    for length, seed, number in ((0, 0, 0), (-1, 0, 0), (4096, -1, 0), (4096, 0, -1), (4096, 0, True)):
        with pytest.raises(UsageError, match="whole number"):
            load("vt", Data()).make(length, seed, number, count)
    task = load("ruler_hqa", local())
    assert task.size == 400
    with pytest.raises(UsageError, match="number has to be a whole number of at least 0 and at most 399"):
        task.make(50, 0, 400, count)


@pytest.mark.parametrize("name", MEASURED)
def test_a_length_that_is_too_short_is_refused_and_the_least_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} needs a length of at least \d+ tokens, not 5$") as caught:
        make(name, 5)
    least = re.search(r"\d+(?= tokens)", str(caught.value))
    assert least
    assert text(make(name, int(int(least[0]) * 1.2)))


def test_a_document_of_fewer_paragraphs_than_the_answer_needs() -> None:
    with pytest.raises(UsageError, match="a document of 1 paragraphs does not hold the 2"):
        make("ruler_hqa", 1)


def test_a_tokenizer_that_finds_nothing() -> None:
    with pytest.raises(UsageError, match="next to no tokens"):
        load("niah_single_1", Data()).make(4_096, 0, 0, lambda given: 0)
    with pytest.raises(UsageError, match="next to no tokens"):
        load("niah_single_2", local()).make(4_096, 0, 0, lambda given: 0)


def test_the_fact_of_a_question_of_squad_is_the_sentence_that_answers_it() -> None:
    sentences = 0
    for number in range(60):
        sample = make("squad_train", 3, seed=1 << 30, number=number)
        (fact,) = sample.facts
        (place,) = fact_places(sample)
        assert text(sample)[place:].startswith(fact.text)
        assert fact.text in sample.oracle
        assert any(holds(fact.text, (answer,)) for answer in sample.answers)
        sentences += fact.text != sample.oracle
    assert sentences > 45

"""The rows of the data sets that the tasks are made of: from a folder, else from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation.haystacks import Corpus
from memagent_integrations.evaluation.references import Reference, References, longbench
from memagent_integrations.evaluation.rows import (
    Row,
    decoded,
    each,
    lines,
    pairs,
    string,
    strings,
    text_of,
    where_of,
    whole,
)


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A passage of an encyclopedia. `title` is empty where it is not shown."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its answers (alternatives), the paragraphs that answer it, and `near`: paragraphs that look as if they did."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Paragraph, ...]
    near: tuple[Paragraph, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """Sentences in the order of time, a question about them, its answer, and which of them (from 0) give it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    support: tuple[int, ...]


class Data:
    """The data sets, each read when it is asked for and kept.

    `folder` holds them as files (`hotpotqa/dev.jsonl`, `squad/questions.jsonl`, `babi/`, `books/`, ...). What it lacks comes from the hub.

    Raises:
        UsageError: a set is neither here nor there, or a file does not hold what it should; the message names the file and the line.
        MissingExtra: the hub is needed, and `datasets` is not installed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise UsageError(f"the data folder {str(folder)!r} is not a folder")
        self._folder = folder

    @cached_property
    def hotpotqa(self) -> Sequence[Question]:
        """The questions of HotpotQA (development set, with distractors)."""
        return self._hotpotqa("hotpotqa/dev.jsonl", "validation")

    @cached_property
    def hotpotqa_train(self) -> Sequence[Question]:
        """The questions of HotpotQA's training set, with distractors."""
        return self._hotpotqa("hotpotqa/train.jsonl", "train")

    def _hotpotqa(self, name: str, split: str) -> Sequence[Question]:
        path = self._file(name)
        if path is not None:
            return tuple(each(path, _hotpot))
        rows = self._hub(name, "hotpotqa/hotpot_qa", split, "distractor")
        with _expected("hotpotqa/hotpot_qa"):
            return tuple(
                _hotpot(_as_file(row), f"row {number} of hotpotqa/hotpot_qa") for number, row in enumerate(rows)
            )

    @cached_property
    def musique_train(self) -> Sequence[Question]:
        """The questions of MuSiQue (arXiv:2108.00573, training set), of two to four hops, with distractors."""
        path = self._first("musique/train*.jsonl")
        if path is not None:
            return tuple(each(path, _musique))
        rows = self._hub("musique/train*.jsonl", "dgslibisey/MuSiQue", "train")
        return tuple(_musique(row, f"row {number} of dgslibisey/MuSiQue") for number, row in enumerate(rows))

    @cached_property
    def paragraphs(self) -> Sequence[Paragraph]:
        """Paragraphs of HotpotQA's articles, each title once."""
        path = self._file("hotpotqa/paragraph_pool.jsonl")
        own = (paragraph for question in self.hotpotqa for paragraph in (*question.gold, *question.near))
        return _once(each(path, _paragraph) if path else own)

    @cached_property
    def more_paragraphs(self) -> Sequence[Paragraph]:
        """Paragraphs of 2WikiMultihopQA's articles with other titles than `paragraphs`; none if the file is not there."""
        path = self._file("2wikimultihopqa/corpus.jsonl")
        known = {paragraph.title for paragraph in self.paragraphs}
        return _once(paragraph for paragraph in each(path, _paragraph) if paragraph.title not in known) if path else ()

    @cached_property
    def squad(self) -> Sequence[Question]:
        """The questions of SQuAD 2.0 (development set) that have an answer; near are the other paragraphs of the same article.

        Of a folder, whose files are not parted, they are those of the articles that are not `for_training`.
        """
        return self._squad("validation", training=False)

    @cached_property
    def squad_train(self) -> Sequence[Question]:
        """The questions of SQuAD 2.0's training set; of a folder those of the articles that are `for_training`."""
        return self._squad("train", training=True)

    def _squad(self, split: str, *, training: bool) -> Sequence[Question]:
        questions, paragraphs = self._file("squad/questions.jsonl"), self._file("squad/paragraphs.jsonl")
        if questions and paragraphs:
            rows = [row for row in each(questions, _squad_question) if row and for_training(row[3][0]) is training]
            places = (
                (title, number, text)
                for title, number, text in each(paragraphs, _squad_paragraph)
                if for_training(title) is training
            )
            return _squad(rows, {(title, number): text for title, number, text in places}, str(paragraphs))
        found = self._hub("squad/questions.jsonl and squad/paragraphs.jsonl", "rajpurkar/squad_v2", split)
        with _expected("rajpurkar/squad_v2"):
            return _squad(*_squad_hub(found), "rajpurkar/squad_v2")

    def babi(self, task: int) -> Sequence[Story]:
        """The questions of a bAbI task (1 to 20, training set), each with all that was told before it."""
        pattern = f"babi/qa{task}_*_train.txt"
        path = self._first(pattern)
        if path is not None:
            return tuple(_stories(path))
        rows = self._hub(pattern, "Muennighoff/babi", "train")
        return tuple(
            _story(row, f"row {number} of Muennighoff/babi")
            for number, row in enumerate(rows)
            if row.get("task") == task
        )

    @cached_property
    def essays(self) -> Corpus:
        """Paul Graham's essays, the text that RULER hides its needles in."""
        texts = self._texts("paul_graham")
        if not texts:
            rows = self._hub("paul_graham/*.txt", "baber/paul_graham_essays", "train")
            texts = [
                string(row, "text", f"row {number} of baber/paul_graham_essays") for number, row in enumerate(rows)
            ]
        return Corpus("\n".join(texts))

    @cached_property
    def books(self) -> Corpus:
        """Books, one after the other in the order of their files' names."""
        texts = self._texts("books")
        if not texts:
            raise UsageError(
                f"{self._lacking('books/*.txt')}: put books as plain text there (Project Gutenberg has them)"
            )
        return Corpus("\n".join(texts))

    def longbench(self, name: str) -> Sequence[Reference]:
        """The questions of a set of LongBench."""
        path = self._file(f"longbench/{name}.jsonl")
        if path is not None:
            return References(path, longbench)
        rows = self._hub(f"longbench/{name}.jsonl", "Xnhyacinth/LongBench", "test", name)
        return tuple(longbench(row, f"row {number} of LongBench's {name}") for number, row in enumerate(rows))

    def _file(self, name: str) -> Path | None:
        path = self._folder / name if self._folder else None
        return path if path and path.is_file() else None

    def _first(self, pattern: str) -> Path | None:
        return next(iter(sorted(self._folder.glob(pattern))), None) if self._folder else None

    def _texts(self, name: str) -> list[str]:
        paths = sorted((self._folder / name).glob("*.txt")) if self._folder else []
        return [text_of(path) for path in paths]

    def _lacking(self, name: str) -> str:
        return (
            f"there is no {name} in the data folder {str(self._folder)!r}"
            if self._folder
            else f"no data folder is given that holds {name}"
        )

    def _hub(self, name: str, repository: str, split: str, config: str | None = None) -> Iterable[Row]:
        try:
            return hub(repository, split, config)
        except MissingExtra:
            raise
        except Exception as error:  # the hub's client raises errors of a dozen libraries
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(
                f"{self._lacking(name)}, and {repository} cannot be loaded from the Hugging Face hub ({said}); put the file there, or download "
                f"the set where there is a network: datasets.load_dataset({repository!r}{f', {config!r}' if config else ''}, split={split!r})"
            ) from error


def for_training(name: str) -> bool:
    """Whether what has this name (an article, a story's beginning) is for training, in a set that is not parted: a quarter, everywhere the same."""
    return crc32(name.encode()) % 4 == 0


def hub(repository: str, split: str, config: str | None = None) -> Iterable[Row]:
    """The rows of a data set of the Hugging Face hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra.extra("datasets", "eval") from error
    rows: Iterable[Row] = load_dataset(repository, config, split=split)
    return rows


@contextmanager
def _expected(repository: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the rows of {repository} on the Hugging Face hub have changed their form ({error!r}); use files"
        ) from error


def _hotpot(row: Row, where: str) -> Question:
    titles = {str(title) for title, _ in pairs(row, "supporting_facts", where)}
    own = [
        Paragraph(title=str(title), text="".join(_sentences(sentences, where)).strip())
        for title, sentences in pairs(row, "context", where)
    ]
    gold = tuple(paragraph for paragraph in own if paragraph.title in titles)
    if not gold or len(gold) != len(titles):
        raise UsageError(f"{where}: a paragraph that supporting_facts names is not in context")
    return Question(
        id=string(row, "id", where),
        question=string(row, "question", where),
        answers=(string(row, "answer", where),),
        gold=gold,
        near=tuple(paragraph for paragraph in own if paragraph.title not in titles),
    )


def _sentences(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{where}: the field 'context' has to hold pairs of a title and a list of sentences")
    return value


def _as_file(row: Row) -> Row:
    """A row of HotpotQA as its files have it: the hub has columns in place of pairs."""
    facts, context = row["supporting_facts"], row["context"]
    return {
        **row,
        "supporting_facts": list(zip(facts["title"], facts["sent_id"], strict=True)),
        "context": list(zip(context["title"], context["sentences"], strict=True)),
    }


def _musique(row: Row, where: str) -> Question:
    own = row.get("paragraphs")
    if not isinstance(own, list) or not all(isinstance(one, Mapping) for one in own):
        raise UsageError(f"{where}: the field 'paragraphs' has to be a list of objects")
    shown = [
        (
            Paragraph(title=string(one, "title", where), text=string(one, "paragraph_text", where).strip()),
            one.get("is_supporting"),
        )
        for one in own
    ]
    gold = tuple(paragraph for paragraph, supports in shown if supports)
    if not gold:
        raise UsageError(f"{where}: none of the paragraphs is supporting")
    aliases = strings(row, "answer_aliases", where) if row.get("answer_aliases") else ()
    return Question(
        id=string(row, "id", where),
        question=string(row, "question", where),
        answers=tuple(dict.fromkeys((string(row, "answer", where), *aliases))),
        gold=gold,
        near=tuple(paragraph for paragraph, supports in shown if not supports),
    )


def _once(paragraphs: Iterable[Paragraph]) -> tuple[Paragraph, ...]:
    kept: dict[str, Paragraph] = {}
    for paragraph in paragraphs:
        kept.setdefault(paragraph.title, paragraph)
    return tuple(kept.values())


def _paragraph(row: Row, where: str) -> Paragraph:
    return Paragraph(title=string(row, "title", where), text=string(row, "text", where).strip())


SquadQuestion = tuple[str, str, tuple[str, ...], tuple[str, int]]


def _squad_question(row: Row, where: str) -> SquadQuestion | None:
    if row.get("is_impossible"):
        return None
    place = (string(row, "title", where), whole(row, "paragraph", where))
    return string(row, "id", where), string(row, "question", where), strings(row, "answers", where), place


def _squad_paragraph(row: Row, where: str) -> tuple[str, int, str]:
    return string(row, "title", where), whole(row, "paragraph", where), string(row, "context", where).strip()


def _squad_hub(rows: Iterable[Row]) -> tuple[list[SquadQuestion | None], dict[tuple[str, int], str]]:
    questions: list[SquadQuestion | None] = []
    numbers: dict[tuple[str, str], int] = {}
    for row in rows:
        number = numbers.setdefault((row["title"], row["context"].strip()), len(numbers))
        answers = tuple(row["answers"]["text"])
        questions.append((row["id"], row["question"], answers, (row["title"], number)) if answers else None)
    return questions, {(title, number): text for (title, text), number in numbers.items()}


def _squad(
    rows: Iterable[SquadQuestion | None], texts: Mapping[tuple[str, int], str], source: str
) -> tuple[Question, ...]:
    articles: dict[str, list[Paragraph]] = {}
    paragraphs = {place: Paragraph(title="", text=text) for place, text in texts.items()}
    for (title, _), paragraph in paragraphs.items():
        articles.setdefault(title, []).append(paragraph)
    found = []
    for name, question, answers, place in filter(None, rows):
        if place not in paragraphs:
            raise UsageError(f"{source} has no paragraph {place[1]} of {place[0]!r}, which question {name} is about")
        gold = paragraphs[place]
        near = tuple(paragraph for paragraph in articles[place[0]] if paragraph != gold)
        found.append(
            Question(id=name, question=question, answers=tuple(dict.fromkeys(answers)), gold=(gold,), near=near)
        )
    return tuple(found)


def _stories(path: Path) -> Iterator[Story]:
    told: dict[int, str] = {}
    for number, _, line in lines(path):
        where = where_of(path, number)
        index, _, text = decoded(line, where).strip().partition(" ")
        if not index.isdecimal() or not text:
            raise UsageError(f"{where}: a line of bAbI is a number and a sentence")
        if int(index) == 1:
            told = {}
        question, *rest = text.split("\t")
        if not rest:
            told[int(index)] = text
            continue
        try:
            answer, support = rest
            given = tuple(list(told).index(int(one)) for one in support.split())
        except ValueError as error:
            raise UsageError(
                f"{where}: a question of bAbI has an answer and the numbers of the sentences that give it, set apart by tabs"
            ) from error
        yield Story(facts=tuple(told.values()), question=question.strip(), answer=answer.strip(), support=given)


def _story(row: Row, where: str) -> Story:
    facts = tuple(line.strip() for line in string(row, "passage", where).splitlines() if line.strip())
    return Story(
        facts=facts,
        question=string(row, "question", where),
        answer=string(row, "answer", where),
        support=tuple(range(len(facts))),
    )

"""Read the data sets that the tasks are made from: from a folder, else from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_
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
    integer,
    lines,
    pairs,
    string,
    strings,
    text_of,
    where_of,
)


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A paragraph of an encyclopedia. `title` is empty where the data set has none."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its alternative answers, the paragraphs that answer it, and similar ones that do not (`near`)."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Paragraph, ...]
    near: tuple[Paragraph, ...]


@dataclass(frozen=True, kw_only=True)
class Story:
    """Sentences in the order of events, a question, its answer, and the indices of the sentences that give it."""

    facts: tuple[str, ...]
    question: str
    answer: str
    support: tuple[int, ...]


class Data:
    """The data sets. Each is read on first use and kept.

    `folder` holds them as files (`hotpotqa/dev.jsonl`, `squad/questions.jsonl`, `babi/`, `books/`, ...). Sets that it
    lacks are loaded from the hub.

    Raises:
        UsageError: a set is neither in the folder nor on the hub, or a file is invalid; the message names the line.
        MissingExtra: the hub is needed and `datasets` is not installed.
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
        repository = "hotpotqa/hotpot_qa"
        rows = self._hub(name, repository, split, "distractor")
        with _expected_form(repository):
            return tuple(_hotpot(_as_in_file(row), where) for row, where in _with_names(rows, repository))

    @cached_property
    def musique_train(self) -> Sequence[Question]:
        """The questions of MuSiQue (arXiv:2108.00573, training set), of two to four hops, with distractors."""
        pattern, repository = "musique/train*.jsonl", "dgslibisey/MuSiQue"
        path = self._first(pattern)
        if path is not None:
            return tuple(each(path, _musique))
        rows = self._hub(pattern, repository, "train")
        return tuple(_musique(row, where) for row, where in _with_names(rows, repository))

    @cached_property
    def paragraphs(self) -> Sequence[Paragraph]:
        """Paragraphs of HotpotQA's articles, one for each title."""
        path = self._file("hotpotqa/paragraph_pool.jsonl")
        if path:
            return _unique_titles(each(path, _paragraph))
        return _unique_titles(paragraph for question in self.hotpotqa for paragraph in (*question.gold, *question.near))

    @cached_property
    def more_paragraphs(self) -> Sequence[Paragraph]:
        """Paragraphs of 2WikiMultihopQA's articles whose titles are not in `paragraphs`; empty without the file."""
        path = self._file("2wikimultihopqa/corpus.jsonl")
        if path is None:
            return ()
        known = {paragraph.title for paragraph in self.paragraphs}
        return _unique_titles(paragraph for paragraph in each(path, _paragraph) if paragraph.title not in known)

    @cached_property
    def articles_train(self) -> Sequence[Paragraph]:
        """The paragraphs of HotpotQA's and MuSiQue's training sets, one for each title that is not in `paragraphs`."""
        known = {paragraph.title for paragraph in self.paragraphs}
        questions = (*self.hotpotqa_train, *self.musique_train)
        every = (paragraph for question in questions for paragraph in (*question.gold, *question.near))
        return _unique_titles(paragraph for paragraph in every if paragraph.title not in known)

    @cached_property
    def squad(self) -> Sequence[Question]:
        """The questions of SQuAD 2.0 (development set) with an answer; `near` is the rest of the article.

        The files of a folder hold one undivided set: from them, the questions about articles not `for_training`.
        """
        return self._squad("validation", training=False)

    @cached_property
    def squad_train(self) -> Sequence[Question]:
        """The questions of SQuAD 2.0's training set; from a folder, those about articles `for_training`."""
        return self._squad("train", training=True)

    def _squad(self, split: str, *, training: bool) -> Sequence[Question]:
        questions, paragraphs = self._file("squad/questions.jsonl"), self._file("squad/paragraphs.jsonl")
        if questions and paragraphs:
            rows = [row for row in each(questions, _squad_question) if row and for_training(row[3][0]) is training]
            texts = {
                (title, number): text
                for title, number, text in each(paragraphs, _squad_paragraph)
                if for_training(title) is training
            }
            return _squad(rows, texts, str(paragraphs))
        repository = "rajpurkar/squad_v2"
        hub_rows = self._hub("squad/questions.jsonl and squad/paragraphs.jsonl", repository, split)
        with _expected_form(repository):
            return _squad(*_squad_hub(hub_rows), repository)

    def babi(self, task: int) -> Sequence[Story]:
        """Return the questions of a bAbI task (1 to 20, training set), each with all sentences before it."""
        pattern, repository = f"babi/qa{task}_*_train.txt", "Muennighoff/babi"
        path = self._first(pattern)
        if path is not None:
            return tuple(_stories(path))
        rows = self._hub(pattern, repository, "train")
        return tuple(_story(row, where) for row, where in _with_names(rows, repository) if row.get("task") == task)

    @cached_property
    def essays(self) -> Corpus:
        """Paul Graham's essays, the text in which RULER hides its needles."""
        texts, repository = self._texts("paul_graham"), "baber/paul_graham_essays"
        if not texts:
            rows = self._hub("paul_graham/*.txt", repository, "train")
            texts = [string(row, "text", where) for row, where in _with_names(rows, repository)]
        return Corpus("\n".join(texts))

    @cached_property
    def books(self) -> Corpus:
        """Books, joined in the order of their file names."""
        texts = self._texts("books")
        if not texts:
            missing = self._missing("books/*.txt")
            raise UsageError(f"{missing}: put books as plain text there (Project Gutenberg has them)")
        return Corpus("\n".join(texts))

    def longbench(self, name: str) -> Sequence[Reference]:
        """Return the questions of a set of LongBench."""
        path = self._file(f"longbench/{name}.jsonl")
        if path is not None:
            return References(path, longbench)
        rows = self._hub(f"longbench/{name}.jsonl", "Xnhyacinth/LongBench", "test", name)
        return tuple(longbench(row, where) for row, where in _with_names(rows, f"LongBench's {name}"))

    def file(self, name: str) -> Path:
        """Return the path of a file in the folder.

        Raises:
            UsageError: there is no such file, or no folder.
        """
        path = self._file(name)
        if path is None:
            raise UsageError(self._missing(name))
        return path

    def _file(self, name: str) -> Path | None:
        path = self._folder / name if self._folder else None
        return path if path and path.is_file() else None

    def _first(self, pattern: str) -> Path | None:
        return next(iter(sorted(self._folder.glob(pattern))), None) if self._folder else None

    def _texts(self, name: str) -> list[str]:
        paths = sorted((self._folder / name).glob("*.txt")) if self._folder else []
        return [text_of(path) for path in paths]

    def _missing(self, name: str) -> str:
        if self._folder:
            return f"there is no {name} in the data folder {str(self._folder)!r}"
        return f"no data folder is given that holds {name}"

    def _hub(self, name: str, repository: str, split: str, config: str | None = None) -> Iterable[Row]:
        try:
            return hub(repository, split, config)
        except MissingExtra:
            raise
        except Exception as error:  # the hub's client raises errors of a dozen libraries
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            arguments = ", ".join(repr(argument) for argument in (repository, config) if argument)
            raise UsageError(
                f"{self._missing(name)}, and {repository} cannot be loaded from the Hugging Face hub ({reason}); "
                "put the file there, or download the set where there is a network: "
                f"datasets.load_dataset({arguments}, split={split!r})"
            ) from error


def for_training(name: str) -> bool:
    """Return whether an item of an undivided set is for training: a quarter of the items, on every machine the same.

    `name` identifies the item: the title of an article, the first sentence of a story.
    """
    return crc32(name.encode()) % 4 == 0


def hub(repository: str, split: str, config: str | None = None) -> Iterable[Row]:
    """Load the rows of a data set from the Hugging Face hub."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra.extra("datasets", "eval") from error
    rows: Iterable[Row] = load_dataset(repository, config, split=split)
    return rows


def _with_names(rows: Iterable[Row], source: str) -> Iterator[tuple[Row, str]]:
    """Yield each row with its name for error messages."""
    for number, row in enumerate(rows):
        yield row, f"row {number} of {source}"


@contextmanager
def _expected_form(repository: str) -> Iterator[None]:
    """Turn the errors of rows without the expected columns into one that names the data set."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the rows of {repository} on the Hugging Face hub have changed their form ({error!r}); use files"
        ) from error


def _hotpot(row: Row, where: str) -> Question:
    titles = {str(title) for title, _ in pairs(row, "supporting_facts", where)}
    paragraphs = [
        Paragraph(title=str(title), text="".join(_sentences(sentences, where)).strip())
        for title, sentences in pairs(row, "context", where)
    ]
    gold = tuple(paragraph for paragraph in paragraphs if paragraph.title in titles)
    if not gold or len(gold) != len(titles):
        raise UsageError(f"{where}: a paragraph that supporting_facts names is not in context")
    return Question(
        id=string(row, "id", where),
        question=string(row, "question", where),
        answers=(string(row, "answer", where),),
        gold=gold,
        near=tuple(paragraph for paragraph in paragraphs if paragraph.title not in titles),
    )


def _sentences(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise UsageError(f"{where}: the field 'context' has to hold pairs of a title and a list of sentences")
    return value


def _as_in_file(row: Row) -> Row:
    """Convert a row of HotpotQA from the hub's form, with columns, to that of its files, with pairs."""
    facts, context = row["supporting_facts"], row["context"]
    return {
        **row,
        "supporting_facts": list(zip(facts["title"], facts["sent_id"], strict=True)),
        "context": list(zip(context["title"], context["sentences"], strict=True)),
    }


def _musique(row: Row, where: str) -> Question:
    items = row.get("paragraphs")
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise UsageError(f"{where}: the field 'paragraphs' has to be a list of objects")
    paragraphs = [
        Paragraph(title=string(item, "title", where), text=string(item, "paragraph_text", where).strip())
        for item in items
    ]
    supports = [bool(item.get("is_supporting")) for item in items]
    gold = tuple(compress(paragraphs, supports))
    if not gold:
        raise UsageError(f"{where}: none of the paragraphs is supporting")
    aliases = strings(row, "answer_aliases", where) if row.get("answer_aliases") else ()
    return Question(
        id=string(row, "id", where),
        question=string(row, "question", where),
        answers=tuple(dict.fromkeys((string(row, "answer", where), *aliases))),
        gold=gold,
        near=tuple(compress(paragraphs, map(not_, supports))),
    )


def _unique_titles(paragraphs: Iterable[Paragraph]) -> tuple[Paragraph, ...]:
    """Return the first paragraph of each title."""
    by_title: dict[str, Paragraph] = {}
    for paragraph in paragraphs:
        by_title.setdefault(paragraph.title, paragraph)
    return tuple(by_title.values())


def _paragraph(row: Row, where: str) -> Paragraph:
    return Paragraph(title=string(row, "title", where), text=string(row, "text", where).strip())


ParagraphKey = tuple[str, int]
"""The title of an article of SQuAD, and the number of a paragraph in it."""
SquadQuestion = tuple[str, str, tuple[str, ...], ParagraphKey]
"""Id, question, answers, and the paragraph that it is about."""


def _squad_question(row: Row, where: str) -> SquadQuestion | None:
    if row.get("is_impossible"):
        return None
    key = (string(row, "title", where), integer(row, "paragraph", where))
    return string(row, "id", where), string(row, "question", where), strings(row, "answers", where), key


def _squad_paragraph(row: Row, where: str) -> tuple[str, int, str]:
    return string(row, "title", where), integer(row, "paragraph", where), string(row, "context", where).strip()


def _squad_hub(rows: Iterable[Row]) -> tuple[list[SquadQuestion | None], dict[ParagraphKey, str]]:
    """Return the questions, and the text of each paragraph, numbered in the order of the questions."""
    questions: list[SquadQuestion | None] = []
    numbers: dict[tuple[str, str], int] = {}
    for row in rows:
        number = numbers.setdefault((row["title"], row["context"].strip()), len(numbers))
        answers = tuple(row["answers"]["text"])
        questions.append((row["id"], row["question"], answers, (row["title"], number)) if answers else None)
    return questions, {(title, number): text for (title, text), number in numbers.items()}


def _squad(
    rows: Iterable[SquadQuestion | None], texts: Mapping[ParagraphKey, str], source: str
) -> tuple[Question, ...]:
    articles: dict[str, list[Paragraph]] = {}
    paragraphs = {key: Paragraph(title="", text=text) for key, text in texts.items()}
    for (title, _), paragraph in paragraphs.items():
        articles.setdefault(title, []).append(paragraph)
    questions = []
    for id, question, answers, (title, number) in filter(None, rows):
        if (title, number) not in paragraphs:
            raise UsageError(f"{source} has no paragraph {number} of {title!r}, which question {id} is about")
        gold = paragraphs[title, number]
        near = tuple(paragraph for paragraph in articles[title] if paragraph != gold)
        unique = tuple(dict.fromkeys(answers))
        questions.append(Question(id=id, question=question, answers=unique, gold=(gold,), near=near))
    return tuple(questions)


def _stories(path: Path) -> Iterator[Story]:
    sentences: dict[int, str] = {}  # those of the current story, by their numbers in the file
    for number, _, line in lines(path):
        where = where_of(path, number)
        index, _, text = decoded(line, where).strip().partition(" ")
        if not index.isdecimal() or not text:
            raise UsageError(f"{where}: a line of bAbI is a number and a sentence")
        if int(index) == 1:
            sentences = {}
        question, *rest = text.split("\t")
        if not rest:
            sentences[int(index)] = text
            continue
        try:
            answer, numbers = rest
            support = tuple(list(sentences).index(int(number)) for number in numbers.split())
        except ValueError as error:
            raise UsageError(
                f"{where}: a question of bAbI has an answer and the numbers of the sentences that give it, "
                "separated by tabs"
            ) from error
        facts = tuple(sentences.values())
        yield Story(facts=facts, question=question.strip(), answer=answer.strip(), support=support)


def _story(row: Row, where: str) -> Story:
    facts = tuple(line.strip() for line in string(row, "passage", where).splitlines() if line.strip())
    return Story(
        facts=facts,
        question=string(row, "question", where),
        answer=string(row, "answer", where),
        support=tuple(range(len(facts))),
    )

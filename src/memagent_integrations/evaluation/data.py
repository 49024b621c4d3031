"""Read the data sets that the tasks are made from: from a folder, else from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from zlib import crc32

from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.evaluation import forms
from memagent_integrations.evaluation.forms import Paragraph, Question, Story
from memagent_integrations.evaluation.haystacks import Corpus
from memagent_integrations.evaluation.references import Reference, References, longbench
from memagent_integrations.evaluation.rows import Row, each, string, text_of


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
            return tuple(each(path, forms.hotpot))
        repository = "hotpotqa/hotpot_qa"
        rows = self._hub(name, repository, split, "distractor")
        with _expected_form(repository):
            return tuple(forms.hotpot(forms.as_in_file(row), where) for row, where in _with_names(rows, repository))

    @cached_property
    def musique_train(self) -> Sequence[Question]:
        """The questions of MuSiQue (arXiv:2108.00573, training set), of two to four hops, with distractors."""
        pattern, repository = "musique/train*.jsonl", "dgslibisey/MuSiQue"
        path = self._first(pattern)
        if path is not None:
            return tuple(each(path, forms.musique))
        rows = self._hub(pattern, repository, "train")
        return tuple(forms.musique(row, where) for row, where in _with_names(rows, repository))

    @cached_property
    def paragraphs(self) -> Sequence[Paragraph]:
        """Paragraphs of HotpotQA's articles, one for each title."""
        path = self._file("hotpotqa/paragraph_pool.jsonl")
        if path:
            return _unique_titles(each(path, forms.paragraph))
        return _unique_titles(paragraph for question in self.hotpotqa for paragraph in (*question.gold, *question.near))

    @cached_property
    def more_paragraphs(self) -> Sequence[Paragraph]:
        """Paragraphs of 2WikiMultihopQA's articles whose titles are not in `paragraphs`; empty without the file."""
        path = self._file("2wikimultihopqa/corpus.jsonl")
        if path is None:
            return ()
        known = {paragraph.title for paragraph in self.paragraphs}
        return _unique_titles(paragraph for paragraph in each(path, forms.paragraph) if paragraph.title not in known)

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
            rows = [row for row in each(questions, forms.squad_question) if row and for_training(row[3][0]) is training]
            texts = {
                (title, number): text
                for title, number, text in each(paragraphs, forms.squad_paragraph)
                if for_training(title) is training
            }
            return forms.squad(rows, texts, str(paragraphs))
        repository = "rajpurkar/squad_v2"
        hub_rows = self._hub("squad/questions.jsonl and squad/paragraphs.jsonl", repository, split)
        with _expected_form(repository):
            return forms.squad(*forms.squad_of_hub(hub_rows), repository)

    def babi(self, task: int) -> Sequence[Story]:
        """Return the questions of a bAbI task (1 to 20, training set), each with all sentences before it."""
        pattern, repository = f"babi/qa{task}_*_train.txt", "Muennighoff/babi"
        path = self._first(pattern)
        if path is not None:
            return tuple(forms.stories(path))
        rows = self._hub(pattern, repository, "train")
        return tuple(forms.story(row, where) for row, where in _with_names(rows, repository) if row.get("task") == task)

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


def _unique_titles(paragraphs: Iterable[Paragraph]) -> tuple[Paragraph, ...]:
    """Return the first paragraph of each title."""
    by_title: dict[str, Paragraph] = {}
    for paragraph in paragraphs:
        by_title.setdefault(paragraph.title, paragraph)
    return tuple(by_title.values())

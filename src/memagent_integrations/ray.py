"""Many documents on many machines: a Ray dataset of questions and documents, read by a pool of workers."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from memagent_integrations.checks import check_int, check_names
from memagent_integrations.errors import MissingExtra, UsageError
from memagent_integrations.files import OWNERS_FOLDER, accessing
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading
from memagent_integrations.sanitize import encodable

try:
    import pyarrow
    from ray.data import ActorPoolStrategy, Dataset
except ImportError as error:
    raise MissingExtra.extra("ray", "ray") from error

__all__ = ["read_dataset"]

_COLUMNS = {
    "answer": pyarrow.string(),
    "memory": pyarrow.string(),
    "calls": pyarrow.int64(),
    "prompt_tokens": pyarrow.int64(),
    "completion_tokens": pyarrow.int64(),
    "warnings": pyarrow.list_(pyarrow.string()),
    "error_type": pyarrow.string(),
    "error": pyarrow.string(),
}
_READING = {"reading": pyarrow.string()}


def read_dataset(
    dataset: Dataset,
    model: str,
    *,
    question: str = "question",
    document: str = "document",
    load: Callable[[Any], Any] | None = None,
    prefix: str = "",
    readings: bool = False,
    journal_dir: str | Path | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 32,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Dataset:
    """Return the dataset with an answer to each row's question from its document; it is read when it is consumed.

    Each worker is a Ray actor with a `Reader` of its own, whose model is loaded there. Rows keep their columns and get:
    `answer` and `memory`; `calls`, `prompt_tokens` and `completion_tokens` (null if the server does not tell);
    `warnings`, as `Reading.warnings`. A row that cannot be read has no answer, but `error_type` (the class, such as
    "BackendError") and `error` (its text); the other rows are not affected.

    Ray starts a worker that died again, and gives it the rows that it had not finished. With a journal these go on
    after their last recorded step, and so does the whole job when it is run again.

    Args:
        dataset: rows with a question and a document.
        model: a name that `load_backend` knows. A model made in Python cannot be sent to other machines.
        question: the column of the questions.
        document: the column of the documents.
        load: makes a document out of what is in that column, in the worker: `Path` if it holds names of files. Default:
            it holds the text.
        prefix: what the names of the new columns begin with, where the dataset has columns of the same names.
        readings: add a column `reading` too, with the whole reading as JSON (`Reading.from_json`).
        journal_dir: a folder in which every step is recorded, in one journal for each machine, named after it. The
            folder may be on the machines' own disks or shared; a row is found in the journal of the machine that read
            it.
        concurrency: the number of workers, or the least and the most.
        batch_size: how many rows a worker reads together.
        num_cpus: CPUs that a worker reserves; default: Ray's.
        num_gpus: GPUs that a worker reserves, and sees.
        ray_remote_args: more arguments of Ray's actors (`resources`, `runtime_env`, `max_restarts`, ...).
        **settings: the settings of `Reader`, but for `journal`.

    Raises:
        UsageError: a setting is wrong, or the dataset is known to lack a column or to have one of the new ones.
    """
    if not isinstance(dataset, Dataset):
        raise UsageError(f"the rows have to be a dataset, not {type(dataset).__name__}: ray.data.from_items makes one")
    if not isinstance(model, str):
        raise UsageError(
            "the model has to be a name, such as openai:NAME or vllm:NAME: each worker loads a model of its own"
        )
    if "journal" in settings:
        raise UsageError("each machine has a journal of its own: give journal_dir in place of journal")
    check_names(settings, [name for name in signature(Reader).parameters if name not in ("model", "journal")])
    check_int(batch_size=batch_size)
    columns = _Columns(question=question, document=document, prefix=prefix, readings=readings)
    if (names := dataset.columns(fetch_if_missing=False)) is not None:
        columns.check(names)
    return dataset.map_batches(
        _Worker,
        fn_constructor_kwargs={
            "model": model,
            "settings": settings,
            "columns": columns,
            "load": load,
            "journal_dir": Path(journal_dir).absolute() if journal_dir is not None else None,
        },
        batch_format="pyarrow",
        batch_size=batch_size,
        compute=_pool(concurrency),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        **(ray_remote_args or {}),
    )


def _pool(concurrency: int | tuple[int, int]) -> ActorPoolStrategy:
    """Return so many actors, or at least and at most so many."""
    sizes = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    if len(sizes) != 2:
        raise UsageError("concurrency has to be a number of workers, or the least and the most of them")
    least, most = sizes
    check_int(concurrency=least)
    check_int(least=least, concurrency=most)
    return ActorPoolStrategy(min_size=least, max_size=most)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The columns that are read, and those that are added."""

    question: str
    document: str
    prefix: str
    readings: bool

    def check(self, names: Sequence[str]) -> None:
        """Raise a UsageError unless there are the columns to read, and none of those to add."""
        for name in (self.question, self.document):
            if name not in names:
                raise UsageError(
                    f"the dataset has no column {name!r}, but {', '.join(names)}; name it by question= or document="
                )
        for name in self._added:
            if f"{self.prefix}{name}" in names:
                raise UsageError(f"the dataset has a column {self.prefix + name!r} already; give another prefix=")

    @property
    def _added(self) -> dict[str, pyarrow.DataType]:
        return _COLUMNS | (_READING if self.readings else {})

    def questions(self, rows: pyarrow.Table) -> list[str | None]:
        """Return the questions of the rows; raise a UsageError for a column of other values."""
        column = rows.column(self.question)
        types = pyarrow.types
        if not (types.is_string(column.type) or types.is_large_string(column.type) or types.is_null(column.type)):
            raise UsageError(f"the column {self.question!r} has to hold text, not {column.type}")
        return column.to_pylist()  # type: ignore[no-any-return]

    def add(self, rows: pyarrow.Table, readings: Iterable[Reading]) -> pyarrow.Table:
        """Return the rows with what their readings came to."""
        values = [_values(reading) | ({"reading": reading.to_json()} if self.readings else {}) for reading in readings]
        for name, kind in self._added.items():
            rows = rows.append_column(f"{self.prefix}{name}", pyarrow.array([row[name] for row in values], kind))
        return rows


def _values(reading: Reading) -> dict[str, Any]:
    """Return a reading as the values of the added columns."""
    error = reading.error
    values = {
        "answer": reading.answer,
        "memory": reading.memory,
        "calls": len(reading.steps),
        "prompt_tokens": reading.usage.prompt_tokens,
        "completion_tokens": reading.usage.completion_tokens,
        "warnings": list(reading.warnings),
        "error_type": type(error).__name__ if error else None,
        "error": str(error) if error else None,
    }
    return {name: encodable(value) for name, value in values.items()}


class _Worker:
    """One actor: a reader, and what it does with a batch of rows."""

    def __init__(
        self,
        *,
        model: str,
        settings: Mapping[str, Any],
        columns: _Columns,
        load: Callable[[Any], Any] | None,
        journal_dir: Path | None,
    ) -> None:
        self._columns, self._load = columns, load
        self._reader = Reader(model, journal=journal_dir and _journal_file(journal_dir), **settings)
        weakref.finalize(self, self._reader.close)  # when a pool of workers becomes smaller

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """Return the rows with their answers."""
        self._columns.check(rows.column_names)
        questions = [question or "" for question in self._columns.questions(rows)]
        values = rows.column(self._columns.document).to_pylist()
        documents: dict[str, Any] = {}  # equal texts become one document, which is read once for all its questions
        jobs = []
        for question, value in zip(questions, values, strict=True):
            document = self._document(value)
            jobs.append((question, documents.setdefault(value, document) if isinstance(value, str) else document))
        return self._columns.add(rows, self._reader.read_many(jobs))

    def _document(self, value: Any) -> Any:
        return _loaded(self._load, value) if self._load else value


def _loaded(load: Callable[[Any], Any], document: Any) -> Iterator[Any]:
    """Yield the document once it is needed: what fails then is an error of its own row."""
    yield load(document)


def _journal_file(folder: Path) -> Path:
    """Return the file of this machine's journal: SQLite cannot share one between machines."""
    with accessing("write", folder):
        folder.mkdir(OWNERS_FOLDER, parents=True, exist_ok=True)
    return folder / f"{socket.gethostname()}.db"

"""Tasks x lengths x readers: every sample answered and scored once, side by side, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

from memagent_integrations.checks import check_int
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.evaluation.baselines import Contestant
from memagent_integrations.evaluation.diagnostics import cause, traces
from memagent_integrations.evaluation.results import Key, Result, Results
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.tokens import Counter

Told = Callable[[Result], None]
_DOWN = 10  # samples in a row, for each that is answered at a time, whose failures mean that all would fail
_MOST = 1_000_000  # samples of a task: a list of more jobs than that is no use to anybody


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sample for one reader."""

    task: Task
    length: int
    reader: str
    number: int

    @property
    def key(self) -> Key:
        """That of its result."""
        return self.task.name, self.length, self.reader, self.number


def jobs(tasks: Sequence[Task], readers: Sequence[str], samples: int) -> list[Job]:
    """All that a run does: `samples` of each task at each of its lengths, by each reader. Documents that are as long as they are have length 0.

    The first samples come first: what cannot be done at all is found out before the hours of the others.

    Raises:
        UsageError: a task has no lengths, or a number is wrong.
    """
    check_int(most=_MOST, samples=samples)
    found: list[Job] = []
    for task in tasks:
        lengths = (0,) if task.unit is None else task.lengths
        if not lengths:
            raise UsageError(f"the task {task.name} needs lengths")
        for length in lengths:
            check_int(0 if task.unit is None else 1, length=length)
        number = samples if task.size is None else min(samples, task.size)
        found += [
            Job(task=task, length=length, reader=reader, number=n)
            for length in lengths
            for n in range(number)
            for reader in readers
        ]
    return sorted({job.key: job for job in found}.values(), key=lambda job: job.number > 0)


def evaluate(
    todo: Sequence[Job],
    contestants: Mapping[str, Contestant],
    results: Results,
    *,
    seed: int,
    count: Counter,
    concurrency: int = 1,
    told: Told | None = None,
) -> None:
    """Answer and score what is not in the results yet; each result is on the disk before it is told.

    A reader that fails gives a result with `error`, which scores 0. Whatever ends the run, Ctrl-C or `told` raising, the samples under way are
    waited for and kept.

    Raises:
        UsageError: a setting is wrong, or the file is being written by another run.
        BackendError: one sample after the other fails for a reason that may pass; the model's server is down, and the rest would fail too.
    """
    check_int(concurrency=concurrency)
    left = (job for job in todo if job.key not in results)
    stop, failing = threading.Event(), 0

    def answered(job: Job) -> Result:
        if stop.is_set():
            raise CancelledError
        return _answered(job, contestants[job.reader], seed, count)

    with results.writing(), ThreadPoolExecutor(concurrency, thread_name_prefix="memagent-eval") as pool:
        running: set[Future[Result]] = set()
        try:
            while running := running | {
                pool.submit(answered, job) for job in islice(left, 2 * concurrency - len(running))
            }:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    running.remove(future)
                    results.add(result := future.result())
                    if told:
                        told(result)
                    failing = failing + 1 if result.passing else 0
                    if failing == _DOWN * concurrency:
                        raise BackendError(
                            f"{failing} samples in a row failed, the last one because {result.error}; the same command goes on"
                        )
        finally:
            stop.set()
            for future in running:
                if not future.exception():
                    results.add(future.result())


def _answered(job: Job, contestant: Contestant, seed: int, count: Counter) -> Result:
    sample = job.task.make(job.length, seed, job.number, count)
    outcome = contestant.answer(sample)
    answer, reading = outcome.answer, outcome.reading
    score = 0.0 if answer is None else job.task.score(answer, sample)
    traced = traces(reading, sample) if reading else ()
    return Result(
        task=job.task.name,
        length=job.length,
        reader=job.reader,
        number=job.number,
        score=score,
        answer=answer,
        error=outcome.error,
        passing=outcome.passing,
        question=sample.question,
        answers=sample.answers,
        facts=sample.facts,
        calls=outcome.calls,
        usage=outcome.usage,
        seconds=outcome.seconds,
        details={**sample.details, **outcome.details},
        reading=reading,
        traces=traced,
        cause=cause(reading, traced) if reading and score < 1 else None,
    )

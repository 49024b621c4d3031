"""Tasks x lengths x readers: every sample answered and scored once, side by side, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.baselines import Contestant
from memagent_integrations.evaluation.diagnostics import cause, traces
from memagent_integrations.evaluation.results import Key, Result, Results
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.settings import check_int
from memagent_integrations.tokens import Counter

Told = Callable[[Result], None]


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

    Raises:
        UsageError: a task has no lengths, or a number is wrong.
    """
    check_int(samples=samples)
    found: list[Job] = []
    for task in tasks:
        lengths = (0,) if task.unit is None else task.lengths
        if not lengths:
            raise UsageError(f"the task {task.name} needs lengths")
        for length in lengths:
            check_int(0 if task.unit is None else 1, length=length)
        number = samples if task.size is None else min(samples, task.size)
        found += [Job(task=task, length=length, reader=reader, number=n) for length in lengths for n in range(number) for reader in readers]
    return found


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

    A reader that fails gives a result with `error`, which scores 0. Ctrl-C, or `told` raising, ends the run when the samples under way are done
    with; what was finished is kept.

    Raises:
        UsageError: a setting is wrong, or the file is being written by another run.
    """
    check_int(concurrency=concurrency)
    left = (job for job in todo if job.key not in results)
    stop = threading.Event()

    def answered(job: Job) -> Result:
        if stop.is_set():
            raise CancelledError
        return _answered(job, contestants[job.reader], seed, count)

    with results.writing(), ThreadPoolExecutor(concurrency, thread_name_prefix="memagent-eval") as pool:
        try:
            running = {pool.submit(answered, job) for job in islice(left, 2 * concurrency)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for result in [future.result() for future in done]:
                    results.add(result)
                    if told:
                        told(result)
                running |= {pool.submit(answered, job) for job in islice(left, len(done))}
        finally:
            stop.set()


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

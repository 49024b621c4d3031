"""Run tasks x lengths x readers: each sample is answered and scored once, several at a time, and survives failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

from memagent_integrations.backends.gate import Gate
from memagent_integrations.checks import check_int
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.evaluation.baselines import Contestant
from memagent_integrations.evaluation.diagnostics import cause, traces
from memagent_integrations.evaluation.results import Key, Result, Results
from memagent_integrations.evaluation.samples import Task
from memagent_integrations.tokens import Counter, cut

OnResult = Callable[[Result], None]
_MAX_FAILURES_IN_A_ROW = 10  # per worker: then the server is down, and the other samples would fail too
_MAX_SAMPLES = 1_000_000  # per task: a longer list of jobs is a mistake


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sample for one reader."""

    task: Task
    length: int
    reader: str
    number: int

    @property
    def key(self) -> Key:
        """The key of its result."""
        return self.task.name, self.length, self.reader, self.number


def jobs(tasks: Sequence[Task], readers: Sequence[str], samples: int) -> list[Job]:
    """Return all jobs of a run: `samples` of each task at each of its lengths, for each reader.

    Tasks whose documents have lengths of their own get length 0. The first sample of everything comes first, so that
    what cannot work fails before hours are spent on the rest.

    Raises:
        UsageError: a task has no lengths, or a number is wrong.
    """
    check_int(most=_MAX_SAMPLES, samples=samples)
    todo: list[Job] = []
    for task in tasks:
        lengths = (0,) if task.unit is None else task.lengths
        if not lengths:
            raise UsageError(f"the task {task.name} needs lengths")
        for length in lengths:
            check_int(0 if task.unit is None else 1, length=length)
        size = samples if task.size is None else min(samples, task.size)
        todo += [
            Job(task=task, length=length, reader=reader, number=number)
            for length in lengths
            for number in range(size)
            for reader in readers
        ]
    return sorted({job.key: job for job in todo}.values(), key=lambda job: job.number > 0)


def evaluate(
    todo: Sequence[Job],
    contestants: Mapping[str, Contestant],
    results: Results,
    *,
    seed: int,
    count: Counter,
    concurrency: int = 1,
    gate: Gate | None = None,
    on_result: OnResult | None = None,
) -> None:
    """Answer and score the jobs that have no result yet. `on_result` is called after a result has reached the disk.

    A reader that fails gives a result with `error`, which scores 0. However the run ends (Ctrl-C, an error of
    `on_result`), the samples in progress are finished and kept. With a `gate`, for all jobs without a result, the calls
    of those in progress are made together; when the run ends early, these are given up.

    Raises:
        UsageError: a setting is wrong, or another run is writing to the file.
        BackendError: one sample after another fails for a temporary reason: the model's server is down.
    """
    check_int(concurrency=concurrency)
    remaining = (job for job in todo if job.key not in results)
    stop, failures = threading.Event(), 0

    def run(job: Job) -> Result:
        with gate.member() if gate else nullcontext():
            if stop.is_set():
                raise CancelledError
            result = _result(job, contestants[job.reader], seed, count)
            if gate and stop.is_set():  # its calls may have been given up
                raise CancelledError
            return result

    with results.writing(), ThreadPoolExecutor(concurrency, thread_name_prefix="memagent-eval") as pool:
        running: set[Future[Result]] = set()
        try:
            while True:
                running |= {pool.submit(run, job) for job in islice(remaining, 2 * concurrency - len(running))}
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    running.remove(future)
                    results.add(result := future.result())
                    if on_result:
                        on_result(result)
                    failures = failures + 1 if result.passing else 0
                    if failures == _MAX_FAILURES_IN_A_ROW * concurrency:
                        raise BackendError(
                            f"{failures} samples in a row failed, the last one because {result.error}; "
                            "the same command goes on"
                        )
        finally:
            stop.set()
            if gate:
                gate.stop()
            for future in running:
                if not future.exception():
                    results.add(future.result())


def _result(job: Job, contestant: Contestant, seed: int, count: Counter) -> Result:
    sample = job.task.make(job.length, seed, job.number, count)
    outcome = contestant.answer(sample)
    answer, reading, limit = outcome.answer, outcome.reading, job.task.answer_tokens
    if answer is not None and limit is not None:
        answer = cut(answer, limit, count)
    score = 0.0 if answer is None else job.task.score(answer, sample, reply=outcome.reply)
    details = {**sample.details, **outcome.details}
    if answer != outcome.answer:
        details["answer_tokens"] = limit
    traced = traces(reading, sample) if reading else ()
    return Result(
        task=job.task.name,
        length=job.length,
        reader=job.reader,
        number=job.number,
        metric=job.task.metric_of(sample),
        score=score,
        answer=answer,
        error=outcome.error,
        passing=outcome.passing,
        too_long=outcome.too_long,
        question=sample.question,
        answers=sample.answers,
        facts=sample.facts,
        calls=outcome.calls,
        usage=outcome.usage,
        seconds=outcome.seconds,
        details=details,
        reading=reading,
        traces=traced,
        cause=cause(reading, traced) if reading and score < 1 else None,
    )

"""`memagent read` with several questions: one pass over the files, and which answer belongs to which question."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from memagent_integrations.checks import check_question
from memagent_integrations.cli import inputs
from memagent_integrations.cli.cited import cited
from memagent_integrations.cli.progress import cost_of, counted
from memagent_integrations.cli.streams import one_line, show, tell, write
from memagent_integrations.errors import MemAgentError, UsageError
from memagent_integrations.reader import Reader
from memagent_integrations.records import Reading, Step

_FOR_ONE = {
    "--stream": "the answers to several questions are written side by side",
    "--watch": "each question has a memory of its own",
    "--trace": "it saves one reading; --json writes that of each question, and --journal records them",
    "--run": "it names one reading; with --journal alone each question's is recorded under a name of its own",
    "--memory": "a named memory is carried on by one reading after the other; --memory-text can be given",
}


def check(questions: Sequence[str], **options: object) -> None:
    """Raise a UsageError for what cannot be done with several questions; `options` are those given, by their names."""
    for question in questions:
        check_question(question)
    for name, value in options.items():
        if value not in (None, False):
            option = f"--{name}"
            raise UsageError(f"{option} is for a single question (-q): {_FOR_ONE[option]}")


def ask(reader: Reader, questions: Sequence[str], files: Sequence[str], *, memory: str, quiet: bool) -> list[Reading]:
    """Read the files once for all questions, and show the progress."""
    began, total = time.monotonic(), None
    if not quiet and inputs.rereadable(files):
        with suppress(MemAgentError):  # the readings say what is wrong
            total = sum(plan.calls for plan in reader.plans(questions, inputs.document(files)))
    noted = [0] * len(questions)
    with counted("reading", total, quiet=quiet) as notify:

        def on_step(number: int, step: Step) -> None:
            noted[number] += 1
            what = f"chunk {noted[number]}" if step.span and not step.span.merge else "memories merged"
            if step.phase == "answer":
                what = "answer" if step.is_answer else "the memory does not suffice, read once more"
            notify(f"question {number + 1}: {what}", f"question {number + 1} of {len(questions)}: {what}")

        readings = reader.ask(questions, inputs.document(files), memory=memory, progress=on_step)
    if not quiet:
        tell(f"answered {sum(not one.error for one in readings)} questions {cost_of(readings, began)}")
    return readings


def write_answers(readings: Sequence[Reading], files: Sequence[str], *, as_json: bool, citations: bool) -> None:
    """Write the answers, each under its question as `head` writes files; as JSON, one reading on each line.

    Raises:
        MemAgentError: the error of the first reading that has failed, once the others are written.
    """
    answered = readings if as_json else [reading for reading in readings if not reading.error]
    for number, reading in enumerate(answered):
        for warning in reading.warnings:
            tell(f"warning: {reading.question}: {warning}")
        if as_json:
            write(reading.to_json())
            continue
        if number:
            show("")
        show(f"==> {one_line(reading.question)} <==")
        write(reading.answer or "")
        if citations and (places := list(cited(reading, files))):
            show("\n".join(["", *places]))
    errors = [(reading.question, reading.error) for reading in readings if reading.error]
    for question, error in errors:
        other = f" ({error})" if str(error) != str(errors[0][1]) else ""
        tell(f"no answer to: {question}{other}")
    if errors:
        raise errors[0][1]

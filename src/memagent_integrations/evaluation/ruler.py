"""Prompts and lengths as RULER (arXiv:2404.06654) has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from memagent_integrations.errors import UsageError
from memagent_integrations.evaluation.baselines.prompts import plain
from memagent_integrations.evaluation.samples import Sample, Task
from memagent_integrations.tokens import Counter

LengthOf = Literal["document", "prompt"]


def with_example(task: Task) -> Task:
    """Return the task with its example behind each question; a task without one as it is."""
    example = task.example
    if example is None:
        return task

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        sample = task.make(length, seed, number, count)
        return replace(sample, question=f"{sample.question}\n\n{example(seed, number)}")

    return replace(task, make=make)


def of_prompt(task: Task) -> Task:
    """Return the task with shorter documents, so that a length is that of a prompt with room for the answer.

    The prompt is that of the readers that make one call, with the question; the room is the task's
    `answer_tokens`.

    Raises:
        UsageError: the lengths of the task are not in tokens.
    """
    if task.unit != "tokens":
        raise UsageError(f"the lengths of {task.name} are not in tokens, so they cannot be those of prompts")

    def make(length: int, seed: int, number: int, count: Counter) -> Sample:
        question = task.make(length, seed, number, count).question
        around = sum(count(message.content) for message in plain(question, "")) + (task.answer_tokens or 0)
        if around >= length:
            raise UsageError(
                f"the prompt of {task.name} without a document has {around} tokens, and {length} are given"
            )
        sample = task.make(length - around, seed, number, count)
        return replace(sample, details={**sample.details, "document_tokens": length - around})

    return replace(task, make=make)

"""Training sets of scripted models, also for processes that are killed while they make one."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from itertools import count as numbers
from pathlib import Path
from typing import Any

from memagent_integrations import Reader, ScriptedBackend
from memagent_integrations.evaluation.data import Data
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Prompt
from memagent_integrations.training.data import Filters, OnQuestion, State, TrainingSet, build, made_with
from memagent_integrations.training.mixture import Mixture, Part

VT = Mixture(parts=(Part(name="vt", lengths=(300, 500)),))
NONE = Filters(without_context=0)


def reader(script: Callable[[Prompt], Any], **options: Any) -> Reader:
    return Reader(
        ScriptedBackend(script, **options),
        prompts=PromptSet.default(answer_format="boxed"),
        chunk_tokens=400,
        memory_tokens=64,
    )


def make(
    path: Path,
    mixture: Mixture,
    model: Reader,
    rows: int,
    filters: Filters = NONE,
    seed: int = 0,
    on_question: OnQuestion | None = None,
) -> State:
    into = TrainingSet(path, made_with(mixture, seed, model, filters))
    return build(
        into, mixture, rows=rows, seed=seed, data=Data(), reader=model, filters=filters, on_question=on_question
    )


def knowing(prompt: Prompt) -> str:
    """Reply as a model that knows a third of the values, always the same ones."""
    content = prompt.messages[0].content
    known = random.Random(content).random() < 0.3
    return "\\boxed{" + (", ".join(_values(content)) if known else "none") + "}"


def _values(content: str) -> list[str]:
    question = content.split("<question>\n")[1].split("\n</question>")[0]
    for number in numbers():
        drawn = VT.draw(number, seed=0, share=1, data=Data(), count=ScriptedBackend([]).count)
        if drawn.sample.question == question:
            return list(drawn.sample.answers)
    raise AssertionError


if __name__ == "__main__":
    make(
        Path(sys.argv[1]), VT, reader(knowing), 40, Filters(without_context=1), on_question=lambda *_: time.sleep(0.005)
    )

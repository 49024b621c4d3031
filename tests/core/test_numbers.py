"""True is no number, whichever way a setting comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memagent_integrations import (
    Budgets,
    Limits,
    MemAgentReader,
    MemAgentSynthesizer,
    PromptSet,
    Reader,
    ScriptedBackend,
    UsageError,
    policies,
)

SIZES = ("chunk_tokens", "memory_tokens", "question_tokens", "output_tokens", "overlap_tokens")


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", [*SIZES, "window"])
@pytest.mark.parametrize("make", [Reader, MemAgentReader, MemAgentSynthesizer])
def test_a_reader_takes_no_bool_for_a_number(make: Any, name: str, value: bool) -> None:
    with pytest.raises(UsageError, match=rf"{name}:? has to be a (whole )?number.*, not {value}"):
        make(ScriptedBackend([]), **{name: value})


@pytest.mark.parametrize("name", SIZES)
def test_budgets_of_a_policy_take_no_bool_for_a_number(name: str, tmp_path: Path) -> None:
    policies.save(policies.Policy(model="openai:m", prompts=PromptSet.default(), budgets=Budgets()), tmp_path)
    file = tmp_path / policies.FILE
    policy = json.loads(file.read_text())
    policy["budgets"][name] = True
    file.write_text(json.dumps(policy))
    with pytest.raises(UsageError, match=f"budgets {name}: has to be a number, not True"):
        policies.load(tmp_path)


@pytest.mark.parametrize("name", ["call_timeout", "run_timeout", "max_retries", "retry_ratio", "breaker_threshold"])
def test_limits_take_no_bool_for_a_number(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*not True"):
        MemAgentReader(ScriptedBackend([]), limits={name: True})
    with pytest.raises(UsageError, match=f"{name}.*not True"):
        Limits(**{name: True})  # type: ignore[arg-type]


def test_numbers_are_taken_as_before() -> None:
    MemAgentReader(ScriptedBackend([]), chunk_tokens=500, overlap_tokens=0, window=9000, limits={"max_retries": 0})

from __future__ import annotations

import pytest

from memagent_integrations.records import Prompt
from memagent_integrations.schedule import AHEAD, Schedule, Task


def taken(schedule: Schedule, places: int = 100) -> list[int]:
    """Take as many tasks as there are, at most `places`; return their numbers."""
    numbers = []
    while len(numbers) < places and (task := schedule.take()):
        numbers.append(task.number)
    return numbers


def advance(schedule: Schedule, task: Task | None) -> None:
    assert task
    schedule.put_back(task, task.steps + 1)


def test_the_reading_that_has_come_least_far_is_next() -> None:
    schedule = Schedule(["document"] * 3)
    order = []
    for _ in range(7):
        task = schedule.take()
        assert task
        order.append((task.number, task.steps))
        advance(schedule, task)
    assert order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]


def test_documents_are_read_to_their_end_and_the_next_one_fills_a_free_place() -> None:
    schedule = Schedule(["a", "b", "c"])
    assert taken(schedule, 2) == [0, 1]
    for number in (0, 1, 0, 1):
        advance(schedule, schedule.tasks[number])
        assert schedule.take() is schedule.tasks[number]
    schedule.remove(schedule.tasks[0])
    assert taken(schedule) == [2]


def test_no_reading_runs_far_ahead_of_one_that_is_held_up() -> None:
    schedule = Schedule(["document"] * 3)
    slow, *_ = schedule.tasks
    assert schedule.take() is slow
    steps = 0
    while task := schedule.take():
        advance(schedule, task)
        steps += 1
    assert steps == 2 * (AHEAD + 1)
    advance(schedule, slow)
    assert taken(schedule) == [0, 1, 2]


def test_a_document_that_is_held_up_leaves_its_places_to_others() -> None:
    schedule = Schedule(["a", "a", "b"], leading=True)
    assert taken(schedule) == [0, 2]
    schedule.opened(schedule.tasks[0])
    assert taken(schedule) == [1]


def test_the_longest_documents_are_begun_first_and_unknown_ones_before_them() -> None:
    assert taken(Schedule("abcd", lengths=[1, 3, float("inf"), 2])) == [2, 1, 3, 0]
    assert taken(Schedule("abab", lengths=[1, 3, 1, 3])) == [1, 3, 0, 2]
    assert taken(Schedule("abc")) == [0, 1, 2]


def test_the_first_call_about_a_section_goes_ahead() -> None:
    schedule = Schedule(["document"] * 3, leading=True)
    first, second, third = schedule.tasks
    assert taken(schedule) == [0]
    assert first.leads
    schedule.opened(first)
    assert taken(schedule) == [1, 2]
    assert not second.leads
    advance(schedule, first)
    assert taken(schedule) == [0], "leads the next section while the others are at this one"
    assert first.leads
    advance(schedule, second)
    advance(schedule, third)
    assert taken(schedule) == []
    schedule.opened(first)
    assert taken(schedule) == [1, 2]


@pytest.mark.parametrize("ends", [True, False])
def test_a_reading_that_made_no_call_leads_nobody(ends: bool) -> None:
    schedule = Schedule(["document"] * 2, leading=True)
    first, second = schedule.tasks
    assert taken(schedule) == [0]
    if ends:
        schedule.remove(first)
    else:
        advance(schedule, first)
    assert schedule.take() is second
    assert second.leads


def test_readings_that_share_no_document_lead_nobody() -> None:
    schedule = Schedule("ab", leading=True)
    assert taken(schedule) == [0, 1]
    assert not any(task.leads for task in schedule.tasks)


def test_a_schedule_ends_with_its_readings() -> None:
    schedule = Schedule(["a", "a", "b"])
    while task := schedule.take():
        assert not schedule.done
        schedule.remove(task)
    assert schedule.done
    assert Schedule([]).done


def test_the_time_that_a_reading_waits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 107.0])
    monkeypatch.setattr("memagent_integrations.schedule.time.monotonic", lambda: next(clock))
    schedule = Schedule(["document"])
    task = schedule.take()
    advance(schedule, task)
    assert schedule.take() is task
    assert task
    prompt = Prompt(index=0, phase="memory", messages=(), max_tokens=1, deadline=50.0)
    assert task.paused == 7.0
    assert task.resumed(prompt).deadline == 57.0
    assert task.resumed(prompt).deadline == 50.0, "asked again at once"

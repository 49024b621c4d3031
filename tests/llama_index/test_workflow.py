from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_workflow import QUESTION, SIZES, TEXT, WorkflowModel, events_until, memory_in, restored
from llama_index.core.workflow import Context, HumanResponseEvent
from workflows.errors import WorkflowCancelledByUser

from memagent_integrations import BackendError, Limits, ScriptedBackend, UsageError
from memagent_integrations.llama_index.workflow import (
    MemAgentReview,
    MemAgentReviewed,
    MemAgentState,
    MemAgentStepEvent,
    MemAgentWorkflow,
)
from memagent_integrations.records import Prompt, Reply


async def result_of(handler: Any) -> Any:
    return await handler


async def test_a_reference_is_a_path_by_default(tmp_path: Path) -> None:
    path, model = tmp_path / "log.txt", WorkflowModel()
    path.write_text(TEXT, encoding="utf-8")
    assert str(await model.workflow(load=Path).run(question=QUESTION, document=path)) == "fair"
    with pytest.raises(UsageError):
        await model.workflow(load=Path).run(question=QUESTION, document=str(tmp_path / "none.txt"))


async def test_the_context_holds_a_reference_and_not_the_document() -> None:
    handler = WorkflowModel().workflow().run(question=QUESTION, document="log")
    await events_until(handler, lambda event: isinstance(event, MemAgentStepEvent) and event.number == 3)
    saved = json.dumps(handler.ctx.to_dict())
    assert "Day 1 " not in saved
    assert len(saved) < 6000
    await handler


async def test_a_context_goes_on_in_another_workflow_from_any_moment() -> None:
    """The context is saved at every turn of the event loop; each copy resumes, and makes the unfinished calls."""
    model = WorkflowModel()
    kept: dict[str, int] = {}
    handler = model.workflow().run(question=QUESTION, document="log")

    running = asyncio.create_task(result_of(handler))
    while not running.done():
        kept[json.dumps(handler.ctx.to_dict())] = len(model.calls)
        await asyncio.sleep(0)
    assert len(kept) > 7
    for saved, calls in kept.items():
        other, state = WorkflowModel(), json.loads(saved)
        if not state["is_running"]:
            continue
        workflow = other.workflow()
        context = Context.from_dict(workflow, state)
        before = (await context.store.get_state()) if state["state"] else MemAgentState()
        finished = len(before.steps)
        assert calls - finished <= 1, "at most the call under way is not in the context"
        result = await workflow.run(ctx=context)
        assert (result.answer, len(result.steps), len(other.calls)) == ("fair", 7, 7 - finished)
        assert result.steps[:finished] == before.steps


@pytest.mark.parametrize("number", [1, 3, 7])
async def test_a_run_that_failed_goes_on_with_its_context(number: int) -> None:
    model = WorkflowModel(number)
    workflow = model.workflow()
    handler = workflow.run(question=QUESTION, document="log")
    with pytest.raises(BackendError, match="down"):
        await handler
    assert len(model.calls) == number
    elsewhere = model.workflow()
    result = await elsewhere.run(ctx=restored(elsewhere, handler.ctx))
    assert (str(result), len(result.steps)) == ("fair", 7)
    assert model.phases == ["memory"] * (7 if number < 7 else 6) + ["answer"] * (1 if number < 7 else 2)


async def test_a_failed_context_goes_on_in_the_same_workflow_too() -> None:
    model = WorkflowModel(2, 4)
    workflow = model.workflow()
    handler = workflow.run(question=QUESTION, document="log")
    for _ in range(2):
        with pytest.raises(BackendError):
            await handler
        handler = workflow.run(ctx=handler.ctx, question=QUESTION, document="log")
    assert str(await handler) == "fair"
    assert len(model.calls) == 9


async def test_a_cancelled_run_goes_on() -> None:
    model = WorkflowModel()
    workflow = model.workflow()
    handler = workflow.run(question=QUESTION, document="log")
    await events_until(handler, lambda event: isinstance(event, MemAgentStepEvent) and event.number == 2)
    await handler.cancel_run()
    with pytest.raises(WorkflowCancelledByUser):
        await handler
    calls = len(model.calls)
    result = await workflow.run(ctx=restored(workflow, handler.ctx))
    assert len(result.steps) == 7
    assert len(model.calls) <= calls + 7 - 2


async def test_another_question_in_the_same_context_begins_anew() -> None:
    model = WorkflowModel()
    workflow = model.workflow()
    handler = workflow.run(question=QUESTION, document="log")
    await handler
    for question in ("Was it wet?", "Was it wet?"):  # a reading that is complete is read again
        handler = workflow.run(ctx=handler.ctx, question=question, document="log")
        assert len((await handler).steps) == 7
    assert len(model.calls) == 21
    assert "Was it wet?" in model.calls[-1].messages[0].content
    assert memory_in(model.calls[7]) == memory_in(model.calls[0])


async def test_a_person_may_change_the_memory() -> None:
    model = WorkflowModel()
    handler = model.workflow(ask_every=2).run(question=QUESTION, document="log")
    shown: list[MemAgentReview] = []
    async for event in handler.stream_events():
        if isinstance(event, MemAgentReview):
            shown.append(event)
            handler.ctx.send_event(MemAgentReviewed(memory="It never rained." if event.number == 2 else None))
    result = await handler
    assert [(event.number, event.memory, event.question) for event in shown] == [
        (n, f"note {n}", QUESTION) for n in (2, 4, 6)
    ]
    assert [memory_in(prompt) for prompt in model.calls[1:5]] == ["note 1", "It never rained.", "note 3", "note 4"]
    assert str(result) == "fair"


async def test_of_two_answers_to_a_review_the_first_counts() -> None:
    model = WorkflowModel()
    handler = model.workflow(ask_every=1).run(question=QUESTION, document="log")
    reviews = []
    async for event in handler.stream_events():
        if isinstance(event, MemAgentReview):
            reviews.append(event.number)
            for memory in ("first", "second") if event.number == 1 else (None,):
                handler.ctx.send_event(MemAgentReviewed(memory=memory, number=event.number))
    await handler
    assert reviews == list(range(1, len(reviews) + 1))
    assert len(model.calls) == len(reviews) + 1
    assert memory_in(model.calls[1]) == "first"


async def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    model = WorkflowModel()
    handler = model.workflow(ask_every=3).run(question=QUESTION, document="log")
    async for event in handler.stream_events():
        if isinstance(event, MemAgentStepEvent) and event.number == 1:
            handler.ctx.send_event(MemAgentReviewed(memory="too early"))
        if isinstance(event, MemAgentReview):
            handler.ctx.send_event(MemAgentReviewed(memory="of another review", number=event.number - 1))
            handler.ctx.send_event(MemAgentReviewed(memory="first", number=event.number))
            handler.ctx.send_event(MemAgentReviewed(memory="second", number=event.number))
    result = await handler
    assert [memory_in(prompt) for prompt in model.calls if prompt.phase == "memory"][1:] == [
        "note 1",
        "note 2",
        "first",
        "note 4",
        "note 5",
    ]
    assert (result.memory, len(model.calls)) == ("first", 7)


async def test_a_memory_that_is_too_long_is_asked_for_again() -> None:
    model = WorkflowModel()
    handler = model.workflow(ask_every=5).run(question=QUESTION, document="log")
    problems: list[str] = []
    async for event in handler.stream_events():
        if isinstance(event, MemAgentReview):
            problems.append(event.problem)
            handler.ctx.send_event(MemAgentReviewed(memory="fair" if event.problem else "word " * 50))
    await handler
    assert problems[0] == ""
    assert "its budget is 20" in problems[1]
    assert memory_in(model.calls[5]) == "fair"


async def test_what_a_person_wrote_outlives_a_failure() -> None:
    model = WorkflowModel(3)
    workflow = model.workflow(ask_every=2)
    handler = workflow.run(question=QUESTION, document="log")
    await events_until(handler, lambda event: isinstance(event, MemAgentReview))
    handler.ctx.send_event(MemAgentReviewed(memory="It never rained."))
    with pytest.raises(BackendError):
        await handler
    resumed = workflow.run(ctx=restored(workflow, handler.ctx))
    await events_until(resumed, lambda event: isinstance(event, MemAgentReview))
    assert memory_in(model.calls[3]) == "It never rained."
    await resumed.cancel_run()


async def test_a_document_that_changed_is_not_read_on() -> None:
    model = WorkflowModel(4)
    handler = model.workflow().run(question=QUESTION, document="log")
    with pytest.raises(BackendError):
        await handler
    for workflow in (
        model.workflow(load=lambda _: TEXT.replace("fair", "wet")),
        model.workflow(chunk_tokens=80),
        model.workflow(load=lambda _: "Day"),
    ):
        with pytest.raises(UsageError, match=r"not what was read|the document ends"):
            await workflow.run(ctx=restored(workflow, handler.ctx))


async def test_many_runs_of_one_workflow_do_not_wait_for_each_other() -> None:
    together = asyncio.Barrier(8)

    class Meeting(ScriptedBackend):
        async def acomplete(self, prompt: Prompt) -> Reply:
            async with asyncio.timeout(30):  # one after the other, they would never meet
                await together.wait()
            return self.complete(prompt)

    workflow = MemAgentWorkflow(
        llm=Meeting(lambda prompt: "fair", concurrency=8), load={"log": TEXT}.__getitem__, **SIZES
    )
    results = await asyncio.gather(
        *(workflow.run(question=f"{QUESTION} {number}", document="log") for number in range(8))
    )
    assert [str(result) for result in results] == ["fair"] * 8


async def test_loading_does_not_block_the_event_loop() -> None:
    go = threading.Event()

    def load(_: str) -> str:
        assert go.wait(30), "the event loop came to set it"
        return "Day 1 was fair."

    handler = WorkflowModel().workflow(load=load).run(question=QUESTION, document="log")
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await result_of(handler)


@pytest.mark.parametrize(
    ("start", "load", "message"),
    [
        ({}, None, "needs a question and a document"),
        ({"question": QUESTION}, None, "needs a question and a document"),
        ({"question": " ", "document": "log"}, None, "the question is empty"),
        ({"question": QUESTION, "document": "log"}, lambda _: " \n", "the document is empty"),
        ({"question": QUESTION, "document": "log"}, lambda _: 7, "cannot read|document"),
    ],
)
async def test_what_cannot_be_read(start: dict[str, str], load: Any, message: str) -> None:
    model = WorkflowModel()
    with pytest.raises(UsageError, match=message):
        await model.workflow(**({"load": load} if load else {})).run(**start)
    assert not model.calls


async def test_an_async_iterator_is_refused() -> None:
    async def pages() -> Any:
        yield "Day"

    with pytest.raises(UsageError, match="async iterator"):
        await WorkflowModel().workflow(load=lambda _: pages()).run(question=QUESTION, document="log")


def test_settings_are_checked() -> None:
    for options, message in [
        ({"ask_every": 0}, "ask_every"),
        ({"journal": "runs.db"}, "journal"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ]:
        with pytest.raises(UsageError, match=message):
            WorkflowModel().workflow(**options)


@pytest.mark.parametrize("answer", [HumanResponseEvent(response="fine"), MemAgentReviewed(number=99)])  # type: ignore[call-arg]
async def test_an_answer_that_cannot_be_taken_is_asked_for_anew(answer: HumanResponseEvent) -> None:
    model = WorkflowModel()
    handler = model.workflow(ask_every=1).run(question=QUESTION, document="log")
    await events_until(handler, lambda event: isinstance(event, MemAgentReview))
    handler.ctx.send_event(answer)
    *_, review = await events_until(handler, lambda event: isinstance(event, MemAgentReview))
    assert review.problem == "answer with MemAgentReviewed, for chunk 1"
    handler.ctx.send_event(MemAgentReviewed(memory="It never rained."))
    await events_until(handler, lambda event: isinstance(event, MemAgentReview))
    assert memory_in(model.calls[1]) == "It never rained."
    await handler.cancel_run()


async def test_what_load_raises_is_the_documents_failure() -> None:
    def load(name: str) -> str:
        raise KeyError(name)

    with pytest.raises(UsageError, match="reading the document failed: KeyError: 'log'"):
        await WorkflowModel().workflow(load=load).run(question=QUESTION, document="log")


def test_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="load has to be a function"):
        WorkflowModel().workflow(load=None)
    with pytest.raises(UsageError, match="run_timeout bounds a reading in one call"):
        WorkflowModel().workflow(limits=Limits(run_timeout=5))


async def test_a_document_is_no_reference() -> None:
    with pytest.raises(UsageError, match="document has to be a small reference") as caught:
        await WorkflowModel().workflow().run(question=QUESTION, document=TEXT * 100)
    assert TEXT not in str(caught.value)


async def test_an_open_review_is_shown_again_where_its_context_goes_on() -> None:
    model = WorkflowModel()
    workflow = model.workflow(ask_every=2)
    handler = workflow.run(question=QUESTION, document="log")
    *_, first = await events_until(handler, lambda event: isinstance(event, MemAgentReview))
    resumed = workflow.run(ctx=restored(workflow, handler.ctx))
    *_, shown = await events_until(resumed, lambda event: isinstance(event, MemAgentReview))
    assert (shown.number, shown.memory) == (first.number, first.memory) == (2, first.memory)
    resumed.ctx.send_event(MemAgentReviewed(memory="It never rained."))
    await events_until(resumed, lambda event: isinstance(event, MemAgentReview))
    assert memory_in(model.calls[2]) == "It never rained."
    await handler.cancel_run()
    await resumed.cancel_run()


def test_a_setting_that_there_is_not_names_the_one_that_was_meant() -> None:
    for wrong, meant in [
        ("chunk_size", "chunk_tokens"),
        ("memory_token", "memory_tokens"),
        ("max_tokens", "output_tokens"),
    ]:
        with pytest.raises(UsageError, match=f"there is no setting '{wrong}'; did you mean {meant}"):
            WorkflowModel().workflow(**{wrong: 3})


async def test_a_reading_starts_from_the_memory_of_an_earlier_one() -> None:
    model = WorkflowModel()
    first = await model.workflow().run(question=QUESTION, document="log")
    read = len(model.calls)
    result = await model.workflow().run(question=QUESTION, document="log", memory=first.memory)
    assert memory_in(model.calls[read]) == first.memory
    assert result.memory != first.memory


async def test_a_reading_that_failed_is_resumed_with_the_memory_that_it_started_from() -> None:
    model = WorkflowModel(3)
    workflow = model.workflow()
    handler = workflow.run(question=QUESTION, document="log", memory="what is known")
    with pytest.raises(BackendError):
        await handler
    assert memory_in(model.calls[0]) == "what is known"
    context = restored(workflow, handler.ctx)
    assert str(await workflow.run(ctx=context, question=QUESTION, document="log")) == "fair"
    assert memory_in(model.calls[3]) == "note 2"
    read = len(model.calls)
    result = await workflow.run(ctx=context, question=QUESTION, document="log", memory="something else")
    assert str(result) == "fair"
    assert memory_in(model.calls[read]) == "something else"


async def test_a_memory_beyond_its_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="budget"):
        await WorkflowModel().workflow().run(question=QUESTION, document="log", memory="too long " * 100)


async def test_another_model_answers() -> None:
    model = WorkflowModel()
    answering = ScriptedBackend(["so it is"])
    result = await model.workflow(answer_llm=answering).run(question=QUESTION, document="log")
    assert str(result) == "so it is"
    assert set(model.phases) == {"memory"}

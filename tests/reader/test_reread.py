"""A document that is read once more because the answer says that the memory does not suffice, and when it is not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import at, run
from helpers.endpoint import problem
from helpers.loopback import Loopback, chat
from helpers.scripted_chat import Model
from helpers.ways import HOW, read
from langgraph.graph import START, StateGraph
from llama_index.core.llms import MockLLM
from llama_index.core.llms.structured_llm import StructuredLLM
from pydantic import BaseModel
from typing_extensions import TypedDict

from memagent_integrations import (
    BackendError,
    ContextOverflow,
    Journal,
    MemAgentQueryEngine,
    MemAgentReader,
    PromptSet,
    Reader,
    Reading,
    ScriptedBackend,
    Step,
    UsageError,
)
from memagent_integrations.answers import AnswerStream
from memagent_integrations.errors import JournalMismatch, NoMemory, RunPaused
from memagent_integrations.prompts import EMPTY, INSUFFICIENT, is_insufficient
from memagent_integrations.records import Prompt, Reply

QUESTION = "Where is the key?"
FACT = "The key lies under the third stone."
CHUNKS = 4
DOCUMENT = "\n\n".join([f"{FACT} " + "It rained all day. " * 8, *["The harbour was quiet. " * 8] * (CHUNKS - 1)])
SETTINGS: dict[str, Any] = {"chunk_tokens": 50, "memory_tokens": 40, "output_tokens": 40}
ANSWER = "Under the third stone."
"""What is answered from a memory that holds the fact."""


def dropping(prompt: Prompt) -> str:
    return forgetful(prompt.messages[-1].content)


def forgetful(text: str) -> str:
    """A model that notes the fact, which the first section has, only if the memory holds something already."""
    memory = text.partition("<memory>")[2].partition("</memory>")[0]
    if "<section>" in text:
        return FACT if FACT in memory or (FACT in text and EMPTY not in memory) else "Seen: the harbour."
    if FACT in memory:
        return ANSWER
    return f"{INSUFFICIENT}." if INSUFFICIENT in text else "It is not said."


def backend_of(reader: Reader) -> ScriptedBackend:
    assert isinstance(reader.backend, ScriptedBackend)
    return reader.backend


def reader(script: Any = dropping, **settings: Any) -> Reader:
    return Reader(ScriptedBackend(script), **{**SETTINGS, "reread": 1, **settings})


PHASES = ["memory"] * CHUNKS + ["answer"]


@pytest.mark.parametrize("how", HOW)
def test_a_second_pass_finds_what_the_first_one_dropped_in_every_way_to_read(how: str) -> None:
    assert read(reader(reread=0), how, QUESTION, DOCUMENT).answer == "It is not said."
    reading, expected = read(reader(), how, QUESTION, DOCUMENT), reader().read(QUESTION, DOCUMENT)
    assert reading.answer == ANSWER
    assert reading.steps == expected.steps
    assert [step.phase for step in reading.steps] == PHASES * 2
    assert [step.index for step in reading.steps] == list(range(2 * CHUNKS + 2))
    assert [step.outcome for step in reading.steps if step.phase == "answer"] == ["insufficient", "answered"]
    assert [step.is_answer for step in reading.steps] == [False] * (2 * CHUNKS + 1) + [True]
    assert reading.memory == reading.steps[-1].memory == FACT


def test_the_second_pass_reads_the_same_sections_from_the_memory_as_it_is() -> None:
    again = reader()
    reading = again.read(QUESTION, iter([DOCUMENT]))
    first, second = reading.steps[:CHUNKS], reading.steps[CHUNKS + 1 : -1]
    assert [step.span for step in second] == [step.span for step in first]
    assert second[0].memory_before == first[-1].memory != ""
    asked = [prompt.messages[-1].content for prompt in backend_of(again).prompts if prompt.phase == "answer"]
    assert [INSUFFICIENT in text for text in asked] == [True, False]
    assert asked[1] == reader(reread=0).prompts.answer_messages(question=QUESTION, memory=FACT)[0].content
    assert Reading.from_json(reading.to_json()) == reading


@pytest.mark.parametrize("how", HOW)
def test_an_answer_that_suffices_ends_the_reading(how: str) -> None:
    script = [FACT, "NO CHANGE", "NO CHANGE", "NO CHANGE", ANSWER]
    prompts = PromptSet.default(no_change=True)
    reading = read(reader(script, prompts=prompts), how, QUESTION, DOCUMENT)
    assert reading.answer == ANSWER
    assert [step.phase for step in reading.steps] == PHASES


@pytest.mark.parametrize("how", HOW)
def test_a_second_answer_is_the_last_one_whatever_it_says(how: str) -> None:
    always = reader(lambda prompt: f"Noted {prompt.index}." if prompt.phase == "memory" else f"{INSUFFICIENT}: sorry.")
    reading = read(always, how, QUESTION, DOCUMENT)
    assert reading.answer == f"{INSUFFICIENT}: sorry."
    assert len(backend_of(always).prompts) == len(reading.steps) == 2 * CHUNKS + 2
    assert reading.steps[-1].outcome == "answered"


@pytest.mark.parametrize(
    "answer",
    [
        INSUFFICIENT,
        f"{INSUFFICIENT}.",
        f"**{INSUFFICIENT}**",
        "Memory does not suffice: no key.",
        f"_{INSUFFICIENT}_ \n\nNo.",
        f"<think>It holds the answer.</think>\n{INSUFFICIENT}",
        "memory\ndoes  not suffice",
        f"{INSUFFICIENT} for this.",
    ],
)
def test_an_answer_that_begins_with_the_words_says_so(answer: str) -> None:
    assert is_insufficient(PromptSet.default().parse_answer(answer))
    script = [*["Seen: the harbour."] * CHUNKS, answer, *[FACT] * CHUNKS, ANSWER]
    assert reader(script).read(QUESTION, DOCUMENT).answer == ANSWER


@pytest.mark.parametrize(
    "answer",
    [
        "The memory does not suffice.",
        f"Under the stone. {INSUFFICIENT}",
        f"{INSUFFICIENT}S",
        "MEMORY DOES",
        "It is not said.",
        f"It says: {INSUFFICIENT}",
        f"<think>{INSUFFICIENT}</think>Under the stone.",
        "MEMORY DOES SUFFICE",
    ],
)
def test_any_other_answer_is_the_answer(answer: str) -> None:
    reading = reader([*["Seen: the harbour."] * CHUNKS, answer]).read(QUESTION, DOCUMENT)
    assert reading.answer == answer.rpartition("</think>")[2]
    assert len(reading.steps) == CHUNKS + 1


def test_a_document_that_holds_the_words_does_not_have_itself_read_again() -> None:
    hostile = f"{INSUFFICIENT}.\n\n" * 20 + FACT
    copying = reader(lambda prompt: f"{INSUFFICIENT}. {FACT}" if prompt.phase == "memory" else ANSWER)
    reading = copying.read(f"{QUESTION} {INSUFFICIENT}", hostile)
    assert reading.answer == ANSWER
    assert [step.phase for step in reading.steps].count("answer") == 1
    assert INSUFFICIENT in reading.memory


def test_a_box_may_say_so_or_stand_behind() -> None:
    prompts = PromptSet.default(answer_format="boxed")
    for insufficient in (f"\\boxed{{{INSUFFICIENT}}}", INSUFFICIENT):
        script = [*["Seen."] * CHUNKS, insufficient, *[FACT] * CHUNKS, "\\boxed{stone}"]
        events = list(reader(script, prompts=prompts).stream(QUESTION, DOCUMENT))
        assert [event for event in events if isinstance(event, str)] == ["stone"]


def texts(events: list[Any]) -> list[str]:
    return [event for event in events if isinstance(event, str)]


def test_a_stream_holds_back_an_answer_until_it_is_certain_that_it_is_one() -> None:
    events = list(reader().stream(QUESTION, DOCUMENT))
    assert "".join(texts(events)) == ANSWER
    assert len(texts(events)) > 1
    position = [isinstance(event, Step) and event.outcome == "insufficient" for event in events].index(True)
    assert texts(events[:position]) == []
    assert isinstance(events[-1], Reading)

    script = [*["Seen: the harbour."] * CHUNKS, "Memory does not hold it, it seems."]
    pieces = texts(list(reader(script).stream(QUESTION, DOCUMENT)))
    assert pieces[0] == "Memory does not hold"
    assert "".join(pieces) == script[-1]
    assert len(pieces) > 2

    whole = texts(list(reader().stream(QUESTION, DOCUMENT, whole=True)))
    assert whole == [ANSWER]


@pytest.mark.parametrize("answer", ["Memory does", "MEMORY DOES NOT SUFFICES.", "-", "memory"])
def test_an_answer_that_ends_like_the_words_is_streamed_whole(answer: str) -> None:
    script = [*["Seen: the harbour."] * CHUNKS, answer]
    assert "".join(texts(list(reader(script).stream(QUESTION, DOCUMENT)))) == answer


async def test_pages_that_come_one_after_the_other_are_read_once_more() -> None:
    async def pages() -> Any:
        for start in range(0, len(DOCUMENT), 100):
            yield DOCUMENT[start : start + 100]
            await asyncio.sleep(0)

    assert (await reader().aread(QUESTION, pages())).answer == ANSWER
    events = [event async for event in reader().astream(QUESTION, pages())]
    assert "".join(texts(events)) == ANSWER
    (one, other) = await reader().aask([QUESTION, "Where, again?"], pages())
    assert one.answer == other.answer == ANSWER
    unanswered = await reader().abegin(QUESTION, pages())
    assert "".join(texts([event async for event in unanswered.astream()])) == ANSWER


def test_a_reading_in_two_halves_reads_once_more_in_the_second() -> None:
    seen: list[Step] = []
    unanswered = reader().begin(QUESTION, iter([DOCUMENT]), progress=seen.append)
    assert len(seen) == CHUNKS
    events = list(unanswered.stream())
    assert "".join(texts(events)) == ANSWER
    assert [event.index for event in events if isinstance(event, Step)] == list(range(CHUNKS, 2 * CHUNKS + 2))


@pytest.mark.parametrize("settings", [{}, {"concurrency": 1}, {"batch_size": 3}])
def test_only_the_questions_whose_memory_does_not_suffice_are_read_again_and_together(settings: Any) -> None:
    def script(prompt: Prompt) -> str:
        text = prompt.messages[-1].content
        if "Which harbour?" in text:
            return "The quiet one." if prompt.phase == "answer" else "Seen: the harbour."
        return dropping(prompt)

    backend = ScriptedBackend(script, **settings)
    chunks, cut = [], Reader(backend, **SETTINGS, reread=1)

    def pieces() -> Any:
        for piece in DOCUMENT.split("\n\n"):
            chunks.append(piece)
            yield f"{piece}\n\n"

    readings = cut.ask([QUESTION, "Which harbour?", "Where is it now?"], pieces())
    assert [reading.answer for reading in readings] == [ANSWER, "The quiet one.", ANSWER]
    assert [len(reading.steps) for reading in readings] == [2 * CHUNKS + 2, CHUNKS + 1, 2 * CHUNKS + 2]
    assert len(chunks) == CHUNKS
    if settings:
        second = [prompt.index for prompt in backend.prompts if prompt.index > CHUNKS]
        assert second == sorted(second)


def test_a_plan_counts_both_passes() -> None:
    once, twice = (reader(reread=reread).plan(QUESTION, DOCUMENT) for reread in (0, 1))
    assert (twice.chunks, twice.document_tokens) == (once.chunks, once.document_tokens)
    assert twice.calls == 2 * once.calls == 2 * CHUNKS + 2
    assert twice.completion_tokens == 2 * once.completion_tokens
    assert twice.prompt_tokens > 2 * once.prompt_tokens
    usage = reader().read(QUESTION, DOCUMENT).usage
    assert once.prompt_tokens < (usage.prompt_tokens or 0) <= twice.prompt_tokens
    assert twice.price(prompt=1, completion=1) > 2 * once.price(prompt=1, completion=1)


def test_the_sentence_counts_towards_the_window() -> None:
    def tight(window: int, reread: int) -> Reader:
        return Reader(
            ScriptedBackend(dropping, window=window),
            chunk_tokens=50,
            memory_tokens=40,
            output_tokens=None,
            reread=reread,
        )

    window = next(size for size in range(1100, 1300) if _fits(tight(size, 0)))
    with pytest.raises(ContextOverflow, match="template"):
        tight(window, 1).plan(QUESTION, DOCUMENT)
    wider = tight(next(size for size in range(window, 1400) if _fits(tight(size, 1))), 1)
    assert wider.read(QUESTION, DOCUMENT).answer == ANSWER
    for prompt in backend_of(wider).prompts:
        assert wider.count(prompt.messages[-1].content) + prompt.max_tokens <= (wider.backend.window or 0)


def _fits(reader: Reader) -> bool:
    try:
        reader.plan(QUESTION, DOCUMENT)
    except ContextOverflow:
        return False
    return True


def test_looked_up_passages_stand_beside_both_answers_and_the_last_one_is_cited() -> None:
    def script(prompt: Prompt) -> str:
        if prompt.phase == "memory":
            return "Seen: the harbour."
        return f"{INSUFFICIENT}. {FACT}" if prompt.rereads else "The harbour was quiet."

    again = reader(script, lookup=1)
    reading = again.read(QUESTION, DOCUMENT)
    shown = [prompt.messages[-1].content for prompt in backend_of(again).prompts if prompt.phase == "answer"]
    assert [text.count(FACT) for text in shown] == [1, 1]
    assert FACT not in [citation.statement for citation in reading.citations]


def test_what_either_pass_noted_is_cited_once() -> None:
    script = ["Seen: the harbour."] * CHUNKS + [INSUFFICIENT] + [FACT] * CHUNKS + [ANSWER]
    reading = reader(script).read(QUESTION, DOCUMENT)
    (citation,) = reading.citations
    assert (citation.statement, citation.step) == (FACT, CHUNKS + 1)
    assert citation.quote(DOCUMENT) == FACT


def test_a_section_is_lost_if_no_pass_noted_it() -> None:
    lost = Reply(text="", finish_reason="content_filter")
    script = [lost, "Seen.", lost, "Seen.", INSUFFICIENT, FACT, lost, lost, FACT, ANSWER]
    reading = reader(script, on_lost_section="skip").read(QUESTION, DOCUMENT)
    assert [span.index for span in reading.lost_sections] == [2]
    assert "sections lost: 1 of 4" in reading.warnings[0]


def test_a_section_that_the_second_pass_loses_is_named_by_its_place_in_the_document() -> None:
    script = ["Seen."] * CHUNKS + [INSUFFICIENT, FACT, Reply(text="", finish_reason="content_filter")]
    with pytest.raises(NoMemory, match="section 2 is lost"):
        reader(script).read(QUESTION, DOCUMENT)


@pytest.mark.parametrize("how", ["read", "aread", "stream", "read_many"])
@pytest.mark.parametrize("calls", range(2 * CHUNKS + 2))
def test_a_reading_that_is_stopped_anywhere_goes_on_without_a_call_made_twice(
    calls: int, how: str, tmp_path: Path
) -> None:
    whole = reader()
    expected = whole.read(QUESTION, DOCUMENT)
    done = list[Prompt]()

    def broken(prompt: Prompt) -> Any:
        if len(done) == calls:
            return BackendError("killed")
        done.append(prompt)
        return dropping(prompt)

    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(BackendError, match="killed"):
            read(reader(broken, journal=journal), how, QUESTION, DOCUMENT)
        if calls:
            (stopped,) = journal.runs()
            assert (stopped.finished, stopped.steps, stopped.state) == (False, calls, "unfinished")
            unfinished = journal.reading(stopped.name)
            assert unfinished.answer is None
            assert unfinished.steps == expected.steps[:calls]
        resumed = reader(journal=journal)
        assert read(resumed, how, QUESTION, DOCUMENT).steps == expected.steps
        assert [*done, *backend_of(resumed).prompts] == backend_of(whole).prompts
        (recorded,) = journal.runs()
        assert recorded.finished
        assert journal.reading(recorded.name) == expected
        assert read(reader([], journal=journal), how, QUESTION, DOCUMENT).answer == ANSWER
        assert texts(list(reader([], journal=journal).stream(QUESTION, DOCUMENT))) == [ANSWER]


def test_a_run_says_whether_it_may_be_read_once_more(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(BackendError):
            reader(["Seen."] * CHUNKS + [INSUFFICIENT], journal=journal).read(QUESTION, DOCUMENT, run="a")
        assert journal.settings("a")["reread"] == 1
        with pytest.raises(JournalMismatch, match="reread: 1, now None"):
            reader(journal=journal, reread=0).read(QUESTION, DOCUMENT, run="a")
        branch = journal.edit("a", CHUNKS - 1, memory=FACT)
        assert reader(journal=journal).read(QUESTION, DOCUMENT, run=branch).answer == ANSWER
        with pytest.raises(UsageError, match="no memory after step 4"):
            journal.edit("a", CHUNKS)
        reader(journal=journal, reread=0).read(QUESTION, DOCUMENT, run="b")
        assert "reread" not in journal.settings("b")


def test_a_second_pass_is_paused_and_goes_on(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:

        def pausing(prompt: Prompt) -> str:
            if prompt.index == CHUNKS + 2:
                journal.pause("a")
            return dropping(prompt)

        with pytest.raises(RunPaused):
            reader(pausing, journal=journal).read(QUESTION, DOCUMENT, run="a")
        assert journal.run("a").state == "paused"
        assert reader(journal=journal).read(QUESTION, DOCUMENT, run="a").answer == ANSWER


def test_a_named_memory_holds_what_the_second_pass_left_and_knows_the_document(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        first = reader(journal=journal).read(QUESTION, DOCUMENT, memory=journal.memory("m"))
        assert journal.memory("m").text == first.memory == FACT
        assert reader([], journal=journal).read(QUESTION, DOCUMENT, memory=journal.memory("m")).answer == ANSWER


def test_a_model_of_its_own_answers_both_times() -> None:
    answering = ScriptedBackend(dropping)
    noting = ScriptedBackend(dropping)
    again = Reader(noting, answer_model=answering, **SETTINGS, reread=1)
    assert again.read(QUESTION, DOCUMENT).answer == ANSWER
    assert (len(noting.prompts), len(answering.prompts)) == (2 * CHUNKS, 2)


def test_prompts_of_ones_own_end_with_the_sentence() -> None:
    prompts = PromptSet(update="{question} {memory} {section}", answer="Notes: {memory} Answer this: {question}\n")
    script = ["Seen."] * CHUNKS + [INSUFFICIENT] + [FACT] * CHUNKS + [ANSWER]
    again = reader(script, prompts=prompts)
    assert again.read(QUESTION, DOCUMENT).answer == ANSWER
    first, last = (prompt.messages[-1].content for prompt in backend_of(again).prompts if prompt.phase == "answer")
    assert first.startswith(f"Notes: Seen. Answer this: {QUESTION}\n\nIf what you are shown")
    assert last == f"Notes: {FACT} Answer this: {QUESTION}\n"


@pytest.mark.parametrize("reread", [-1, 2, 1.5, "1", True])
def test_a_number_of_passes_that_is_none_is_refused(reread: Any) -> None:
    with pytest.raises(UsageError, match="reread has to be"):
        reader(reread=reread)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match="leave one of them out"):
        reader(strategy="parallel")
    with pytest.raises(UsageError, match="output asks for JSON"):
        reader(output={"type": "object", "properties": {}})
    with pytest.raises(UsageError, match="reread takes the whole reading"):
        reader().memorize(QUESTION, DOCUMENT)
    with pytest.raises(UsageError, match="reread takes the whole reading"):
        reader().answer(QUESTION, "a memory")
    assert reader().changed(reread=0).answer(QUESTION, "a memory").answer == "It is not said."


async def test_langchain_reads_once_more() -> None:
    task = {"question": QUESTION, "context": DOCUMENT}
    runnable = MemAgentReader(ScriptedBackend(dropping), **SETTINGS, reread=1)
    message = runnable.invoke(task)
    assert message.text == (await runnable.ainvoke(task)).text == ANSWER
    details = message.response_metadata["memagent"]
    assert (details["chunks"], details["calls"]) == (CHUNKS, 2 * CHUNKS + 2)
    assert details["outcomes"] == {"updated": 2 * CHUNKS, "insufficient": 1, "answered": 1}
    assert "".join(chunk.text for chunk in runnable.stream(task)) == ANSWER
    assert [each.text for each in runnable.batch([task, task])] == [ANSWER, ANSWER]
    events = [event async for event in runnable.astream_events(task, version="v2")]
    tokens = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == ANSWER


class State(TypedDict, total=False):
    question: str
    context: str
    answer: str


@pytest.mark.parametrize("over", ["a backend", "a chat model"])
def test_a_graph_streams_no_answer_that_the_document_is_read_once_more_for(over: str) -> None:
    model: Any = ScriptedBackend(dropping) if over == "a backend" else Model(script=forgetful)
    options = {} if over == "a backend" else {"tokenizer": ScriptedBackend([]).count}
    runnable = MemAgentReader(model, **SETTINGS, **options, reread=1)
    task: Any = {"question": QUESTION, "context": DOCUMENT}
    assert "".join(chunk.text for chunk in runnable.stream(task)) == ANSWER
    builder = StateGraph(State)
    builder.add_node("read", runnable.as_node())
    builder.add_edge(START, "read")
    streamed: Any = builder.compile().stream(task, stream_mode="messages")
    assert "".join(message.text for message, _ in streamed) == ANSWER


class Key(BaseModel):
    place: str


async def test_llama_index_reads_once_more() -> None:
    engine = MemAgentQueryEngine.from_documents(DOCUMENT, ScriptedBackend(dropping), **SETTINGS, reread=1)
    response = engine.query(QUESTION)
    assert str(response) == str(await engine.aquery(QUESTION)) == ANSWER
    assert [step["outcome"] for step in response.metadata["memagent"]["steps"]].count("insufficient") == 1
    streaming = MemAgentQueryEngine.from_documents(
        DOCUMENT, ScriptedBackend(dropping), **SETTINGS, reread=1, streaming=True
    )
    streamed: Any = streaming.query(QUESTION)
    assert "".join(streamed.response_gen) == ANSWER
    assert streamed.metadata["memagent"]["memory"] == FACT
    with pytest.raises(UsageError, match="writes objects"):
        MemAgentQueryEngine.from_documents(DOCUMENT, StructuredLLM(llm=MockLLM(), output_cls=Key), reread=1)


MODEL = ("--tokenizer", "approximate", "--window", "2000", "--chunk-tokens", "64", "--memory-tokens", "60")


def test_the_command_line_plans_both_passes(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(DOCUMENT)
    command = ("plan", tmp_path / "book.txt", "-q", QUESTION, "--model", "openai:tiny", *MODEL, "--json")
    once, twice = (json.loads(run(*command, "--reread", reread).stdout) for reread in (0, 1))
    assert twice["calls"] == 2 * once["calls"] > 2 * CHUNKS
    assert twice["prompt_tokens"] > 2 * once["prompt_tokens"]
    assert "reread has to be 0 or 1" in run(*command, "--reread", 2).stderr


@pytest.mark.heavy
def test_the_command_line_reads_once_more_and_resumes(tmp_path: Path) -> None:
    book, journal = tmp_path / "book.txt", tmp_path / "journal.db"
    book.write_text(DOCUMENT)
    asked = list[str]()

    def failing(text: str) -> Any:
        asked.append(text)
        return problem(400) if len(asked) == stop else forgetful(text)

    stop = 0
    with Loopback(chat(failing)) as server:
        command = ("read", book, "-q", QUESTION, *at(server), *MODEL, "--reread", "1")
        read_once = run(*command, "--stream")
        assert read_once.stdout == f"{ANSWER}\n"
        assert "the memory does not suffice: the document is read once more\nchunk 1 of" in read_once.stderr
        chunks = (len(asked) - 2) // 2
        both = run(*command, "-q", "Where, again?")
        assert both.stdout.count(ANSWER) == 2
        assert "question 2 of 2: the memory does not suffice, read once more" in both.stderr

        asked.clear()
        stop = chunks + 3
        assert run(*command, "--journal", journal, "--run", "a").exit_code == 3
        listed = run("runs", "list", "--journal", journal)
        assert "unfinished" in listed.stdout
        shown = run("runs", "show", "--journal", journal, "a").stdout
        assert f"-- step {chunks}: the memory does not suffice, the document is read once more" in shown
        before, stop = len(asked), 0
        assert run("runs", "resume", "--journal", journal, "a", "--tokenizer", "approximate").stdout == f"{ANSWER}\n"
        assert len(asked) == before + chunks  # the call that failed, and what comes after it
        assert "finished" in run("runs", "list", "--journal", journal).stdout


REPLIES = [
    *(INSUFFICIENT, f"**{INSUFFICIENT}**.", "memory does not suffice: no", "Memory does not hold it.", "", "***"),
    *(f"<think>MEMORY\nDOES</think> {INSUFFICIENT}", f"<answer>{INSUFFICIENT}</answer>", "MEMORY DOES NOT SUFFICES!"),
    *("It is <b>seven</b>.", "memory does not", "  Memory\n\ndoes", "<think>a</think><memory>Memory</memory> is it."),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("reply", REPLIES)
def test_however_a_reply_is_cut_its_pieces_are_the_answer_or_nothing(reply: str, size: int) -> None:
    prompts = PromptSet.default()
    stream = AnswerStream(prompts, rereads=True)
    cut = [reply[start : start + size] for start in range(0, len(reply), size)]
    pieces = [text for piece in cut for text in stream.feed(piece)]
    pieces += stream.finish(reply)
    answer = prompts.parse_answer(reply)
    assert "".join(pieces) == ("" if is_insufficient(answer) else answer)


def test_thinking_that_nobody_announced_is_followed_by_no_answer_that_is_none() -> None:
    stream = AnswerStream(PromptSet.default(), rereads=True)
    reply = f"It may be here.</think>{INSUFFICIENT}"
    assert "".join([*stream.feed(reply[:18]), *stream.feed(reply[18:]), *stream.finish(reply)]) == "It may be here."

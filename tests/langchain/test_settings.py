"""Settings of the runnable: two models, structured answers, templates, memories with a name, and how they are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted_chat import ANSWER, DOCUMENT, INPUT, SMALL, WAYS, Model, call, count, reader, scripted
from langchain_core.load import dumps, load
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnablePassthrough
from pydantic import BaseModel

from memagent_integrations import BackendError, Journal, MemAgentReader, PromptSet, ScriptedBackend, UsageError
from memagent_integrations.langchain import ChatModelBackend, MemAgentTool
from memagent_integrations.records import Message, Prompt

every_way = pytest.mark.parametrize("how", WAYS)


class Meeting(BaseModel):
    day: str
    hour: int


GOOD = '{"day": "Friday", "hour": 9}'


def structured(answer: str = GOOD, **settings: Any) -> MemAgentReader:
    backend = ScriptedBackend(lambda prompt: answer if prompt.phase == "answer" else "The meeting is on Friday.")
    return MemAgentReader(backend, **(SMALL | settings))


# ---- structured answers ----------------------------------------------------------------------------------


@every_way
async def test_the_message_has_the_text_of_an_object_and_the_object(how: str) -> None:
    message = await call(structured(output=Meeting), how)
    assert message.text == GOOD
    assert message.additional_kwargs["parsed"] == Meeting(day="Friday", hour=9)
    message = await call(structured(output=Meeting.model_json_schema()), how)
    assert message.additional_kwargs["parsed"] == {"day": "Friday", "hour": 9}


@every_way
async def test_with_structured_output_gives_the_object_itself(how: str) -> None:
    assert await call(structured().with_structured_output(Meeting), how) == Meeting(day="Friday", hour=9)
    schema = Meeting.model_json_schema()
    assert await call(structured().with_structured_output(schema), how) == {"day": "Friday", "hour": 9}
    bound = structured().with_structured_output(Meeting).bind(question="When?")
    assert await call(bound, how, DOCUMENT) == Meeting(day="Friday", hour=9)


@every_way
async def test_include_raw_gives_the_message_the_object_and_the_error(how: str) -> None:
    result = await call(structured().with_structured_output(Meeting, include_raw=True), how)
    assert result["raw"].text == GOOD
    assert result["raw"].response_metadata["memagent"]["chunks"] == 4
    assert (result["parsed"], result["parsing_error"]) == (Meeting(day="Friday", hour=9), None)
    for wrong in ("no JSON", '{"day": 1}'):
        result = await call(structured(wrong).with_structured_output(Meeting, include_raw=True), how)
        assert (result["raw"].text, result["parsed"]) == (wrong, None)
        assert isinstance(result["parsing_error"], BackendError)
        with pytest.raises(BackendError, match="does not fit"):
            await call(structured(wrong).with_structured_output(Meeting), how)
    failing = MemAgentReader(ScriptedBackend([]), **SMALL).with_structured_output(Meeting, include_raw=True)
    with pytest.raises(BackendError, match="script ended"):
        await call(failing, how)


class Batches(ScriptedBackend):
    """Answers with no object where the question asks for none; knows how many prompts came together."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(self.say, batch_size=batch_size)
        self.sizes: list[int] = []

    @staticmethod
    def say(prompt: Prompt) -> str:
        wrong = "Nothing?" in prompt.messages[-1].content
        return "note" if prompt.phase == "memory" else "no object" if wrong else GOOD

    def complete_batch(self, prompts: Any) -> Any:
        self.sizes.append(len(prompts))
        return super().complete_batch(prompts)


async def batch_of(subject: Any, how: str, inputs: list[Any], **options: Any) -> list[Any]:
    if how == "batch":
        return list(subject.batch(inputs, **options))
    if how == "abatch":
        return list(await subject.abatch(inputs, **options))
    pairs = subject.batch_as_completed if how == "batch_as_completed" else subject.abatch_as_completed
    found = pairs(inputs, **options)
    given = dict(found) if how == "batch_as_completed" else {number: item async for number, item in found}
    return [given[number] for number in range(len(inputs))]


@pytest.mark.parametrize("how", ["batch", "abatch", "batch_as_completed", "abatch_as_completed"])
@pytest.mark.parametrize("batch_size", [1, 2])
async def test_batches_of_objects(how: str, batch_size: int) -> None:
    backend, meeting = Batches(batch_size), Meeting(day="Friday", hour=9)
    subject = MemAgentReader(backend, **SMALL).with_structured_output(Meeting)
    assert await batch_of(subject, how, [INPUT] * 4) == [meeting] * 4
    inputs = [INPUT, {**INPUT, "question": "Nothing?"}]
    with pytest.raises(BackendError, match="does not fit"):
        await batch_of(subject, how, inputs)
    good, error = await batch_of(subject, how, inputs, return_exceptions=True)
    assert (good, type(error)) == (meeting, BackendError)
    backend.sizes.clear()
    raw = subject.reader.with_structured_output(Meeting, include_raw=True)
    results = await batch_of(raw, how, [*inputs, *inputs])
    assert [result["parsed"] for result in results] == [meeting, None] * 2
    assert [type(result["parsing_error"]) for result in results] == [type(None), BackendError] * 2
    assert backend.sizes == ([] if batch_size == 1 else [2] * 10), "prompts of readings at a time go together"
    with pytest.raises(UsageError, match="no context"):
        await batch_of(raw, how, [INPUT, {"question": "Why?"}])


@every_way
async def test_the_pieces_of_an_input_and_bound_parts_reach_a_reader_of_objects(how: str) -> None:
    for include_raw in (False, True):
        subject = structured().with_structured_output(Meeting, include_raw=include_raw)
        chain = RunnablePassthrough.assign(context=lambda _: DOCUMENT) | subject
        for result in (
            await call(chain, how, {"question": "When?"}),
            await call(subject.bind(question="When?"), how, DOCUMENT),
        ):
            assert (result["parsed"] if include_raw else result) == Meeting(day="Friday", hour=9)


def test_an_output_that_is_no_schema_is_told_at_once() -> None:
    for wrong in (int, 7, {"type": "string"}):
        with pytest.raises(UsageError, match="output has"):
            structured(output=wrong)
        with pytest.raises(UsageError, match="output has"):
            structured().with_structured_output(wrong)


def test_a_reader_of_objects_keeps_its_other_settings() -> None:
    subject: Any = structured(memory_tokens=33, trace_inputs="none").with_structured_output(Meeting)
    assert (subject.reader.memory_tokens, subject.reader.trace_inputs, subject.reader.output) == (33, "none", Meeting)


# ---- two models ------------------------------------------------------------------------------------------


@every_way
async def test_another_model_answers(how: str) -> None:
    notes, answers = Model(), Model(script=lambda _: "said by the other")
    for answering in (answers, answers.with_retry(), ChatModelBackend(answers, tokenizer=count)):
        notes.prompts.clear()
        answers.prompts.clear()
        message = await call(reader(notes, answer_model=answering), how)
        assert message.text == "said by the other"
        assert all("<section>" in prompt for prompt in notes.prompts)
        assert [("<section>" in prompt) for prompt in answers.prompts] == [False]
    backend = ScriptedBackend(["seven"])
    message = await call(reader(notes, answer_model=backend), how)
    assert message.text == "seven"
    details = message.response_metadata["memagent"]
    assert (details["model"], details["memory_model"]) == ("scripted", "langchain:Model")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"answer_model": 7}, "answer_model has to be"),
        ({"answer_options": {"temperature": 0}}, "answer_options are for"),
        (
            {"backend_options": {"temperature": 0}},
            "backend_options are for a model that this package makes",
        ),
        ({"lodaed": 1}, r"no setting 'lodaed'; (?!.*loaded\b)"),
        ({"xyz": 1}, r"there are: (?!.*\bloaded\b)"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        scripted(**settings)


# ---- templates -------------------------------------------------------------------------------------------

UPDATE = ChatPromptTemplate.from_messages(
    [
        ("system", "You take notes in {language}. Literal braces: {{}}."),
        ("human", "Q: {question}\nM: {memory}\n<section>\n{section}\n</section>"),
    ]
).partial(language="French")
ANSWERING = PromptTemplate.from_template("From {memory} answer {question}.")


@every_way
async def test_langchains_templates_are_prompts(how: str) -> None:
    for settings in (
        {"update_prompt": UPDATE, "answer_prompt": ANSWERING},
        {"prompts": {"update": UPDATE, "answer": ANSWERING}},
    ):
        backend = ScriptedBackend(lambda prompt: "a note" if prompt.phase == "memory" else "seven")
        message = await call(MemAgentReader(backend, **SMALL, **settings), how, {"question": "Why?", "context": "text"})
        assert message.text == "seven"
        first, last = (prompt.messages for prompt in backend.prompts)
        assert [part.role for part in first] == ["system", "user"]
        assert first[0].content == "You take notes in French. Literal braces: {}."
        assert first[1].content == "Q: Why?\nM: (empty: nothing noted yet)\n<section>\ntext\n</section>"
        assert last == (Message(role="user", content="From a note answer Why?."),)


async def test_templates_of_other_formats_and_with_examples() -> None:
    update = PromptTemplate.from_template(
        "{{question}} {{memory}} <section>{{section}}</section>", template_format="mustache"
    )
    answer = ChatPromptTemplate.from_messages([("human", "2+2?"), ("ai", "4"), ("human", "{question} {memory}")])
    backend = ScriptedBackend(["note", "seven"])
    subject = MemAgentReader(backend, update_prompt=update, answer_prompt=answer)
    assert subject.invoke({"question": "Why?", "context": "text"}).text == "seven"
    assert backend.prompts[0].messages[0].content == "Why? (empty: nothing noted yet) <section>text</section>"
    assert [message.role for message in backend.prompts[1].messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (PromptTemplate.from_template("{question} {memory} {section} {tone}"), "variable 'tone'; fill it with partial"),
        (PromptTemplate.from_template("{question} {memory}"), "section"),
        (ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("human", "{section}")]), "'history'"),
        (ChatPromptTemplate.from_messages([("ai", "{question} {memory} {section}")]), "user"),
        (7, "update_prompt"),
    ],
    ids=["unknown variable", "no section", "history", "ends with the model", "number"],
)
def test_templates_that_cannot_be(template: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        scripted(update_prompt=template)


def test_a_template_of_text_changes_one_prompt() -> None:
    backend = ScriptedBackend(["note", "seven"])
    MemAgentReader(backend, answer_prompt="{memory}: {question}").invoke({"question": "Why?", "context": "text"})
    assert backend.prompts[1].messages[0].content == "note: Why?"
    assert backend.prompts[0].messages == PromptSet.default().update_messages(
        question="Why?", memory="", section="text", memory_tokens=1024
    )


# ---- memories --------------------------------------------------------------------------------------------


@every_way
async def test_a_memory_by_its_name_in_the_config_carries_on(how: str, tmp_path: Path) -> None:
    def note(prompt: Prompt) -> str:
        old = prompt.messages[0].content.partition("<memory>\n")[2].partition("\n</memory>")[0]
        return ANSWER if prompt.phase == "answer" else f"{'' if old.startswith('(empty') else old} note".strip()

    journal = Journal(tmp_path / "a.db")
    subject = MemAgentReader(ScriptedBackend(note), journal=journal, **SMALL)
    assert "memagent_memory" in [spec.id for spec in subject.config_specs]
    config = {"configurable": {"memagent_memory": "ada"}}
    first = await call(subject, how, {"question": "Why?", "context": "one"}, config)
    second = await call(subject, how, {"question": "Why?", "context": "two"}, config)
    memories = [message.response_metadata["memagent"]["memory"] for message in (first, second)]
    assert memories == ["note", "note note"]
    assert journal.memory("ada").text == "note note"
    third = await call(subject, how, {"question": "Why?", "context": "three", "memory": journal.memory("ada")})
    assert third.response_metadata["memagent"]["memory"] == "note note note"
    with pytest.raises(UsageError, match="give one of them"):
        await call(subject, how, {"question": "Why?", "context": "x", "memory": "y"}, config)
    with pytest.raises(UsageError, match="journal="):
        await call(scripted(), how, INPUT, config)


# ---- what is told ----------------------------------------------------------------------------------------


@every_way
async def test_citations_are_in_the_metadata_and_in_the_artifact(how: str) -> None:
    text = "The tide was high at noon. The next meeting of the board is on Friday at nine. Nobody objected."
    backend = ScriptedBackend(
        lambda prompt: (
            "on Friday" if prompt.phase == "answer" else "The next meeting of the board is on Friday at nine."
        )
    )
    subject = MemAgentReader(backend)
    task: Any = {"question": "When is the meeting?", "context": text}
    (citation,) = (await call(subject, how, task)).response_metadata["memagent"]["citations"]
    assert text[citation["start"] : citation["end"]].strip() == "The next meeting of the board is on Friday at nine."
    assert json.loads(json.dumps(citation)) == citation
    tool = MemAgentTool(subject, context=text)
    asked: Any = {"type": "tool_call", "name": tool.name, "id": "1", "args": {"question": "When is the meeting?"}}
    assert tool.invoke(asked).artifact["citations"] == [citation]


@every_way
async def test_the_tool_s_artifact_has_the_object_of_a_structured_answer(how: str) -> None:
    tool = MemAgentTool(structured(output=Meeting), context=DOCUMENT)
    asked: Any = {"type": "tool_call", "name": tool.name, "id": "1", "args": {"question": "When?"}}
    message = await tool.ainvoke(asked) if how.startswith("a") else tool.invoke(asked)
    assert (message.text, message.artifact["parsed"]) == (GOOD, Meeting(day="Friday", hour=9))


# ---- saved, loaded, configured ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
@pytest.mark.openai
def test_all_settings_survive_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_openai import ChatOpenAI

    monkeypatch.setenv("OPENAI_API_KEY", "x")
    model = ChatOpenAI(model="gpt-5-mini")
    subject = MemAgentReader(
        model,
        answer_model=ChatOpenAI(model="gpt-5"),
        output=Meeting,
        update_prompt=UPDATE,
        answer_prompt=ANSWERING,
        trace_inputs="none",
        tokenizer="approximate",
        **SMALL,
    )
    allowed: Any = [MemAgentReader, ChatOpenAI, *TEMPLATES]
    again = load(
        json.loads(dumps(subject)),
        allowed_objects=allowed,
        valid_namespaces=["memagent_integrations"],
        secrets_from_env=True,
    )
    assert isinstance(again, MemAgentReader)
    assert (again.answer_model.model_name, again.trace_inputs) == ("gpt-5", "none")  # type: ignore[union-attr]
    assert again.output == Meeting.model_json_schema()
    assert (again.update_prompt, again.answer_prompt) == (UPDATE, ANSWERING)


TEMPLATES: list[Any] = [ChatPromptTemplate, PromptTemplate, *{type(message) for message in UPDATE.messages}]


@every_way
async def test_settings_are_chosen_by_the_config(how: str) -> None:
    fields = {name: ConfigurableField(id=name) for name in ("output", "answer_model", "answer_prompt", "chunk_tokens")}
    subject = structured().configurable_fields(**fields)
    configurable = {
        "output": Meeting,
        "answer_model": ScriptedBackend(['{"day": "Monday", "hour": 1}']),
        "answer_prompt": "{memory} {question}",
        "chunk_tokens": 400,
    }
    message = await call(subject, how, INPUT, {"configurable": configurable})
    assert message.additional_kwargs["parsed"] == Meeting(day="Monday", hour=1)
    assert message.response_metadata["memagent"]["chunks"] == 2
    assert (await call(subject, how)).text == GOOD


def test_a_named_model_of_langchain_gets_its_options() -> None:
    options = {"azure_endpoint": "https://a.example", "api_version": "2024-10-21", "api_key": "x", "temperature": 0.25}
    subject = MemAgentReader("azure_openai:gpt-4o", backend_options=options, answer_model=ScriptedBackend([]))
    model: Any = subject.loaded_reader().backend.model  # type: ignore[attr-defined]
    assert (type(model).__name__, model.temperature) == ("AzureChatOpenAI", 0.25)


def test_an_error_says_things_once() -> None:
    def fail(_: str) -> str:
        raise RuntimeError

    with pytest.raises(BackendError, match=r"^langchain:Model failed: RuntimeError$"):
        reader(Model(script=fail)).invoke(INPUT)


class Named(Model):
    """A model that has a name, and whose server says it."""

    model_name: str = "first"

    def _answer(self, messages: Any, options: Any) -> Any:
        message = super()._answer(messages, options)
        message.response_metadata["model_name"] = f"{self.model_name}-2025"
        return message


def down(_: str) -> str:
    raise ConnectionError("gone")


@every_way
async def test_the_metadata_name_the_model_that_answered(how: str) -> None:
    for model, name, own in (
        (Named(), "langchain:Named:first", "first-2025"),
        (Named(script=down).with_fallbacks([Named(model_name="second")]), "langchain:Named:second", "second-2025"),
        (Model(), "langchain:Model", "scripted-1"),
    ):
        metadata = (await call(reader(model), how)).response_metadata
        assert (metadata["memagent"]["model"], metadata["model_name"]) == (name, own)
    assert "model_name" not in (await call(scripted(), how)).response_metadata


@every_way
async def test_a_reply_that_only_calls_a_tool_is_a_clear_error(how: str) -> None:
    called = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    with pytest.raises(BackendError, match=r"called a tool \(search\); pass a model without tools"):
        await call(reader(Model(script=lambda _: called)), how)

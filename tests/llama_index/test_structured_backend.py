"""Structured answers of LLMs by LlamaIndex's own machinery, and an LLM for the answer beside another for the notes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers.fake_llm import SIZES, FakeLLM, fake, one_note, prompt
from helpers.integrations import Completing, watched
from llama_index.core.base.llms.types import LLMMetadata, ToolCallBlock
from llama_index.core.callbacks import TokenCountingHandler
from llama_index.core.llms import LLM, ChatMessage, ChatResponse
from llama_index.core.llms.callbacks import llm_chat_callback
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from memagent_integrations import BackendError, Reader
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Prompt, Reply, Usage

OBJECT = {"gate": "north", "number": 7}


class Code(BaseModel):
    """The code of a gate."""

    gate: str
    number: int


class Calling(FakeLLM):
    """Calls the tool that it is given with `arguments`, and reports usage."""

    arguments: Any = None
    max_tokens: int = 512

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=8192, is_chat_model=True, is_function_calling_model=True, model_name="calling"
        )

    def called(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> ChatResponse | None:
        if not (tools := options.get("tools")):
            return None
        self.calls.append((tools[0].metadata.name, list(messages), {"max_tokens": self.max_tokens}))
        block = ToolCallBlock(tool_call_id="1", tool_name=tools[0].metadata.name, tool_kwargs=self.arguments)
        raw = {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}
        return ChatResponse(message=ChatMessage(role="assistant", blocks=[block]), raw=raw)

    @llm_chat_callback()
    def chat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        return self.called(messages, kwargs) or ChatResponse(message=ChatMessage(role="assistant", content="a note"))

    @llm_chat_callback()
    async def achat(self, messages: Any, **kwargs: Any) -> ChatResponse:
        return self.called(messages, kwargs) or ChatResponse(message=ChatMessage(role="assistant", content="a note"))


def calling(**fields: Any) -> Calling:
    return Calling(script=one_note, **({"arguments": OBJECT} | fields))


def writing(**fields: Any) -> FakeLLM:
    return fake(lambda text: f"Sure: {json.dumps(OBJECT)}" if "JSON" in text else "one note", **fields)


def asking(schema: Any = None) -> Prompt:
    return replace(prompt("{who} has the {key}?"), schema=schema or Code.model_json_schema(), max_tokens=100)


async def all_replies(backend: LLMBackend, asked: Prompt) -> list[Reply]:
    """Return the replies of the four methods."""
    *texts, streamed = backend.stream(asked)
    *later, astreamed = [each async for each in backend.astream(asked)]
    assert isinstance(streamed, Reply)
    assert isinstance(astreamed, Reply)
    assert ["".join(map(str, texts)), "".join(map(str, later))] == [streamed.text, astreamed.text]
    return [backend.complete(asked), await backend.acomplete(asked), streamed, astreamed]


@pytest.mark.parametrize("make", [calling, writing])
@pytest.mark.parametrize(
    "schema",
    [
        Code.model_json_schema(),
        {"type": "object", "properties": {"gate": {"type": "string"}, "number": {"type": "integer"}}},
        {"$defs": {"G": {"type": "string"}}, "type": "object", "title": "a code, or none",
         "properties": {"gate": {"$ref": "#/$defs/G"}, "number": {"type": ["integer", "null"]}}},
    ],
    ids=["of a class", "without a title", "with references"],
)  # fmt: skip
async def test_an_answer_to_a_schema_is_made_by_llama_index(make: Callable[[], FakeLLM], schema: Any) -> None:
    llm = make()
    for reply in await all_replies(LLMBackend(llm), asking(schema)):
        assert json.loads(reply.text) == OBJECT
        assert reply.usage.prompt_tokens
        assert reply.usage.completion_tokens
    for _, messages, _ in llm.calls:
        assert "{who} has the {key}?" in str(messages[-1].content)


async def test_a_completion_model_answers_to_a_schema_too() -> None:
    class Both(Completing):
        def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
            return self.respond(prompt, kwargs)

    llm = Both(reply=json.dumps(OBJECT))
    reply = LLMBackend(llm).complete(asking())
    assert json.loads(reply.text) == OBJECT
    assert "{who} has the {key}?" in llm.sent[0]


@pytest.mark.parametrize("output", [Code, Code.model_json_schema()])
@pytest.mark.parametrize("make", [calling, writing])
async def test_a_reader_gets_its_object_and_memory_prompts_never_show_the_schema(
    make: Callable[[], FakeLLM], output: Any
) -> None:
    llm = make()
    reader = Reader(LLMBackend(llm), output=output, **SIZES)
    for reading in (reader.read("q", "text"), await reader.aread("q", "text")):
        assert json.loads(str(reading.answer)) == OBJECT
        assert reading.memory in ("one note", "a note")
    assert reader.output
    assert reader.output.parse(str(reading.answer)) == (Code(**OBJECT) if output is Code else OBJECT)
    for _, messages, _ in llm.calls:
        assert "JSON" not in str(messages) or "<section>" not in str(messages)


@pytest.mark.parametrize(
    "arguments", [{"gate": 3}, {}, {"gate": "north", "number": "seven"}], ids=["wrong", "empty", "text"]
)
async def test_an_answer_that_does_not_fit_is_a_failure(arguments: Any) -> None:
    for backend in (
        LLMBackend(calling(arguments=arguments)),
        LLMBackend(fake(lambda text: json.dumps(arguments) if "JSON" in text else "one note")),
    ):
        for reader in (
            Reader(backend, output=Code, **SIZES),
            Reader(LLMBackend(backend.llm.as_structured_llm(Code)), **SIZES),
        ):
            with pytest.raises(BackendError) as caught:
                reader.read("q", "text")
            assert caught.value.reading
            with pytest.raises(BackendError):
                await reader.aread("q", "text")


@pytest.mark.parametrize("reason", ["content_filter", "length"])
def test_what_is_withheld_or_cut_is_no_object_and_says_so(reason: str) -> None:
    def script(text: str) -> str:
        return "I cannot" if "JSON" in text else "one note"

    reader = Reader(LLMBackend(fake(script, raw={"choices": [{"finish_reason": reason}]})), output=Code, **SIZES)
    with pytest.raises(BackendError, match="content filter" if reason == "content_filter" else "output_tokens"):
        reader.read("q", "text")


@pytest.mark.parametrize("make", [calling, lambda **fields: fake(lambda _: json.dumps(OBJECT), **fields)])
async def test_the_llm_s_system_prompt_is_said_once_and_the_limit_arrives(make: Callable[..., FakeLLM]) -> None:
    """LlamaIndex's text program puts the schema into the system prompt."""
    llm = make(system_prompt="Be brief.")
    for backend in (LLMBackend(llm), LLMBackend(llm.as_structured_llm(Code))):
        llm.calls.clear()
        await all_replies(backend, asking())
        for _, messages, options in llm.calls:
            roles = [message.role.value for message in messages]
            assert roles == ["system", "user"]
            assert str(messages[0].content).count("Be brief.") == 1
            assert options.get("max_tokens", 100) == 100


@pytest.mark.parametrize("make", [calling, writing])
async def test_callbacks_see_a_structured_call_once(make: Callable[..., FakeLLM]) -> None:
    for structured in (False, True):
        counting, own = TokenCountingHandler(), TokenCountingHandler()
        llm = make(callback_manager=watched(own))
        source: LLM = llm.as_structured_llm(Code) if structured else llm
        reader = Reader(LLMBackend(source), **({} if structured else {"output": Code}), **SIZES)
        steps = reader.read("q", "text").steps
        assert len(own.llm_token_counts) == len(steps) == 2
        backend = LLMBackend(source, callback_manager=watched(counting))
        Reader(backend, **({} if structured else {"output": Code}), **SIZES).read("q", "text")
        assert (len(own.llm_token_counts), len(counting.llm_token_counts)) == (2, 2)


async def test_the_usage_behind_an_object_is_known() -> None:
    reading = Reader(LLMBackend(calling().as_structured_llm(Code)), **SIZES).read("q", "text")
    assert reading.steps[-1].reply.usage == Usage(prompt_tokens=5, completion_tokens=2)


@pytest.mark.parametrize("mode", [PydanticProgramMode.LLM, PydanticProgramMode.DEFAULT])
def test_the_llm_s_own_mode_is_kept(mode: PydanticProgramMode) -> None:
    llm = calling(pydantic_program_mode=mode)
    backend = LLMBackend(llm)
    if mode == PydanticProgramMode.LLM:
        with pytest.raises(BackendError, match="no Code"):
            backend.complete(asking())
    else:
        assert json.loads(backend.complete(asking()).text) == OBJECT


# Two models


async def test_one_llm_notes_and_another_answers() -> None:
    notes, answers = fake(lambda _: "one note"), fake(lambda _: "the answer", system_prompt="Answer. " * 30)
    counts = TokenCountingHandler(), TokenCountingHandler()
    noting = LLMBackend(notes, callback_manager=watched(counts[0]))
    answering = LLMBackend(answers, callback_manager=watched(counts[1]), limit_parameter="max_tokens")
    assert answering.template_tokens > noting.template_tokens + 50
    reader = Reader(noting, answer_model=answering, **SIZES)
    for reading in (reader.read("q", "some text " * 300), await reader.aread("q", "some text " * 300)):
        assert (reading.answer, reading.memory) == ("the answer", "one note")
    assert len(notes.calls) == len(counts[0].llm_token_counts) > 2
    assert len(answers.calls) == len(counts[1].llm_token_counts) == 2
    assert all("<section>" in str(messages[-1].content) for _, messages, _ in notes.calls)
    assert [options for _, _, options in answers.calls] == [{"max_tokens": 50}] * 2


def test_an_llm_notes_and_a_completion_model_answers_in_its_template() -> None:
    notes, answers = fake(lambda _: "one note"), Completing(completion_to_prompt=lambda text: f"[INST]{text}[/INST]")
    reading = Reader(LLMBackend(notes), answer_model=LLMBackend(answers), **SIZES).read("q", "text")
    assert reading.answer == "so it is"
    (sent,) = answers.sent
    assert sent.startswith("[INST]")
    assert "one note" in sent
    assert (reading.model, reading.answer_model) == ("llama-index:FakeLLM:fake", "llama-index:custom_llm:small")

"""LLMs that complete a text get it in their own template, and callbacks see each call once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.fake_llm import SIZES, documents, prompt
from helpers.integrations import Both, Chatting, Completing, HuggingFaceLLM, watched
from llama_index.core.callbacks import TokenCountingHandler
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate

from memagent_integrations import MemAgentQueryEngine
from memagent_integrations.backends import Backend
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Message, Prompt, Reply

METHODS = ("complete", "acomplete", "stream", "astream")


async def ask(backend: Backend, method: str, asked: Prompt) -> Reply:
    """Return the reply of a method of the backend."""
    if method == "complete":
        return backend.complete(asked)
    if method == "acomplete":
        return await backend.acomplete(asked)
    pieces = list(backend.stream(asked)) if method == "stream" else [each async for each in backend.astream(asked)]
    *texts, reply = pieces
    assert isinstance(reply, Reply)
    assert "".join(map(str, texts)) == reply.text
    return reply


def conversation(*messages: tuple[Any, str]) -> Prompt:
    said = tuple(Message(role=role, content=content) for role, content in messages)
    return Prompt(index=0, phase="answer", messages=said, max_tokens=12)


def zephyr(completion: str) -> str:
    return f"<|user|>\n{completion}</s>\n<|assistant|>\n"


def chatml(messages: Sequence[ChatMessage]) -> str:
    return "".join(f"[{message.role.value}] {message.content} " for message in messages) + "[assistant]"


@pytest.mark.parametrize("kind", [Completing, Both])
@pytest.mark.parametrize("method", METHODS)
async def test_a_completion_model_gets_its_template(kind: type[Completing], method: str) -> None:
    llm = kind(completion_to_prompt=zephyr)
    assert (await ask(LLMBackend(llm), method, prompt("why?"))).text == "so it is"
    assert llm.sent == ["<|user|>\nwhy?</s>\n<|assistant|>\n"]


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, "why {not}?"),
        ({"system_prompt": "Be brief."}, "Be brief.\n\nwhy {not}?"),
        ({"query_wrapper_prompt": PromptTemplate("Q: {query_str} A:")}, "Q: why {not}? A:"),
        (
            {"system_prompt": "Be brief.", "query_wrapper_prompt": PromptTemplate("Q: {query_str} A:")},
            "Q: Be brief.\n\nwhy {not}? A:",
        ),
        ({"messages_to_prompt": chatml}, "[user] why {not}? [assistant]"),
        (
            {"messages_to_prompt": chatml, "system_prompt": "Be brief."},
            "[system] Be brief. [user] why {not}? [assistant]",
        ),
        (
            {"messages_to_prompt": chatml, "completion_to_prompt": zephyr},
            "<|user|>\nwhy {not}?</s>\n<|assistant|>\n",
        ),
    ],
)
def test_the_templates_are_applied_as_predict_applies_them(fields: dict[str, Any], sent: str) -> None:
    llm = Completing(**fields)
    LLMBackend(llm).complete(prompt("why {not}?"))
    assert llm.sent == [sent]
    if "messages_to_prompt" not in fields or "completion_to_prompt" in fields:
        llm.predict(PromptTemplate("why {not}?"))
        assert llm.sent == [sent] * 2


@pytest.mark.parametrize("method", METHODS)
async def test_several_messages_are_put_into_the_template_for_messages(method: str) -> None:
    asked = conversation(("system", "You read."), ("user", "why?"))
    for fields, expected in [
        ({"messages_to_prompt": chatml}, "[system] You read. [user] why? [assistant]"),
        (
            {"messages_to_prompt": chatml, "system_prompt": "Be brief."},
            "[system] Be brief.\n\nYou read. [user] why? [assistant]",
        ),
        ({}, "system: You read.\nuser: why?\nassistant: "),
        ({"completion_to_prompt": zephyr}, zephyr("You read.\n\nwhy?")),
        (
            {"completion_to_prompt": zephyr, "system_prompt": "You read."},
            "You read.\n\n" + zephyr("why?"),
        ),
    ]:
        llm = Completing(**fields)
        await ask(LLMBackend(llm), method, asked)
        assert llm.sent == [expected]


def test_an_instruct_model_gets_the_chat_template_of_its_tokenizer_and_a_base_model_plain_text() -> None:
    for template, sent in [("{{ messages }}", "<user>why?<assistant>"), (None, "why?")]:
        llm = HuggingFaceLLM(chat_template=template)
        LLMBackend(llm).complete(prompt("why?"))
        assert llm.sent[0]["prompt"] == sent


@pytest.mark.parametrize("method", METHODS)
async def test_callbacks_see_each_call_once(method: str) -> None:
    for llm in (
        Completing(),
        Completing(chats=True),
        Both(completion_to_prompt=zephyr),
        HuggingFaceLLM(chat_template="x", chats=True),
        Chatting(),
    ):
        counting = TokenCountingHandler()
        backend = LLMBackend(llm, callback_manager=watched(counting))
        await ask(backend, method, prompt("why?"))
        assert len(counting.llm_token_counts) == 1, type(llm).__name__
        own = TokenCountingHandler()
        llm.callback_manager = watched(own)
        await ask(LLMBackend(llm), method, prompt("why?"))
        assert len(own.llm_token_counts) == 1, type(llm).__name__


async def test_a_query_over_a_completion_model_is_counted_once_a_call() -> None:
    counting, llm = TokenCountingHandler(), Completing(completion_to_prompt=zephyr)
    engine = MemAgentQueryEngine.from_documents(documents(), llm, callback_manager=watched(counting), **SIZES)
    steps = engine.query("q").metadata["memagent"]["steps"]  # type: ignore[index]
    assert len(llm.sent) == len(counting.llm_token_counts) == len(steps)
    assert all(text.startswith("<|user|>\n") and text.endswith("<|assistant|>\n") for text in llm.sent)
    await engine.aquery("q")
    assert len(llm.sent) == len(counting.llm_token_counts) == 2 * len(steps)


def test_the_template_counts_against_the_window() -> None:
    wide = LLMBackend(Completing(completion_to_prompt=lambda text: "word " * 50 + text))
    assert wide.template_tokens >= LLMBackend(Completing()).template_tokens + 50


def test_system_prompts_are_one_message_and_none_is_said_twice() -> None:
    asked = conversation(("system", "You read."), ("user", "hi"), ("assistant", "hello"), ("user", "why?"))
    for own, system in [("", "You read."), ("Be brief.", "Be brief.\n\nYou read."), ("You read.", "You read.")]:
        llm = Hearing(system_prompt=own)
        LLMBackend(llm).complete(asked)
        assert llm.sent == [[("system", system), ("user", "hi"), ("assistant", "hello"), ("user", "why?")]]


class Hearing(Chatting):
    """Keeps the messages."""

    def request(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        return [(message.role.value, message.content) for message in messages]

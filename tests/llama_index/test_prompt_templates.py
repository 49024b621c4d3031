"""Prompt templates of LlamaIndex as the prompts of a reading."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from helpers.fake_llm import ANSWER, SIZES, documents, fake, scripted
from llama_index.core.base.llms.types import ImageBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import (
    ChatPromptTemplate,
    PromptTemplate,
    PromptType,
    RichPromptTemplate,
    SelectorPromptTemplate,
)
from llama_index.core.prompts.chat_prompts import CHAT_REFINE_PROMPT, CHAT_TEXT_QA_PROMPT
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.default_prompts import DEFAULT_REFINE_PROMPT, DEFAULT_TEXT_QA_PROMPT
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import Refine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from pydantic import BaseModel

from memagent_integrations import MemAgentQueryEngine, MemAgentSynthesizer, ScriptedBackend, UsageError

FIRST = "Day 0 was fair."


def prompts_after(templates: dict[str, Any], backend: ScriptedBackend | None = None) -> list[list[tuple[str, str]]]:
    """Return the messages of the first prompt and of the last, after a change of the templates."""
    backend = backend or scripted()
    engine = MemAgentQueryEngine.from_documents(documents()[:1], backend, **SIZES)
    engine.update_prompts({f"response_synthesizer:{name}": template for name, template in templates.items()})
    assert str(engine.query("Why?")) == ANSWER
    return [
        [(message.role, message.content) for message in prompt.messages]
        for prompt in (backend.prompts[0], backend.prompts[-1])
    ]


def test_a_rich_template_of_one_message() -> None:
    (first,), (last,) = prompts_after(
        {
            "memory": RichPromptTemplate("Q: {{ question }} M: {{ memory }} S: {{ section }}"),
            "answer": RichPromptTemplate("Q: {{ query_str }} M: {{ context_str }}"),
        }
    )
    assert first[0] == last[0] == "user"
    assert first[1].startswith("Q: Why? M: (empty: nothing noted yet) S: Day 0 was fair.")
    assert re.fullmatch(r"Q: Why\? M: note \d+", last[1])


def test_templates_of_several_messages() -> None:
    chat = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{query_str} {context_str}")])
    rich = RichPromptTemplate(
        '{% chat role="system" %}Take notes for {{ question }}{% endchat %}'
        '{% chat role="user" %}{{ memory }}\n{{ section }}{% endchat %}'
    )
    first, last = prompts_after({"memory": rich, "answer": chat})
    assert first[0] == ("system", "Take notes for Why?")
    assert first[1][0] == "user"
    assert FIRST in first[1][1]
    assert last[0] == ("system", "Be brief.")
    assert last[1][1].startswith("Why? note ")


@pytest.mark.parametrize(
    ("refine", "text_qa"),
    [
        (DEFAULT_REFINE_PROMPT, DEFAULT_TEXT_QA_PROMPT),
        (CHAT_REFINE_PROMPT, CHAT_TEXT_QA_PROMPT),
        (DEFAULT_REFINE_PROMPT_SEL, DEFAULT_TEXT_QA_PROMPT_SEL),
    ],
)
def test_llama_index_s_own_templates_are_understood(refine: Any, text_qa: Any) -> None:
    first, last = prompts_after({"memory": refine, "answer": text_qa})
    shown = " ".join(content for _, content in first)
    assert "Why?" in shown
    assert FIRST in shown
    assert "(empty: nothing noted yet)" in shown
    assert "Why?" in last[-1][1]
    assert "note " in last[-1][1]


def test_a_selector_selects_by_the_llm_that_gets_the_prompt() -> None:
    plain, chat = PromptTemplate("plain {question} {memory}"), PromptTemplate("for chat {question} {memory}")
    selector = SelectorPromptTemplate(
        default_template=plain, conditionals=[(lambda llm: llm.metadata.is_chat_model, chat)]
    )
    llm = fake()
    synthesizer = MemAgentSynthesizer(llm, **SIZES)
    synthesizer.update_prompts({"answer": selector})
    assert synthesizer.get_prompts()["answer"].get_template().startswith("for chat")
    synthesizer = MemAgentSynthesizer(scripted(), **SIZES)
    synthesizer.update_prompts({"answer": selector})
    assert synthesizer.get_prompts()["answer"].get_template().startswith("plain")


def test_partials_mappings_and_functions_are_applied() -> None:
    template = PromptTemplate(
        "{style} {my_question} {notes} {today}",
        template_var_mappings={"query_str": "my_question", "memory": "notes"},
        function_mappings={"today": lambda **_: "Monday", "style": lambda **each: f"[{each['style']}]"},
    ).partial_format(style="Be brief.")
    _, (last,) = prompts_after({"answer": template})
    assert re.fullmatch(r"\[Be brief\.\] Why\? note \d+ Monday", last[1])
    arranged = PromptTemplate(
        "{both}", function_mappings={"both": lambda **each: f"{each['question']} from {each['memory']}"}
    )
    _, (last,) = prompts_after({"answer": arranged})
    assert last[1].startswith("Why? from note ")


def test_braces_that_are_no_placeholders_stay() -> None:
    _, (last,) = prompts_after({"answer": PromptTemplate('{question} {memory} as {"json": 1} and {other}')})
    assert last[1].endswith('as {"json": 1} and {other}')


NUMBERS = count()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PromptTemplate("{q} {memory}", function_mappings={"q": lambda **e: e["question"].upper()}), "computes"),
        (
            PromptTemplate("{question} {m}", function_mappings={"m": lambda **e: e["memory"] + str(len(e["memory"]))}),
            "computes",
        ),
        (PromptTemplate("{question} {m}", function_mappings={"m": lambda **e: e["memory"][:100]}), "computes"),
        (
            PromptTemplate("{question} {memory} {n}", function_mappings={"n": lambda **_: str(next(NUMBERS))}),
            "another each time",
        ),
        (PromptTemplate("{question} {m}", function_mappings={"m": lambda **each: each["no_such"]}), "KeyError"),
        (RichPromptTemplate("{{ question }} {{ memory | upper }}"), "computes"),
        (PromptTemplate("{question} only"), "lacks {memory}"),
        (PromptTemplate("{question} {memory}", output_parser=PydanticOutputParser(BaseModel)), "output_cls"),
        (ChatPromptTemplate([ChatMessage(role="tool", content="{question} {memory}")]), "tool"),
        (
            ChatPromptTemplate(
                [
                    ChatMessage(
                        role="user",
                        blocks=[*ChatMessage(content="{question} {memory}").blocks, ImageBlock(url="file:///a.png")],
                    )
                ]
            ),
            "ImageBlock",
        ),
        ("{question} {memory}", "not str"),
        (None, "not NoneType"),
    ],
)
def test_templates_that_cannot_be_used(template: Any, message: str) -> None:
    synthesizer = MemAgentSynthesizer(scripted(), **SIZES)
    before = synthesizer.get_prompts()
    with pytest.raises(UsageError, match=message):
        synthesizer.update_prompts({"answer": template})
    assert synthesizer.get_prompts() == before


def test_prompts_shown_can_be_put_back() -> None:
    chat = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question} {memory}")])
    for templates in ({}, {"answer": chat}):
        synthesizer = MemAgentSynthesizer(scripted(), **SIZES)
        synthesizer.update_prompts(templates)
        before = synthesizer.reader.prompts
        synthesizer.update_prompts(synthesizer.get_prompts())
        assert (synthesizer.reader.prompts.update, synthesizer.reader.prompts.answer) == (before.update, before.answer)


GOOD = PromptTemplate("{question} {memory}")


@pytest.mark.parametrize(
    "names",
    [
        ["memory"],
        ["response_synthesizer:text_qa_template"],
        ["synthesizer:answer"],
        ["response_synthesizer:answer", "refine_template"],
        ["response_synthesizer:answer:more"],
        [""],
    ],
)
def test_an_unknown_prompt_is_an_error_and_changes_nothing(names: list[str]) -> None:
    engine = MemAgentQueryEngine.from_documents(documents(), scripted(), **SIZES)
    before = engine.get_prompts()
    with pytest.raises(UsageError, match="response_synthesizer:answer"):
        engine.update_prompts(dict.fromkeys(names, GOOD))
    assert engine.get_prompts() == before


def test_an_unknown_prompt_of_another_synthesizer_is_an_error_too() -> None:
    engine = MemAgentQueryEngine(documents(), Refine(llm=fake()))
    with pytest.raises(UsageError, match="response_synthesizer:text_qa_template"):
        engine.update_prompts({"response_synthesizer:answer": GOOD})
    engine.update_prompts({"response_synthesizer:text_qa_template": PromptTemplate("{query_str} {context_str}")})


class Everything(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=document) for document in documents()]


def test_an_unknown_prompt_is_an_error_in_an_engine_of_llama_index() -> None:
    engine = RetrieverQueryEngine(Everything(), MemAgentSynthesizer(scripted(), **SIZES))
    with pytest.raises(UsageError, match="no prompt 'text_qa_template'"):
        engine.update_prompts({"response_synthesizer:text_qa_template": GOOD})


@pytest.fixture
def no_model() -> Iterator[None]:
    before, Settings._llm = Settings._llm, None
    yield
    Settings._llm = before


def test_templates_are_changed_without_a_model(no_model: None) -> None:
    synthesizer = MemAgentSynthesizer(**SIZES)
    synthesizer.update_prompts({"answer": PromptTemplate("{question} {memory}", prompt_type=PromptType.CUSTOM)})
    assert synthesizer.get_prompts()["answer"].get_template() == "{question} {memory}"

"""The query engine as a part of LlamaIndex's own machines: agents, routers, sub-questions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from helpers.fake_llm import fake
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.base_selector import BaseSelector
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.llms import ChatMessage, ChatResponse, LLMMetadata, MockLLM
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.memory import Memory
from llama_index.core.query_engine import RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.schema import Document, QueryBundle
from llama_index.core.selectors import LLMSingleSelector, MultiSelection, SingleSelection
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from pydantic import Field
from sqlalchemy.ext.asyncio import create_async_engine

from memagent_integrations import BackendError, MemAgentQueryEngine, MemAgentSynthesizer, ScriptedBackend
from memagent_integrations.llama_index.memory import MemAgentMemoryBlock
from memagent_integrations.records import Prompt

# LlamaIndex's agents are pydantic models: the search for their steps touches attributes that pydantic has deprecated.
# One agent also uses what LlamaIndex has deprecated.
DEPRECATED = [
    "ignore::pydantic.PydanticDeprecatedSince20",
    "ignore::pydantic.PydanticDeprecatedSince211",
    "ignore:is_running",
]
pytestmark = pytest.mark.filterwarnings(*DEPRECATED)
SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 40}


class Agent(MockFunctionCallingLLM):
    """Says the messages of its script, one a turn; `seen` is the history."""

    script: list[ChatMessage]
    seen: list[list[ChatMessage]] = Field(default_factory=list)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_function_calling_model=True, is_chat_model=True, model_name="agent")

    def next(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        self.seen.append(list(messages))
        message = self.script[len(self.seen) - 1]
        return ChatResponse(message=message, delta=message.content or "", raw={})

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.next(messages)

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncIterator[ChatResponse]:
        async def stream() -> AsyncIterator[ChatResponse]:
            yield self.next(messages)

        return stream()


def call(tool: str, question: str, number: int = 1) -> ChatMessage:
    block = ToolCallBlock(tool_call_id=str(number), tool_name=tool, tool_kwargs={"input": question})
    return ChatMessage(role="assistant", blocks=[block])


def say(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def backend(answer: str = "7319") -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: answer if prompt.phase == "answer" else "a note")


def engine(answer: str = "7319", **options: Any) -> MemAgentQueryEngine:
    pages = [Document(text="The code of the north gate is 7319. " * 20, id_="log")]
    return MemAgentQueryEngine.from_documents(pages, llm=backend(answer), **SIZES, **options)


def tool(name: str = "log", answer: str = "7319", **options: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine(answer, **options), name=name, description=f"Answers from the {name}.")


# Agents


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_function_agent_asks_the_engine(streaming: bool) -> None:
    llm = Agent(script=[call("log", "What is the code?"), say("The code is 7319.")])
    agent = FunctionAgent(tools=[tool(streaming=streaming)], llm=llm, streaming=streaming)
    handler = agent.run("Which code has the north gate?")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    response = await handler
    assert str(response) == "The code is 7319."
    assert [(each.tool_name, each.tool_kwargs, each.tool_output.content) for each in results] == [
        ("log", {"input": "What is the code?"}, "7319")
    ]
    assert llm.seen[1][-1].content == "7319"
    raw = results[0].tool_output.raw_output
    assert raw.metadata["memagent"]["memory"] == "a note"
    assert {source.node.node_id for source in raw.source_nodes} == {"log"}


async def test_an_agent_asks_several_times_at_once() -> None:
    both = ChatMessage(role="assistant", blocks=[*call("log", "one?", 1).blocks, *call("diary", "two?", 2).blocks])
    llm = Agent(script=[both, say("done")])
    agent = FunctionAgent(tools=[tool("log", "from the log"), tool("diary", "from the diary")], llm=llm)
    assert str(await agent.run("Both?")) == "done"
    assert sorted(message.content or "" for message in llm.seen[1] if message.role == "tool") == [
        "from the diary",
        "from the log",
    ]


async def test_a_reading_that_fails_is_told_to_the_agent() -> None:
    broken = MemAgentQueryEngine.from_documents(
        [Document(text="x")], llm=ScriptedBackend([BackendError("the server is down")]), **SIZES
    )
    llm = Agent(script=[call("log", "What?"), say("I could not read it.")])
    agent = FunctionAgent(tools=[QueryEngineTool.from_defaults(broken, name="log", description="d")], llm=llm)
    assert str(await agent.run("What?")) == "I could not read it."
    assert "the server is down" in (llm.seen[1][-1].content or "")


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_react_agent_asks_the_engine(streaming: bool) -> None:
    thought = 'Thought: I need the log.\nAction: log\nAction Input: {"input": "What is the code?"}'
    llm = Agent(script=[say(thought), say("Thought: I can answer without using any more tools.\nAnswer: 7319")])
    agent = ReActAgent(tools=[tool(streaming=streaming)], llm=llm, streaming=False)
    assert str(await agent.run("Which code?")) == "7319"
    assert "Observation: 7319" in (llm.seen[1][-1].content or "")


async def test_a_workflow_of_agents_streams_while_the_engine_reads() -> None:
    llm = Agent(script=[call("log", "What is the code?"), say("It is 7319.")])
    handler = AgentWorkflow.from_tools_or_functions([tool()], llm=llm).run("Which code?")
    texts = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    assert (str(await handler), "".join(texts)) == ("It is 7319.", "It is 7319.")


async def test_an_agent_with_the_memory_block() -> None:
    """What a user said long ago is in the prompt again, from the overwrite memory."""

    def remember(prompt: Prompt) -> str:
        return "The user is Ann." if "Ann" in prompt.messages[0].content else "nothing"

    block = MemAgentMemoryBlock(ScriptedBackend(remember), chunk_tokens=200, memory_tokens=50)
    database = create_async_engine("sqlite+aiosqlite:///:memory:")
    memory = Memory.from_defaults(
        token_limit=80, chat_history_token_ratio=0.5, token_flush_size=10, memory_blocks=[block], async_engine=database
    )
    llm = Agent(script=[say(f"Answer {number}: " + "so it is. " * 5) for number in range(4)])
    agent = FunctionAgent(tools=[], llm=llm)
    for text in ("I am Ann, by the way.", "What is a harbour?", "What is a tide?", "Who am I?"):
        await agent.run(text, memory=memory)
    await database.dispose()
    shown = " ".join(message.content or "" for message in llm.seen[-1])
    assert "The user is Ann." in shown
    assert "by the way" not in shown


# Sub-questions


class Asks(BaseQuestionGenerator):
    """Asks the questions that it was given."""

    def __init__(self, *questions: tuple[str, str]) -> None:
        self.questions = [SubQuestion(tool_name=name, sub_question=text) for name, text in questions]

    def generate(self, tools: Sequence[ToolMetadata], query: QueryBundle) -> list[SubQuestion]:
        return self.questions

    async def agenerate(self, tools: Sequence[ToolMetadata], query: QueryBundle) -> list[SubQuestion]:
        return self.questions

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        return


def questions(use_async: bool, model: ScriptedBackend, **options: Any) -> SubQuestionQueryEngine:
    asks = Asks(("log", "What does the log say?"), ("diary", "What does the diary say?"))
    tools = [tool("log", "red", **options), tool("diary", "blue", **options)]
    return SubQuestionQueryEngine(asks, MemAgentSynthesizer(model, **SIZES), tools, verbose=False, use_async=use_async)


@pytest.mark.parametrize("streaming", [False, True])
async def test_sub_questions_sync(streaming: bool) -> None:
    model = backend("red and blue")
    response = questions(False, model, streaming=streaming).query("Which colours?")
    shown = model.prompts[0].messages[0].content
    assert str(response) == "red and blue"
    assert "Sub question: What does the log say?\nResponse: red" in shown
    assert shown.index("Response: red") < shown.index("Response: blue"), (
        "answers are read in the order of the questions"
    )
    assert {"log"} <= {source.node.node_id for source in response.source_nodes}


async def test_sub_questions_async() -> None:
    model = backend("red and blue")
    response = await questions(True, model).aquery("Which colours?")
    assert str(response) == "red and blue"
    assert "Response: blue" in model.prompts[0].messages[0].content


def test_sub_questions_from_defaults() -> None:
    engine_ = SubQuestionQueryEngine.from_defaults(
        [tool("log", "red")],
        llm=MockLLM(),
        question_gen=Asks(("log", "What?")),
        response_synthesizer=MemAgentSynthesizer(backend("red"), **SIZES),
        verbose=False,
    )
    assert str(engine_.query("Which colour?")) == "red"
    assert set(engine_.get_prompts()) >= {"response_synthesizer:memory", "response_synthesizer:answer"}


# Routers


class Picks(BaseSelector):
    """Picks the choices that it was given."""

    def __init__(self, *picks: int) -> None:
        self.result = MultiSelection(selections=[SingleSelection(index=pick, reason="so") for pick in picks])

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        return

    def _select(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> MultiSelection:
        return self.result

    async def _aselect(self, choices: Sequence[ToolMetadata], query: QueryBundle) -> MultiSelection:
        return self.result


def router(selector: BaseSelector, summarizer: Any = None, **options: Any) -> RouterQueryEngine:
    tools = [tool("log", "red", **options), tool("diary", "blue", **options)]
    return RouterQueryEngine(selector, tools, llm=MockLLM(), summarizer=summarizer)


async def test_a_router_picks_an_engine() -> None:
    for response in (router(Picks(1)).query("Which colour?"), await router(Picks(1)).aquery("Which colour?")):
        assert str(response) == "blue"
        assert response.metadata["selector_result"].ind == 1
        assert response.metadata["memagent"]["memory"] == "a note"
        assert response.source_nodes


async def test_a_router_whose_selector_is_a_model() -> None:
    llm = fake(lambda _: '[{"choice": 2, "reason": "it is private"}]')
    assert str(await router(LLMSingleSelector.from_defaults(llm=llm)).aquery("Which colour?")) == "blue"
    assert "Answers from the diary." in str(llm.calls[0][1][-1].content)


def test_a_router_hands_a_stream_on() -> None:
    response = router(Picks(0), streaming=True).query("Which colour?")
    assert isinstance(response, StreamingResponse)
    assert "".join(response.response_gen) == "red"


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_router_asks_several_engines(streaming: bool) -> None:
    """Their answers are put together by a synthesizer of ours, where LlamaIndex's default is TreeSummarize."""
    for ask in ("query", "aquery"):
        if streaming and ask == "aquery":
            continue  # LlamaIndex does not take async streams there
        model = backend("both")
        engine_ = router(Picks(0, 1), MemAgentSynthesizer(model, **SIZES), streaming=streaming)
        response = engine_.query("Which colours?") if ask == "query" else await engine_.aquery("Which colours?")
        assert str(response) == "both"
        shown = model.prompts[0].messages[0].content
        assert shown.index("red") < shown.index("blue")

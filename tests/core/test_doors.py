"""The integrations (langchain/, llama_index/) hold no reading logic.

They may import only some names of the core, and each of them sends the same prompts as `Reader`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as Page
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.runtime import Runtime
from llama_index.core import Document
from llama_index.core.llms import ChatMessage

import memagent_integrations
from memagent_integrations import MemAgentQueryEngine, MemAgentReader, PromptSet, Reader, ScriptedBackend, loop
from memagent_integrations.langchain import MemAgentDocumentCompressor, MemAgentMiddleware, build_graph
from memagent_integrations.llama_index import MemAgentMemoryBlock, MemAgentWorkflow
from memagent_integrations.records import Prompt

ROOT = Path(memagent_integrations.__file__).parent
DOORS = ("langchain", "llama_index")
# What an integration may import, by module: the facade, and what it only passes on. None: all names.
CORE: dict[str, set[str] | None] = {
    "": {"files", "policies"},
    "backends": None,
    "backends.around": None,
    "backends.base": None,
    "backends.failures": None,
    "backends.gate": None,
    "backends.replies": None,
    "calls": {"Limits"},
    "checks": None,
    "conversation": None,
    "citations": {"Citation"},
    "documents": {"Piece", "aflattened", "flattened", "is_async", "is_one_shot", "loaded", "pieces"},
    "errors": None,
    "joining": {"NodeForm", "NodeLog", "Order", "as_read"},
    "journal": {"Journal", "NamedMemory"},
    "outputs": {"Output"},
    "places": {"Place"},
    "prompts": {"PLACEHOLDERS", "PromptSet", "Template"},
    "reader": {"Reader"},
    "reader.folding": {"PassedOver", "afold", "fold", "is_about_the_section"},
    "reader.position": {"Position"},
    "reader.running": {"AsyncProgress", "Progress"},
    "reader.sharing": {"SharedDocuments"},
    "reader.unanswered": {"Unanswered"},
    "records": None,
    "redaction": None,
    "sanitize": {"encodable", "harmless"},
    "scopes": {"in_thread"},
    "tokens": {"Counter", "counter_of", "cut", "estimated", "load_counter"},
}
READING = {"memorize", "amemorize", "answer", "aanswer", "read", "aread"}
MADE = {"Budgets", "Chunk", "Piece", "Prompt", "PromptSet", "Reading", "Span", "Step"}
PARTS = {"answer_messages", "parse_answer", "parse_memory", "update_messages"}
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def reading_logic(source: str, door: str) -> Iterator[str]:
    """Yield what in the source of an integration decides how a document is read."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memagent_integrations":
            module = str(node.module).partition(".")[2]
            allowed = CORE.get(module, set())
            yield from (
                f"takes {module}.{name.name}"
                for name in node.names
                if module.split(".")[0] != door and allowed is not None and name.name not in allowed
            )
        elif isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
            yield from ("changes records" for name in node.names if name.name == "replace")
        elif isinstance(node, LOOPS):
            calls = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
            yield from (
                f"calls {method.attr} in a loop"
                for method in calls
                if isinstance(method, ast.Attribute)
                and method.attr in READING
                and "reader" in ast.unparse(method.value)
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in MADE:
            yield f"makes a {ast.unparse(node.func)}"
        elif isinstance(node, ast.Attribute) and node.attr in PARTS:
            yield f"does {node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from (f"has {text} in a text" for text in ("<memory>", "<section>", "\\boxed") if text in node.value)


@pytest.mark.parametrize(
    "path",
    [path for door in DOORS for path in sorted((ROOT / door).glob("*.py"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_door_holds_no_reading_logic(path: Path) -> None:
    assert list(reading_logic(path.read_text(encoding="utf-8"), path.parent.name)) == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from memagent_integrations import loop", "takes .loop"),
        ("from memagent_integrations.chunking import chunks", "takes chunking.chunks"),
        ("from memagent_integrations.reader.setup import Setup", "takes reader.setup.Setup"),
        ("from memagent_integrations.loop import reading_loop", "takes loop.reading_loop"),
        ("from memagent_integrations.tokens import fit", "takes tokens.fit"),
        ("from dataclasses import replace", "changes records"),
        (
            "for chunk in chunks:\n    memory = reader.memorize(question, chunk, memory=memory).memory",
            "calls memorize in a loop",
        ),
        ("while more:\n    reading = await self.reader.amemorize(question, next(chunks))", "calls amemorize in a loop"),
        ("step = Step(index=0)", "makes a Step"),
        ("prompts = PromptSet.default()", "makes a PromptSet.default"),
        ("memory, _ = prompts.parse_memory(reply.text)", "does parse_memory"),
        ("TEMPLATE = 'The notes: <memory>'", "has <memory> in a text"),
    ],
)
def test_what_is_found(source: str, reason: str) -> None:
    assert list(reading_logic(source, "langchain")) == [reason]


# ---- each integration sends the same prompts as the core, whatever the model replies ---------------------

LINES = "".join(f"Line {number} of a text that is read through every door.\n" for number in range(60))
TEXT = LINES + " \n" * 300 + "The end of it.\n"
QUESTION = "What is said?"
REPLIES = ["<think>hm</think>one", "word " * 90, "No changes needed.", "", "<memory>two</memory>", "NO CHANGE", "three"]
SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 30, "on_lost_section": "skip"}


Call = tuple[int, str, str]
"""Index, phase and text of a prompt."""


class Replies(ScriptedBackend):
    """A model whose replies are hard to parse; `calls` is the history."""

    def __init__(self) -> None:
        super().__init__(self.reply)

    @staticmethod
    def reply(prompt: Prompt) -> str:
        return "the answer" if prompt.phase == "answer" else REPLIES[prompt.index % len(REPLIES)]

    @property
    def calls(self) -> list[Call]:
        return [(prompt.index, prompt.phase, prompt.messages[-1].content) for prompt in self.prompts]


def chain(backend: Replies) -> None:
    MemAgentReader(backend, **SIZES).invoke({"question": QUESTION, "context": TEXT})


def graph(backend: Replies) -> None:
    build_graph(MemAgentReader(backend, **SIZES), load=lambda _: TEXT).invoke({"question": QUESTION, "source": "text"})


def compressor(backend: Replies) -> None:
    MemAgentDocumentCompressor(MemAgentReader(backend, **SIZES)).compress_documents([Page(TEXT)], QUESTION)


def query_engine(backend: Replies) -> None:
    MemAgentQueryEngine.from_documents([Document(text=TEXT)], llm=backend, **SIZES).query(QUESTION)


async def workflow(backend: Replies) -> None:
    await MemAgentWorkflow(backend, load=lambda _: TEXT, **SIZES).run(question=QUESTION, document="text")


READERS = [chain, graph, compressor, query_engine, workflow]


async def calls_of(door: Callable[[Replies], Any]) -> list[Call]:
    backend = Replies()
    if (running := door(backend)) is not None:
        await running
    return backend.calls


def plain(backend: Replies) -> None:
    Reader(backend, **SIZES).read(QUESTION, TEXT)


@pytest.mark.parametrize("door", READERS, ids=lambda door: door.__name__)
async def test_a_door_asks_what_the_reader_asks(door: Callable[[Replies], Any]) -> None:
    expected = await calls_of(plain)
    if door is compressor:
        expected = expected[:-1]  # it makes no call for the answer
    assert len(expected) > len(REPLIES)
    assert await calls_of(door) == expected


@pytest.mark.parametrize("door", READERS, ids=lambda door: door.__name__)
async def test_a_door_follows_a_rule_that_changes(
    door: Callable[[Replies], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = PromptSet.update_messages
    before = await calls_of(door)
    monkeypatch.setattr(loop, "cut", lambda text, tokens, count: text[:2])
    monkeypatch.setattr(
        PromptSet,
        "update_messages",
        lambda self, *, question, **parts: update(self, question=f"marked {question}", **parts),
    )
    after = await calls_of(door)
    assert len(after) == len(before)
    assert all("marked" in text for _, phase, text in after if phase == "memory")
    assert "<memory>\non\n</memory>" in after[1][2]


@pytest.mark.parametrize("way", ["middleware", "block"])
async def test_a_conversation_is_folded_by_the_same_rules(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "cut", lambda text, tokens, count: text[:2])
    calls: list[Prompt] = []

    def script(prompt: Prompt) -> str:
        calls.append(prompt)
        return "<think>hm</think>" + "word " * 90

    backend = ScriptedBackend(script)
    if way == "middleware":
        middleware = MemAgentMiddleware(MemAgentReader(backend, **SIZES), budget_tokens=100)
        messages: list[Any] = [
            *(AIMessage(f"I say {number} things.", id=str(number)) for number in range(60)),
            HumanMessage("Go on.", id="last"),
        ]
        update = middleware.before_model({"messages": messages}, Runtime())
        assert update
        memory = update["memory"]
    else:
        block: Any = MemAgentMemoryBlock(backend, **SIZES)
        await block.aput([ChatMessage(role="user", content=f"I say {number} things.") for number in range(60)])
        memory = await block.aget()
    assert (memory, len(calls) > 2) == ("wo", True)
    assert all("<memory>\nwo\n</memory>" in prompt.messages[-1].content for prompt in calls[1:])

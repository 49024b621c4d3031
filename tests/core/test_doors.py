"""The doors hold no reading logic: what they may take from the core, and that each of them follows it."""

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
CORE: dict[str, set[str] | None] = {  # what a door may take: what is handed through, and the facade; None: all of it
    "backends": None,
    "calls": {"Limits"},
    "conversation": None,
    "documents": {"is_async", "is_one_shot", "loaded", "node_place"},
    "errors": None,
    "journal": {"Journal"},
    "place": {"Place"},
    "prompts": {"PromptSet", "harmless"},
    "reader": {"Reader"},
    "records": None,
    "settings": None,
    "tokens": {"Counter", "WAYS_OUT", "cut", "load_counter", "openai_counter"},
}
READING = {"memorize", "amemorize", "answer", "aanswer", "read", "aread"}
MADE = {"Budgets", "Chunk", "Piece", "Prompt", "PromptSet", "Reading", "Span", "Step"}
PARTS = {"answer_messages", "parse_answer", "parse_memory", "update_messages"}
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def reading_logic(source: str, door: str) -> Iterator[str]:
    """What in the source of a door decides how a document is read."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memagent_integrations."):
            home = str(node.module).split(".")[1]
            taken = CORE.get(home, set())
            yield from (
                f"takes {home}.{name.name}"
                for name in node.names
                if home != door and taken is not None and name.name not in taken
            )
        elif isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
            yield from ("changes records" for name in node.names if name.name == "replace")
        elif isinstance(node, LOOPS):
            calls = (
                call.func
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            )
            yield from (
                f"calls {call.attr} in a loop"
                for call in calls
                if call.attr in READING and "reader" in ast.unparse(call.value)
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
    ("source", "found"),
    [
        ("from memagent_integrations.chunking import chunks", "takes chunking.chunks"),
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
def test_what_is_found(source: str, found: str) -> None:
    assert list(reading_logic(source, "langchain")) == [found]


# ---- each door follows the core: the same prompts, whatever the model says ---------------------------------------------------------

TEXT = (
    "".join(f"Line {number} of a text that is read through every door.\n" for number in range(60))
    + " \n" * 300
    + "The end of it.\n"
)
QUESTION = "What is said?"
SAID = ["<think>hm</think>one", "word " * 90, "No changes needed.", "", "<memory>two</memory>", "NO CHANGE", "three"]
SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 30}


class Said(ScriptedBackend):
    """A model that is hard to read; `told` is what it was asked."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "the answer" if prompt.phase == "answer" else SAID[prompt.index % len(SAID)])

    @property
    def told(self) -> list[tuple[int, str, str]]:
        return [(prompt.index, prompt.phase, prompt.messages[-1].content) for prompt in self.prompts]


def chain(backend: Said) -> None:
    MemAgentReader(backend, **SIZES).invoke({"question": QUESTION, "context": TEXT})


def graph(backend: Said) -> None:
    build_graph(MemAgentReader(backend, **SIZES), load=lambda _: TEXT).invoke({"question": QUESTION, "source": "text"})


def compressor(backend: Said) -> None:
    MemAgentDocumentCompressor(MemAgentReader(backend, **SIZES)).compress_documents([Page(TEXT)], QUESTION)


def query_engine(backend: Said) -> None:
    MemAgentQueryEngine.from_documents([Document(text=TEXT)], model=backend, **SIZES).query(QUESTION)


async def workflow(backend: Said) -> None:
    await MemAgentWorkflow(backend, load=lambda _: TEXT, **SIZES).run(question=QUESTION, document="text")


READERS = [chain, graph, compressor, query_engine, workflow]


async def asked(door: Callable[[Said], Any]) -> list[tuple[int, str, str]]:
    backend = Said()
    if (running := door(backend)) is not None:
        await running
    return backend.told


def plain(backend: Said) -> None:
    Reader(backend, **SIZES).read(QUESTION, TEXT)


@pytest.mark.parametrize("door", READERS, ids=lambda door: door.__name__)
async def test_a_door_asks_what_the_reader_asks(door: Callable[[Said], Any]) -> None:
    wanted = await asked(plain)
    if door is compressor:
        wanted = wanted[:-1]  # no answer is asked for
    assert len(wanted) > len(SAID)
    assert await asked(door) == wanted


@pytest.mark.parametrize("door", READERS, ids=lambda door: door.__name__)
async def test_a_door_follows_a_rule_that_changes(door: Callable[[Said], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    update = PromptSet.update_messages
    before = await asked(door)
    monkeypatch.setattr(loop, "cut", lambda text, tokens, count: text[:2])
    monkeypatch.setattr(
        PromptSet,
        "update_messages",
        lambda self, *, question, **parts: update(self, question=f"marked {question}", **parts),
    )
    after = await asked(door)
    assert len(after) == len(before)
    assert all("marked" in text for _, phase, text in after if phase == "memory")
    assert "<memory>\non\n</memory>" in after[1][2]


@pytest.mark.parametrize("way", ["middleware", "block"])
async def test_a_conversation_is_folded_by_the_same_rules(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "cut", lambda text, tokens, count: text[:2])
    said: list[Prompt] = []

    def script(prompt: Prompt) -> str:
        said.append(prompt)
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
    assert (memory, len(said) > 2) == ("wo", True)
    assert all("<memory>\nwo\n</memory>" in prompt.messages[-1].content for prompt in said[1:])

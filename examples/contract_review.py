"""Review a contract in LangGraph: read all of it, show what each finding rests on, file it once a person approves.

It runs offline: the model follows a script. For your own contract, with pages between form feeds, and a real model:
`pdftotext lease.pdf && python examples/contract_review.py lease.txt openai:gpt-5-mini`.
"""

import sys
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.documents import Document
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from memagent_integrations import MemAgentReader, ScriptedBackend
from memagent_integrations.records import Prompt

QUESTION = "How many months of notice does the lease ask for, and what should a tenant object to?"
NOTICE = "Either party may end the lease with three months' notice."
ENTRY = "The landlord may enter the rooms at any hour."
LEASE = "\f".join(f"{'The parties sign this lease in May. ' * 40}{clause}" for clause in ("", NOTICE, ENTRY))
ANSWER = '{"notice_months": 3, "objections": ["The landlord may enter at any hour."]}'


class Review(BaseModel):
    notice_months: int | None = None
    objections: list[str] = []


class State(TypedDict, total=False):
    review: dict[str, Any]
    places: list[str]
    filed: bool


def script(prompt: Prompt) -> str:
    notes = [clause for clause in (NOTICE, ENTRY) if clause in prompt.messages[-1].content]
    return ANSWER if prompt.phase == "answer" else " ".join(notes) or "Nothing yet."


def read(_: State) -> State:
    reading = reader.reading({"question": QUESTION, "context": contract})
    places = [f"page {place.page}: {place.quote(contract)}" for place in reading.citations]
    return {"review": Review.model_validate_json(reading.answer or "").model_dump(), "places": places}


def approve(state: State) -> State:
    return {"filed": interrupt(state)}  # a person sees the review beside the contract's own words


text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else LEASE
contract = [Document(page, metadata={"page": number}) for number, page in enumerate(text.split("\f"), start=1)]
model: Any = sys.argv[2] if len(sys.argv) > 2 else ScriptedBackend(script)
reader = MemAgentReader(model, output=Review, chunk_tokens=400, memory_tokens=200)
graph = StateGraph(State).add_sequence([read, approve]).add_edge(START, "read").compile(checkpointer=InMemorySaver())
thread: Any = {"configurable": {"thread_id": "lease"}}
print(graph.invoke({}, thread)["__interrupt__"][0].value)
print("filed:", graph.invoke(Command(resume=True), thread)["filed"])

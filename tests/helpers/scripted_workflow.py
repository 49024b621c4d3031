"""A model for LlamaIndex workflows that follows a script, and what tests of workflows share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llama_index.core.workflow import Context, Event

from memagent_integrations import BackendError, ScriptedBackend
from memagent_integrations.llama_index.workflow import MemAgentWorkflow
from memagent_integrations.records import Prompt

SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 20}
TEXT = "".join(f"Day {number} was fair. " for number in range(100))
QUESTION = "How was the weather?"


class WorkflowModel:
    """Writes the number of the call into the memory, and answers "fair"; the calls numbered `fails` fail."""

    def __init__(self, *fails: int) -> None:
        self.calls: list[Prompt] = []
        self.fails = set(fails)
        self.backend = ScriptedBackend(self.reply)

    def reply(self, prompt: Prompt) -> str | BackendError:
        self.calls.append(prompt)
        if len(self.calls) in self.fails:
            return BackendError("the server is down", retryable=False)
        return "fair" if prompt.phase == "answer" else f"note {len(self.calls)}"

    def workflow(self, **options: Any) -> MemAgentWorkflow:
        return MemAgentWorkflow(**{"llm": self.backend, "load": {"log": TEXT}.__getitem__, **SIZES, **options})

    @property
    def phases(self) -> list[str]:
        return [prompt.phase for prompt in self.calls]


def restored(workflow: MemAgentWorkflow, context: Context[Any]) -> Context[Any]:
    """Return the context as another process gets it."""
    return Context.from_dict(workflow, json.loads(json.dumps(context.to_dict())))


async def events_until(handler: Any, stop: Callable[[Event], bool]) -> list[Event]:
    events: list[Event] = []
    async for event in handler.stream_events():
        events.append(event)
        if stop(event):
            break
    return events


def memory_in(prompt: Prompt) -> str:
    return prompt.messages[0].content.partition("<memory>\n")[2].partition("\n</memory>")[0]

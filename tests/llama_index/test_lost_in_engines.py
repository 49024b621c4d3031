"""Sections that the model wrote no memory for, as a user of LlamaIndex sees them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.scripted_workflow import QUESTION, TEXT, WorkflowModel
from llama_index.core import Document

from memagent_integrations import MemAgentQueryEngine
from memagent_integrations.errors import NoMemory
from memagent_integrations.records import Prompt

SIZES: dict[str, Any] = {"chunk_tokens": 100, "memory_tokens": 20}


class Losing(WorkflowModel):
    """Writes nothing for the section with day 30."""

    def reply(self, prompt: Prompt) -> Any:
        usual = super().reply(prompt)
        return "" if "Day 30 " in prompt.messages[-1].content else usual


def engine(**settings: Any) -> MemAgentQueryEngine:
    return MemAgentQueryEngine.from_documents([Document(text=TEXT)], Losing().backend, **SIZES, **settings)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
async def test_the_response_tells_what_was_lost(streaming: bool) -> None:
    response: Any = engine(on_lost_section="skip", streaming=streaming).query(QUESTION)
    assert str(response) == "fair"
    details = response.metadata["memagent"]
    (lost,) = details["lost_sections"]
    assert "Day 30 " in TEXT[lost["start"] : lost["end"]]
    assert details["warnings"][0].startswith("sections lost: 1 of")
    with pytest.raises(NoMemory, match="is lost"):
        await engine().aquery(QUESTION)


async def test_a_workflow_tells_what_was_lost() -> None:
    result = await Losing().workflow(on_lost_section="skip").run(question=QUESTION, document="log")
    assert result.warnings[0].startswith(f"sections lost: 1 of {len(result.steps) - 1}")
    assert (await WorkflowModel().workflow().run(question=QUESTION, document="log")).warnings == []
    with pytest.raises(NoMemory, match="is lost"):
        await Losing().workflow().run(question=QUESTION, document="log")

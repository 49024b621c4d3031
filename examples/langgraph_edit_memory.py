"""A graph that reads a document, while a person checks the memory after each chunk and corrects it.

It runs offline: the model follows a script. With a real model (any name that `MemAgentReader` takes):
`python examples/langgraph_edit_memory.py openai:gpt-5-mini`. The thread is kept in memory here; with `SqliteSaver` it
outlives the process, and `graph.invoke(None, config)` resumes it.
"""

import sys
import tempfile
from pathlib import Path

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from memagent_integrations import MemAgentReader, ScriptedBackend
from memagent_integrations.langchain import build_graph
from memagent_integrations.records import Prompt

LINE = "The harbour master noted the tide and the weather. "
LOG = LINE * 60 + "The keeper writes that the code of the north gate is 7319. " + LINE * 30


def script(prompt: Prompt) -> str:
    text = prompt.messages[-1].content
    if "keeper writes" in text:
        return "The code of the north gate is 1739."  # a slip
    known = next((code for code in ("1739", "7319") if code in text), None)
    if prompt.phase == "answer":
        return known or "It is not there."
    return f"The code of the north gate is {known}." if known else "Nothing about the code yet."


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else ScriptedBackend(script)
    reader = MemAgentReader(model, chunk_tokens=400, memory_tokens=100)
    graph = build_graph(reader, checkpointer=InMemorySaver(), interrupt_after=["read_chunk"])
    config: RunnableConfig = {"configurable": {"thread_id": "log"}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        path.write_text(LOG, encoding="utf-8")
        state = graph.invoke({"question": "What is the code of the north gate?", "source": str(path)}, config)
        while graph.get_state(config).next:
            print(f"chunk {state['chunk']}: {state['memory']}")
            if "1739" in state["memory"]:  # here a person would look into the log
                graph.update_state(config, {"memory": "The code of the north gate is 7319."})
            state = graph.invoke(None, config)
        print(state["answer"])


if __name__ == "__main__":
    main()

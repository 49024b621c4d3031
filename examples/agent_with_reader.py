"""An agent that asks questions about long documents, and remembers a long conversation.

It runs offline: the models follow a script. With real models, replace the scripted backends by
`MemAgentReader(ChatOpenAI(model="gpt-4.1-mini"))` and the scripted chat model by `"openai:gpt-4.1"`.
"""

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from memagent_integrations import MemAgentReader, ScriptedBackend
from memagent_integrations.langchain import MemAgentMiddleware, MemAgentTool


class ScriptedChatModel(GenericFakeChatModel):
    """A chat model that replies with its messages, whatever tools it gets."""

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        """Return the model itself."""
        return self


TIDES = "The harbour master noted the tide and the weather. " * 200
LOG = TIDES + "The keeper writes that the code of the north gate is 7319. "
MINUTES = "The board met and spoke of the dredging. " * 200

# one reader reads the documents, the other writes the memory of the conversation
replies = ["Tides.", "The code of the north gate is 7319.", "It is 7319."]
reader = MemAgentReader(ScriptedBackend(replies), chunk_tokens=1200, memory_tokens=100)
memory = ["The user asked for the code of the north gate; the log says 7319."]
notes = MemAgentReader(ScriptedBackend(memory), memory_tokens=100)

arguments = {"question": "What is the code of the north gate?", "document": "log"}
call = {"name": "read_document", "args": arguments, "id": "1"}
model = ScriptedChatModel(
    messages=iter([AIMessage("", tool_calls=[call]), AIMessage("The code is 7319."), AIMessage("You are welcome.")])
)

agent: Any = create_agent(
    model,
    [MemAgentTool(reader, documents={"log": LOG, "minutes": MINUTES})],
    middleware=[MemAgentMiddleware(notes, budget_tokens=40)],  # a budget for a short example
    checkpointer=InMemorySaver(),
)
thread = {"configurable": {"thread_id": "gate"}}

state = agent.invoke({"messages": [HumanMessage("How do I open the north gate?")]}, thread)
read = next(message for message in state["messages"] if isinstance(message, ToolMessage))
print(f"{read.artifact['document']}, {read.artifact['chunks']} chunks: {read.text}")
print(state["messages"][-1].text)

state = agent.invoke({"messages": [HumanMessage("Thank you.")]}, thread)
print(f"{state['messages'][-1].text} Memory: {state['memory']}")

"""An agent over a folder of filings: it looks single facts up, and reads a filing whole where that is not enough.

It runs offline, on scripts. For a folder of text files and a real model: `pip install llama-index-llms-openai`, then
`python examples/filings_agent.py FOLDER gpt-5-mini "QUESTION"`.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from llama_index.core import SimpleDirectoryReader, SimpleKeywordTableIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockFunctionCallingLLM, ToolCallBlock
from llama_index.core.tools import QueryEngineTool, RetrieverTool

from memagent_integrations import MemAgentQueryEngine, ScriptedBackend
from memagent_integrations.records import Prompt

LOOK_UP = "Finds the passages that name something, for a question that one passage answers."
READ = "Reads a whole filing, slowly, for what is spread over it or has to be complete: sums, changes, lists."
SITES = ("The mill in Aalen was sold.", "The mill in Bremen burned down.")
FILING = "\n\n".join(f"{'The board met, and resolved as proposed. ' * 60}{site}" for site in SITES)
QUESTION = "Which mills did the company lose?"


def agent_script(messages: list[ChatMessage], **_: Any) -> ChatMessage:
    if messages[-1].role == "tool":
        return ChatMessage(role="assistant", content=f"It lost two. {messages[-1].content}")
    return ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="read_2025", tool_kwargs={"input": QUESTION})])


def reader_script(prompt: Prompt) -> str:
    return " ".join(site for site in SITES if site in prompt.messages[-1].content) or "Nothing yet."


async def main(folder: str, llm: Any, reader: Any, question: str) -> None:
    filings = await SimpleDirectoryReader(folder, required_exts=[".txt"]).aload_data()
    retriever = SimpleKeywordTableIndex.from_documents(filings, llm=llm).as_retriever("simple")
    tools: list[Any] = [RetrieverTool.from_defaults(retriever, LOOK_UP, name="look_up")]
    for filing in filings:
        engine = MemAgentQueryEngine.from_documents([filing], reader, chunk_tokens=500, memory_tokens=100)
        tools.append(QueryEngineTool.from_defaults(engine, f"read_{Path(filing.metadata['file_path']).stem}", READ))
    print(result := await FunctionAgent(tools=tools, llm=llm, streaming=False).run(question))
    for read in [call for call in result.tool_calls if call.tool_name != "look_up"]:
        for place in read.tool_output.raw_output.metadata["memagent"]["citations"]:
            print(f"{read.tool_name}, characters {place['start']} to {place['end']}: {place['statement']}")


if len(sys.argv) > 1:
    from llama_index.llms.openai import OpenAI

    asyncio.run(main(sys.argv[1], OpenAI(sys.argv[2]), OpenAI(sys.argv[2]), sys.argv[3]))
else:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "2025.txt").write_text(FILING, encoding="utf-8")
        llm = MockFunctionCallingLLM(response_generator=agent_script)
        asyncio.run(main(folder, llm, ScriptedBackend(reader_script), QUESTION))

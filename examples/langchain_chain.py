"""A question about a long document, answered in a LangChain chain. It runs offline: the model follows a script.

With a real model, replace the scripted backend: `MemAgentReader(ChatOpenAI(model="gpt-4.1-mini"), ...)`.
"""

from collections.abc import Iterator

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser

from memagent_integrations import MemAgentReader, PromptSet, ScriptedBackend


def pages() -> Iterator[Document]:
    for number in range(1, 31):
        text = "The harbour master noted the tide and the weather. " * 8
        if number == 12:
            text += "The keeper writes that the code of the north gate is 7319. "
        yield Document(text, metadata={"source": "log", "page": number})


notes = ["NO CHANGE", "The code of the north gate is 7319.", "NO CHANGE", "The code is 7319."]
prompts = PromptSet.default(no_change=True)  # the model may say that a section brings nothing new
reader = MemAgentReader(ScriptedBackend(notes), prompts=prompts, chunk_tokens=1000, memory_tokens=100)

chain = reader | StrOutputParser()
for text in chain.stream({"question": "What is the code of the north gate?", "context": pages()}):
    print(text, end="", flush=True)
print()

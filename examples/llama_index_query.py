"""A question about LlamaIndex documents of any length, with the parts of the documents that were read for it.

It runs offline: the model follows a script. For a real one pass a LlamaIndex LLM or a name such as "openai:gpt-5-mini"
as `llm=`; without it, `Settings.llm` is used.
"""

from llama_index.core.schema import Document

from memagent_integrations import MemAgentQueryEngine, PromptSet, ScriptedBackend

DOCUMENTS = [
    Document(text="The harbour master noted the tide and the wind.\n\n" * 40, metadata={"file": "log-1.txt"}),
    Document(
        text="The code of the north gate is 7319.\n\n" + "Nothing else happened that day.\n\n" * 40,
        metadata={"file": "log-2.txt"},
    ),
]


def main() -> None:
    backend = ScriptedBackend(
        lambda prompt: "The north gate's code is 7319." if "7319" in prompt.messages[0].content else "NO CHANGE"
    )
    prompts = PromptSet.default(no_change=True)  # the model may say that a section brings nothing new
    engine = MemAgentQueryEngine.from_documents(
        DOCUMENTS, llm=backend, prompts=prompts, chunk_tokens=300, memory_tokens=100, streaming=True
    )
    response = engine.query("What is the code of the north gate?")
    for text in response.response_gen:
        print(text, end="", flush=True)
    print()
    steps = response.metadata["memagent"]["steps"]
    print([step["outcome"] for step in steps], response.metadata["memagent"]["usage"])
    files = {source.node.node_id: source.node.metadata["file"] for source in response.source_nodes}
    for number, step in enumerate(steps):
        print(number, [(files[part["node_id"]], part["start"], part["end"]) for part in step["nodes"]])


if __name__ == "__main__":
    main()

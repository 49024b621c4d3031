"""A question about a long document: LlamaIndex's own `Refine` and a bounded memory, side by side, with one model.

    python examples/llama_index_beside_refine.py                    # a scripted model: the seconds mean nothing
    python examples/llama_index_beside_refine.py --model smollm2    # the embedded model, or any that load_backend knows

Refine carries its answer from chunk to chunk, and repeats it in every prompt; the memory never exceeds its budget.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.node_parser import TokenTextSplitter

from memagent_integrations import Backend, MemAgentQueryEngine, ScriptedBackend, load_backend
from memagent_integrations.llama_index import LLMBackend
from memagent_integrations.records import Message, Prompt

QUESTION = "What is the code of the north gate?"
FACT = "The keeper writes that the code of the north gate is 7319. "
CHUNK, OUTPUT = 500, 60


class Counted(CustomLLM):
    """A LlamaIndex LLM over a backend that counts its calls and tokens in the same way for both."""

    backend: Any
    calls: int = 0
    tokens: int = 0

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex needs to know about the model."""
        return LLMMetadata(
            context_window=self.backend.window or 8192,
            num_output=OUTPUT,
            is_chat_model=True,
            model_name=self.backend.name,
        )

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Call the backend once."""
        texts = [message.content or "" for message in messages]
        roles = ["system" if message.role == "system" else "user" for message in messages]
        converted = tuple(Message(role=role, content=text) for role, text in zip(roles, texts, strict=True))
        limit = kwargs.get("max_tokens", OUTPUT)
        reply = self.backend.complete(Prompt(index=self.calls, phase="answer", messages=converted, max_tokens=limit))
        self.calls += 1
        self.tokens += sum(map(self.backend.count, [*texts, reply.text]))
        return ChatResponse(message=ChatMessage(role="assistant", content=reply.text))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`chat`, with one message."""
        response = self.chat([ChatMessage(role="user", content=prompt)], **kwargs)
        return CompletionResponse(text=response.message.content or "")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """`complete`, in one piece."""
        yield self.complete(prompt, formatted, **kwargs)


def script(prompt: Prompt) -> str:
    """A model that finds the code if it is shown."""
    return "The code of the north gate is 7319." if "7319" in prompt.messages[-1].content else "The log does not say."


def log(pages: int) -> Document:
    weather = "The harbour master noted the tide and the weather of day {}. "
    day = weather + "The wind came from the west, and two ships left for the islands. "
    days = [day.format(number) + (FACT if number == pages // 3 else "") for number in range(pages)]
    return Document(text="".join(days))


def refine(llm: Counted, document: Document) -> str:
    splitter = TokenTextSplitter(
        chunk_size=CHUNK, chunk_overlap=0, tokenizer=lambda text: list(range(llm.backend.count(text)))
    )
    index = SummaryIndex.from_documents([document], transformations=[splitter])
    return str(index.as_query_engine(llm=llm, response_mode="refine").query(QUESTION))


def memory(llm: Counted, document: Document) -> str:
    model = LLMBackend(llm, tokenizer=llm.backend.count, limit_parameter="max_tokens")
    engine = MemAgentQueryEngine.from_documents(
        [document], llm=model, chunk_tokens=CHUNK, memory_tokens=OUTPUT, output_tokens=OUTPUT
    )
    return str(engine.query(QUESTION))


def main() -> None:
    parser = argparse.ArgumentParser(description="LlamaIndex's Refine and MemAgent's memory, side by side")
    parser.add_argument("--model", default="scripted", help="'scripted', or any name that load_backend knows")
    parser.add_argument("--days", type=int, default=60, help="length of the document")
    options = parser.parse_args()
    backend: Backend = ScriptedBackend(script) if options.model == "scripted" else load_backend(options.model)
    ways: dict[str, Callable[[Counted, Document], str]] = {"Refine": refine, "MemAgent": memory}
    print(f"{'':<10}{'calls':>6}{'tokens':>8}{'seconds':>9}  answer")
    for name, ask in ways.items():
        llm, begun = Counted(backend=backend), time.monotonic()
        answer = " ".join(ask(llm, log(options.days)).split())
        seconds = time.monotonic() - begun
        print(f"{name:<10}{llm.calls:>6}{llm.tokens:>8}{seconds:>9.2f}  {answer[:70]}")
    backend.close()


if __name__ == "__main__":
    main()

"""Models whose tokenizer is not known, called as the first lines of the documentation call them."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import SecretStr

from memagent_integrations import MemAgentReader
from memagent_integrations.langchain import ChatModelBackend
from memagent_integrations.tokens import approximate

INPUT: Any = {"question": "When is rent due?", "context": "The rent is due on the third of the month. " * 900}


class ChatLocal(BaseChatModel):
    """A chat model like that of langchain-ollama: `model` is its name, and nothing says how it counts."""

    model: str = "qwen3"
    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "local"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self.calls += 1
        return ChatResult(generations=[ChatGeneration(message=AIMessage("on the 3rd"))])


class ChatNamed(ChatLocal):
    """A chat model like those of langchain-groq and langchain-openai, which call it `model_name`."""

    model_name: str = "llama-3.1-8b"
    groq_api_key: SecretStr = SecretStr("none")


@pytest.mark.parametrize("kind", [ChatLocal, ChatNamed])
async def test_a_model_with_an_unknown_tokenizer_reads_at_once_and_warns_once(kind: type[ChatLocal]) -> None:
    model = kind()
    reader = MemAgentReader(model)

    async def answers() -> list[str]:
        streamed = "".join(str(chunk.text) for chunk in reader.stream(INPUT))
        return [streamed, str(reader.invoke(INPUT).text), str((await reader.ainvoke(INPUT)).text)]

    with pytest.warns(UserWarning, match=r"the tokens of .* are estimated, .*pass tokenizer=") as warnings:
        assert await answers() == ["on the 3rd"] * 3
    assert len(warnings) == 1
    assert model.calls >= 9, "chunks and an answer, three times"


def test_no_chunk_of_estimated_tokens_is_larger_than_its_budget() -> None:
    backend = ChatModelBackend(ChatLocal())
    with pytest.warns(UserWarning, match="langchain:ChatLocal:qwen3"):
        assert backend.count("rent " * 100) == approximate("rent " * 100)


def test_a_named_tokenizer_is_used_without_a_warning() -> None:
    reader = MemAgentReader(ChatLocal(), tokenizer="approximate")
    assert reader.invoke(INPUT).text == "on the 3rd"

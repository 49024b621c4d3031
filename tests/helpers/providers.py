"""Small chat models with the names and fields of LangChain's integrations, which take their settings as those do.

Each keeps what would go to its server or its model in `sent`, and replies with `reply`, or as `respond` says.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult
from pydantic import Field, PrivateAttr, SecretStr


class Provider(BaseChatModel):
    """A model that sends `defaults`, and over them the arguments of the call that are among `takes`."""

    reply: str = "note"
    respond: Callable[[str], str | AIMessage] | None = None
    sent: list[dict[str, Any]] = Field(default_factory=list, repr=False)
    defaults: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    @property
    def _llm_type(self) -> str:
        return "provider"

    def request(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what is sent."""
        if unknown := options.keys() - {*self.takes}:
            raise TypeError(f"chat() got an unexpected keyword argument {unknown.pop()!r}")
        return {name: getattr(self, name) for name in self.defaults} | options

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **options: Any
    ) -> ChatResult:
        self.sent.append(self.request(options))
        reply = self.respond(str(messages[-1].text)) if self.respond else self.reply
        message = reply if isinstance(reply, AIMessage) else AIMessage(reply)
        return ChatResult(generations=[ChatGeneration(message=message)])


class ChatOllama(Provider):
    """Its settings are fields, or all of them `options` of a call. Its client asks the server about the model."""

    model: str = "llama3"
    base_url: str | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    _client: Any = PrivateAttr(None)

    def model_post_init(self, context: Any) -> None:
        """Make the client, as the integration does."""
        super().model_post_init(context)
        self._client = SimpleNamespace(show=self._show)

    def request(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what is sent: the fields unless there are options."""
        given = options.pop("options", None)
        fields = {"num_predict": self.num_predict, "num_ctx": self.num_ctx}
        own = {name: value for name, value in fields.items() if value is not None}
        return super().request(options) | {"options": own if given is None else given}

    def _show(self, model: str) -> Any:
        if self.base_url is None:
            raise ConnectionError("Failed to connect to Ollama. Please check that Ollama is downloaded and running.")
        data = json.dumps({"model": model}).encode()
        request = urllib.request.Request(
            f"{self.base_url}/api/show", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return SimpleNamespace(modelinfo=json.load(answer)["model_info"])


class ChatLlamaCpp(Provider):
    """A model of llama-cpp-python."""

    n_ctx: int = 512
    max_tokens: int = 256
    client: Any = None
    defaults: tuple[str, ...] = ("max_tokens",)


class ChatBedrockConverse(Provider):
    """Its limit is a field only."""

    model_id: str = "anthropic.claude"
    max_tokens: int | None = None
    defaults: tuple[str, ...] = ("max_tokens",)


class ChatVertexAI(Provider):
    """Its limit is called by another name."""

    model_name: str = "gemini"
    max_output_tokens: int | None = None
    takes: tuple[str, ...] = ("max_output_tokens",)


class ChatCohere(Provider):
    """Its limit is no field, but goes to the server."""

    takes: tuple[str, ...] = ("max_tokens",)


class ChatFireworks(Provider):
    """Takes its limit with a call."""

    max_tokens: int | None = None
    takes: tuple[str, ...] = ("max_tokens", "stop")


class ChatAnthropic(Provider):
    """Takes its limit with a call; has a key."""

    model: str = "claude"
    anthropic_api_key: SecretStr = SecretStr("sk-ant-secret")
    max_tokens: int = 1024
    takes: tuple[str, ...] = ("max_tokens",)


class ChatBaichuan(Provider):
    """One of the many that nobody lists here: its limit is a field."""

    max_tokens: int | None = None
    defaults: tuple[str, ...] = ("max_tokens",)


class HuggingFacePipeline(BaseLLM):
    """A transformers pipeline."""

    pipeline: Any = None
    sent: list[dict[str, Any]] = Field(default_factory=list, repr=False)

    @property
    def _llm_type(self) -> str:
        return "huggingface_pipeline"

    def _generate(self, prompts: list[str], stop: Any = None, run_manager: Any = None, **options: Any) -> LLMResult:
        self.sent.append(options.get("pipeline_kwargs", {}))
        return LLMResult(generations=[[Generation(text="note")]])


class ChatHuggingFace(Provider):
    """A chat model around a pipeline, or another model of Hugging Face's."""

    llm: Any = None
    takes: tuple[str, ...] = ("pipeline_kwargs", "max_tokens")


class OllamaLLM(BaseLLM):
    """A model of plain text."""

    model: str = "llama3"
    num_predict: int | None = None
    num_ctx: int | None = 2048
    prompts: list[str] = Field(default_factory=list, repr=False)
    sent: list[dict[str, Any]] = Field(default_factory=list, repr=False)

    @property
    def _llm_type(self) -> str:
        return "ollama"

    def _generate(self, prompts: list[str], stop: Any = None, run_manager: Any = None, **options: Any) -> LLMResult:
        self.prompts += prompts
        self.sent.append({"num_predict": self.num_predict, "num_ctx": self.num_ctx, **options})
        return LLMResult(generations=[[Generation(text="note")]])

"""Small LLMs with the names and fields of LlamaIndex's integrations, which read their settings as those do.

Each keeps what would go to its server or its model in `sent`, and replies with `reply`. `OpenAI` calls a server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import openai
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import Field, PrivateAttr


class Completing(CustomLLM):
    """A completion model, without a server."""

    reply: str = "so it is"
    chats: bool = False
    sent: list[Any] = Field(default_factory=list)
    raw: Any = None

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=self.chats, model_name="small", context_window=8192)

    def request(self, prompt: str, options: dict[str, Any]) -> Any:
        """Return what is sent for a prompt that is formatted already."""
        return prompt

    def respond(self, prompt: str, options: dict[str, Any]) -> CompletionResponse:
        self.sent.append(self.request(prompt, options))
        return CompletionResponse(text=self.reply, raw=self.raw)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        assert formatted, "the prompt has been formatted"
        return self.respond(prompt, kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Iterator[CompletionResponse]:
        assert formatted, "the prompt has been formatted"
        whole, text = self.respond(prompt, kwargs), ""

        def stream() -> Iterator[CompletionResponse]:
            nonlocal text
            for word in self.reply.split(" "):
                delta = f" {word}" if text else word
                text += delta
                yield CompletionResponse(text=text, delta=delta, raw=whole.raw)

        return stream()


class Both(Completing):
    """A completion model with async methods of its own."""

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        assert formatted
        return self.respond(prompt, kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncIterator[CompletionResponse]:
        assert formatted

        async def stream() -> AsyncIterator[CompletionResponse]:
            yield self.respond(prompt, kwargs)

        return stream()


class LlamaCPP(Completing):
    """Sends `generate_kwargs`, and no keyword argument; its window is that of the loaded model."""

    max_new_tokens: int = 256
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    n_ctx: int = DEFAULT_CONTEXT_WINDOW

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.generate_kwargs["max_tokens"] = self.max_new_tokens

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self.n_ctx, num_output=self.max_new_tokens, model_name="model.gguf")

    def request(self, prompt: str, options: dict[str, Any]) -> Any:
        self.generate_kwargs.update({"stream": False})
        return dict(self.generate_kwargs)


class HuggingFaceLLM(Completing):
    """Sends `max_new_tokens` and `generate_kwargs`; formats messages by the chat template of its tokenizer."""

    context_window: int = DEFAULT_CONTEXT_WINDOW
    max_new_tokens: int = 256
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    _model: Any = PrivateAttr(default=None)
    _tokenizer: Any = PrivateAttr(default=None)

    def __init__(self, *, positions: int | None = None, chat_template: str | None = None, **fields: Any) -> None:
        fields = {"context_window": DEFAULT_CONTEXT_WINDOW, "messages_to_prompt": self._template} | fields
        super().__init__(**fields)
        self._tokenizer = type("Tokenizer", (), {"chat_template": chat_template})
        config = type("Config", (), {"max_position_embeddings": positions})
        self._model = type("Model", (), {"config": config})

    def _template(self, messages: Sequence[ChatMessage]) -> str:
        return "".join(f"<{message.role.value}>{message.content}" for message in messages) + "<assistant>"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self.context_window, num_output=self.max_new_tokens, is_chat_model=self.chats)

    def request(self, prompt: str, options: dict[str, Any]) -> Any:
        return {"prompt": prompt, "max_new_tokens": self.max_new_tokens, **self.generate_kwargs}

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        response = self.complete(self._template(messages), formatted=True, **kwargs)
        return ChatResponse(message=ChatMessage(role="assistant", content=response.text), raw=response.raw)


class Chatting(CustomLLM):
    """A chat model, without a server: `answer` gives the responses, `options` are those that arrived."""

    answer: Callable[[], Any] | None = None
    sent: list[Any] = Field(default_factory=list)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, model_name="small", context_window=8192)

    def request(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        return options

    def respond(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        self.sent.append(self.request(messages, options))
        if self.answer:
            return self.answer()
        return ChatResponse(message=ChatMessage(role="assistant", content="so it is"))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        response: ChatResponse = self.respond(messages, kwargs)
        return response

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        response: ChatResponse = self.respond(messages, kwargs)
        return response

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Iterator[ChatResponse]:
        response = self.respond(messages, kwargs)
        return (each for each in ([response] if isinstance(response, ChatResponse) else response))

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        raise AssertionError("a chat model is asked to chat")

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Iterator[CompletionResponse]:
        raise AssertionError("a chat model is asked to chat")


class Ollama(Chatting):
    """Sends `additional_kwargs` as options, and no keyword argument; asks its server for the window."""

    context_window: int = -1
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    shown: int | None = None  # what the server says of the model
    shows: int = 0

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=self.get_context_window(), model_name="llama", is_chat_model=True)

    def get_context_window(self) -> int:
        if self.context_window == -1:
            self.shows += 1
            if self.shown == 0:
                raise ConnectionError("no server at localhost:11434")
            self.context_window = self.shown or -1
        return self.context_window if self.context_window != -1 else DEFAULT_CONTEXT_WINDOW

    def request(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        return {"num_ctx": self.get_context_window(), **self.additional_kwargs}


class GoogleGenAI(Chatting):
    """Merges the keyword argument `generation_config` into its own."""

    _generation_config: dict[str, Any] = PrivateAttr(default_factory=lambda: {"temperature": 0.1})

    def request(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        return {**self._generation_config, **options.pop("generation_config", {})}


class Anthropic(Chatting):
    """Lets keyword arguments take the place of its fields."""

    max_tokens: int = 512
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)

    def request(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        return {"max_tokens": self.max_tokens, **self.additional_kwargs, **options}


class Bedrock(Chatting):
    """Reads the field `max_tokens`."""

    max_tokens: int = 512

    def request(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> Any:
        assert not options
        return {"maxTokens": self.max_tokens}


class OpenAI(Chatting):
    """Calls a server through OpenAI's SDK; its own fields take the place of keyword arguments, as in LlamaIndex's."""

    api_base: str = ""
    api_key: str = "sk-a-very-secret-key-1234567890"
    max_tokens: int | None = None
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    _client: Any = PrivateAttr(default=None)

    def options(self, **kwargs: Any) -> dict[str, Any]:
        own = {"model": "m", **kwargs} | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})
        return {**own, **self.additional_kwargs}

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = openai.OpenAI(api_key=self.api_key, base_url=self.api_base, max_retries=0)
        return self._client

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        sent = [{"role": message.role.value, "content": message.content} for message in messages]
        raw = self.client.chat.completions.create(messages=sent, **self.options(**kwargs))
        return ChatResponse(message=ChatMessage(role="assistant", content=raw.choices[0].message.content), raw=raw)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self.chat(messages, **kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Iterator[ChatResponse]:
        sent = [{"role": message.role.value, "content": message.content} for message in messages]

        def stream() -> Iterator[ChatResponse]:
            text = ""
            for chunk in self.client.chat.completions.create(messages=sent, **self.options(stream=True, **kwargs)):
                delta = (chunk.choices[0].delta.content if chunk.choices else "") or ""
                text += delta
                yield ChatResponse(message=ChatMessage(role="assistant", content=text), delta=delta, raw=chunk)

        return stream()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncIterator[ChatResponse]:
        async def stream() -> AsyncIterator[ChatResponse]:
            for response in self.stream_chat(messages, **kwargs):
                yield response

        return stream()


def watched(*handlers: Any) -> CallbackManager:
    """Return a callback manager with these handlers."""
    return CallbackManager(list(handlers))

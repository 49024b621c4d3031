"""OpenAI-compatible endpoints on the loopback interface, and backends that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.loopback import TOKEN, Loopback, Request, Response, chat
from memagent_integrations.backends.openai import OpenAIBackend

KEY = "sk-a-very-secret-key-1234567890"


def problem(status: int, message: str = "it is so", **more: Any) -> Response:
    """Return an error response in OpenAI's form; `more` are further fields of the error."""
    return Response(status=status, body={"error": {"message": message, **more}})


def endpoint(respond: Callable[[Request], Response] | list[Any], **options: Any) -> tuple[Loopback, OpenAIBackend]:
    """Return a server that answers with `respond`, or with a list of replies, and a backend of the model "m" for it."""
    server = Loopback(respond if callable(respond) else chat(respond))
    return server, OpenAIBackend("m", base_url=f"{server.url}/v1", **({"max_retries": 0, "timeout": 5.0} | options))


def keeping(respond: Callable[[Request], Response], reply: str) -> Callable[[Request], Response]:
    """Return an endpoint as `respond` that answers with `reply` where a request has a schema."""
    structured = chat(lambda prompt: reply)
    return lambda request: (structured if "response_format" in (request.body or {}) else respond)(request)


def answer(prompt: str) -> str | Response:
    """Return a reply for `chat` that satisfies `BackendContract`, with a window of 8,192 tokens."""
    if len(TOKEN.findall(prompt)) > 8192:
        return problem(400, "This model's maximum context length is 8192 tokens", code="context_length_exceeded")
    return "red, green and blue are colours that one can name here today."

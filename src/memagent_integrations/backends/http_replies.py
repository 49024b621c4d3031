"""What a server sends over HTTP: decoded JSON, the events of a stream, or an error with what it says about it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = "\ufeff".encode()  # which a stream may begin with
_LONGEST_TEXT = 1000  # characters of an answer that is no error in OpenAI's form


class ServerError(Exception):
    """An error that a server sent, by its status or as an event; the message is the server's.

    `failures.from_exception` reads the fields, which have the names that they have in the SDKs.
    """

    def __init__(self, error: Any, response: httpx.Response | None = None, text: str = "") -> None:
        fields = error if isinstance(error, dict) else {"message": error}
        message = fields.get("message")
        status = response.status_code if response else None
        reason = response.reason_phrase if response else ""
        super().__init__(
            message if message and isinstance(message, str) else text[:_LONGEST_TEXT] or reason or "it says no more"
        )
        self.response, self.status_code = response, status
        self.code, self.type = (_short(fields.get(name)) for name in ("code", "type"))


def decoded(response: httpx.Response) -> Any:
    """Return the JSON of an answer; its text if it is something else, and does not say that it is JSON.

    Raises:
        ServerError: the server sent an error.
        ValueError: what is called JSON is none, or holds what Python's decoder does not take.
    """
    content = successful(response).content
    try:
        return json.loads(content)
    except ValueError:
        if "json" in response.headers.get("Content-Type", ""):
            raise
        return response.text  # a gateway's page, for a path that it does not know


def successful(response: httpx.Response) -> httpx.Response:
    """Return an answer, of which the body was read unless the status is a success.

    Raises:
        ServerError: the server sent an error.
    """
    if response.is_success:
        return response
    text = response.text.strip()
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body, text = None, "" if text.startswith("<") else text  # a page of a proxy
    error = body.get("error", body) if isinstance(body, dict) else None
    raise ServerError(error, response, text)


class Events:
    """Decodes the events of a stream from its pieces, of any size; time and memory grow as the bytes do."""

    def __init__(self) -> None:
        self.ended = False
        """Whether the server has said that this was all."""
        self._line = bytearray()
        self._data: list[bytes] = []
        self._whole: bytearray | None = bytearray()  # what came before any event; None: there was one
        self._after_return = False

    def decoded(self, piece: bytes) -> Iterator[Any]:
        """Yield the decoded JSON of the events that end in a piece of the stream.

        Raises:
            ServerError: an event is an error.
            ValueError: one is no JSON.
        """
        for data in self._events(piece):
            if data.startswith(b"[DONE]"):
                self.ended = True
                return
            event = json.loads(data)
            if isinstance(event, dict) and (error := event.get("error")):
                raise ServerError(error, text=data.decode("utf-8", "replace"))
            yield event

    def whole(self) -> Any:
        """Return the decoded answer of a server that does not stream, at its end; a page as text; None for a stream.

        Raises:
            ValueError: it is no JSON.
        """
        body = bytes(self._whole + self._line).strip() if self._whole is not None else b""
        if body.startswith(b"{"):
            return json.loads(body)
        return body.decode("utf-8", "replace") if body.startswith(b"<") else None

    def _events(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end in the piece; other fields and comments say nothing here."""
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
            self._after_return = False
        if piece:
            self._after_return = piece.endswith(b"\r")
        *lines, rest = _END_OF_LINE.split(piece)
        for end in lines:
            self._line += end
            line = bytes(self._line).removeprefix(_BYTE_ORDER_MARK)
            self._line.clear()
            if line.startswith(b"data:"):
                self._whole = None
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
            elif self._whole is not None:
                self._whole += line
        self._line += rest


def _short(value: Any) -> str | int | None:
    return value if isinstance(value, str | int) else None

"""The web application and its server: Starlette on the loopback interface, for one person on one machine.

Every request for data has to carry the token, and requests that another site's page makes are refused.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from memagent_integrations.checks import check_int
from memagent_integrations.errors import MemAgentError, MissingExtra, UsageError
from memagent_integrations.files import reason
from memagent_integrations.journal import Journal, Run
from memagent_integrations.serve.readings import BackgroundReadings, Resume
from memagent_integrations.trace import build_page, data

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    raise MissingExtra.extra("starlette or uvicorn", "serve") from missing

_MOST_BYTES = 1 << 20  # of a request
_MOST_SECONDS = 60  # for a request: from its head to the answer
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server:
    """A server that shows a journal at `url`, which contains the access token, while `run` runs.

    Args:
        journal: whose runs are shown.
        resume: makes the reader that continues a run.
        port: on 127.0.0.1; 0 is any free one.

    Raises:
        UsageError: the port is taken or not allowed.
    """

    def __init__(self, journal: Journal, resume: Resume, *, port: int = 0) -> None:
        check_int(least=0, most=65535, port=port)
        try:
            self._socket = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise UsageError(f"cannot listen on port {port}: {reason(error)}") from error
        port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.token = secrets.token_urlsafe(24)
        app = application(journal, BackgroundReadings(journal, resume), token=self.token, port=port)
        config = uvicorn.Config(
            app,
            http=_Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """The address to open. The token stands behind a #, which no browser sends."""
        return f"{self.address}/#token={self.token}"

    def run(self) -> None:
        """Serve until `stop` or Ctrl-C."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Make `run`, in another thread, return."""
        self._server.should_exit = True


def application(journal: Journal, readings: BackgroundReadings, *, token: str, port: int) -> Starlette:
    """Return the application: `/` is the page, and below `/api/` is its data as JSON."""
    api = _Api(journal, readings)
    changes = {"pause": api.pause, "resume": api.resume, "branch": api.branch}
    return Starlette(
        routes=[
            Route("/", _show_page),
            Route("/api/runs", api.runs),
            Route("/api/run", api.run),
            *(Route(f"/api/{name}", change, methods=["POST"]) for name, change in changes.items()),
        ],
        middleware=[Middleware(_Guard, token=token, port=port)],
        exception_handlers={MemAgentError: _refuse, HTTPException: _refuse},
    )


class _Connection(H11Protocol):
    """A connection that is broken off when no request comes, or none is taken: uvicorn limits pauses between two only.

    Each request has `_MOST_SECONDS`, and the head of the next one as long again.
    """

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # another request has begun
            self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _start(self) -> None:
        self._stop()
        self._limit = self.loop.call_later(2 * _MOST_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._limit:
            self._limit.cancel()


class _Api:
    """The requests for data and for changes of the journal."""

    def __init__(self, journal: Journal, readings: BackgroundReadings) -> None:
        self._journal, self._readings = journal, readings

    def runs(self, request: Request) -> Response:
        """Return all runs."""
        return _json([self._run_data(run) for run in self._journal.runs()])

    def run(self, request: Request) -> Response:
        """Return a run and the steps of its reading after the first `have`; with all else once the run is finished."""
        name, have = request.query_params.get("name", ""), request.query_params.get("have", "0")
        if not have.isdecimal() or len(have) > 9:
            raise UsageError("have has to be a number of steps")
        run = self._journal.run(name)
        if int(have) and run.steps <= int(have):  # fewer: another run has the name now, which the page reads anew
            return _json({"run": self._run_data(run), "reading": None})
        start = 0 if run.finished else int(have)
        reading = self._journal.reading(name, start=start, stop=run.steps)  # the run may have grown meanwhile
        news = data(reading, start=int(have) - start)
        if not run.finished:
            news |= {"statements": [], "warnings": []}
        return _json({"run": self._run_data(run), "reading": news})

    async def pause(self, request: Request) -> Response:
        """Pause a run."""
        body = await _body(request, name=str)
        return await _apply(lambda: self._journal.pause(body["name"]))

    async def resume(self, request: Request) -> Response:
        """Continue a run in this process."""
        body = await _body(request, name=str)
        return await _apply(lambda: self._readings.start(body["name"]))

    async def branch(self, request: Request) -> Response:
        """Make a branch of a run, and return its name."""
        body = await _body(request, name=str, step=int, memory=(str, type(None)))
        return await _apply(lambda: self._journal.edit(body["name"], body["step"], memory=body["memory"]))

    def _run_data(self, run: Run) -> dict[str, Any]:
        reading_here = self._readings.reads(run.name)
        state = "starting" if reading_here and not (run.active or run.finished) else run.state
        failure = None if reading_here or run.finished or run.active else self._readings.failure(run.name)
        return asdict(run) | {"created": run.created.isoformat(), "state": state, "failure": failure}


class _Guard:
    """Refuses requests without the token, and those of another host or site; gives up those that take too long."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._bearer = app, f"Bearer {token}".encode()
        self._hosts = {f"{name}{'' if port == 80 else f':{port}'}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else (403, "HTTP only")
        app = _json({"error": refusal[1]}, refusal[0]) if refusal else self._app
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                await app(scope, receive, send)
        except TimeoutError:
            await _json({"error": f"the request took more than {_MOST_SECONDS} s"}, 408)(scope, receive, send)
        except asyncio.CancelledError:
            await _json({"error": "the server was stopped"}, 503)(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        """Return the status and the reason, or None for a request that is accepted."""
        host, origin, size = (request.headers.get(name, "") for name in ("host", "origin", "content-length"))
        if host not in self._hosts:  # another host name that was made to resolve to this machine
            return 403, "this server answers to 127.0.0.1 alone"
        if origin and origin != f"http://{host}":
            return 403, "requests of other sites are refused"
        if request.url.path.startswith("/api/") and not secrets.compare_digest(
            request.headers.get("authorization", "").encode(), self._bearer
        ):
            return 401, "the token is missing or wrong; open the address that memagent serve wrote"
        if "transfer-encoding" in request.headers or (
            request.method == "POST" and not (size.isdecimal() and len(size) < 10)
        ):
            return 411, "the request does not say how large it is"
        if request.method == "POST" and int(size) > _MOST_BYTES:
            return 413, "the request is too large"
        return None


async def _body(request: Request, **kinds: Any) -> dict[str, Any]:
    """Return the JSON object that was sent.

    Raises:
        UsageError: it is no JSON object, or a member is missing or not of its kind.
    """
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise UsageError("this is not JSON") from error
    if not isinstance(body, dict) or not all(isinstance(body.get(name), kind) for name, kind in kinds.items()):
        raise UsageError(f"an object with {', '.join(kinds)} was expected")
    return body


async def _apply(change: Callable[[], str | None]) -> Response:
    return _json({"name": await run_in_threadpool(change)})


async def _refuse(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 400
    return _json({"error": error.detail if isinstance(error, HTTPException) else str(error)}, status)


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(value)  # ASCII: a model's text may hold lone surrogates, which UTF-8 cannot encode
    return Response(text, status, headers=_HEADERS, media_type="application/json")


def _show_page(request: Request) -> Response:
    return HTMLResponse(_page(), headers=_HEADERS)


@cache
def _page() -> str:
    folder = resources.files(__package__)
    script, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("live.js", "live.css"))
    return build_page("memagent", script=script, style=style, served=True)

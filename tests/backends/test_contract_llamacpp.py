from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.contract import BackendContract, ask
from helpers.tiny_gguf import make_folder, make_gguf

from memagent_integrations import Backend, BackendError, UsageError, load_backend
from memagent_integrations.backends.llamacpp import LlamaCppBackend

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with load_backend("smollm2-raw") as loaded:
        yield loaded


@pytest.mark.real
class TestLlamaCpp(BackendContract):
    pass


@pytest.mark.real
def test_closing_waits_for_the_call_in_flight_and_holds_up_nobody() -> None:
    backend = load_backend("smollm2-raw", window=512)
    replies: list[Any] = []
    pieces = backend.stream(ask("Count from one to one hundred in words.", max_tokens=60))
    replies.append(next(pieces))
    backend.close()
    with pytest.raises(BackendError, match="smollm2-raw is closed"):
        backend.complete(ask("hello"))
    replies.extend(pieces)
    assert "".join(replies[:-1]) == replies[-1].text
    backend.close()


@pytest.mark.real
def test_the_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with load_backend("smollm2-raw", window=512) as backend:
        assert backend.complete(ask("Name three colours.")).text


@pytest.mark.real
def test_the_interpreter_ends_while_a_daemon_thread_waits_for_a_reply() -> None:
    script = """
import threading
from memagent_integrations import load_backend
from memagent_integrations.records import Message, Prompt
backend = load_backend("smollm2-raw", window=1024)
messages = (Message(role="user", content="Tell a long story. " * 100),)
prompt = Prompt(index=0, phase="answer", messages=messages, max_tokens=100)
request, sent = backend._request, threading.Event()
backend._request = lambda *given: (sent.set(), request(*given))[1]
threading.Thread(target=backend.complete, args=(prompt,), daemon=True).start()
sent.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_while_the_model_is_loaded_is_heard(tmp_path: Path) -> None:
    file = make_gguf(make_folder(tmp_path / "model", "llama"), tmp_path / "model.gguf")
    script = f"""
import signal, xllamacpp
from memagent_integrations import load_backend
make = xllamacpp.Server
def interrupted(params):
    signal.setitimer(signal.ITIMER_REAL, 0.001)  # the server is made, but its loop does not run yet
    return make(params)
xllamacpp.Server = interrupted
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    load_backend("llamacpp:{file}", window=256)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_chat_template_that_refuses_the_messages_is_a_usage_error(tmp_path: Path) -> None:
    refusal = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    file = make_gguf(make_folder(tmp_path / "model", "llama", template=refusal), tmp_path / "model.gguf")
    one = ask("Who?", max_tokens=2)
    with load_backend(f"llamacpp:{file}", window=256) as backend:
        assert backend.complete(one).usage.completion_tokens
        with pytest.raises(UsageError, match=r"use prompts of one text, or without that role[\s\S]*must alternate"):
            backend.complete(replace(one, messages=one.messages * 2))


def test_a_backend_with_a_name_of_its_own_is_known_by_its_file_too(tmp_path: Path) -> None:
    """A journal compares the identities: a run does not go on with another file of the same name."""
    file = make_gguf(make_folder(tmp_path / "model", "llama"), tmp_path / "m.Q8_0.gguf")
    with LlamaCppBackend(file, name="m", window=256) as named, load_backend(f"llamacpp:{file}", window=256) as by_file:
        assert named.identity == by_file.identity | {"file": "m.Q8_0.gguf"}
        assert (named.name, by_file.name) == ("m", f"llamacpp:{file}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window has to be a whole number of at least 16"),
        ({"window": 2**31}, "window has to be"),
        ({"window": 2**30, "parallel": 4}, "window has to be"),
        ({"window": True}, "window has to be"),
        ({"parallel": 100_000}, "parallel has to be a whole number of at least 1 and at most 256"),
        ({"threads": 10**12}, "threads has to be"),
        ({"gpu_layers": "x"}, "gpu_layers has to be"),
        ({"temperature": float("inf")}, "temperature has to be"),
        ({"top_p": float("nan")}, "top_p has to be"),
        ({"sampling": 5}, "sampling has to be a mapping"),
    ],
)
def test_settings_that_would_end_the_process(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LlamaCppBackend("never-read.gguf", **options)


@pytest.mark.parametrize("name", ["missing.gguf", "a\0b", "\ud800"])
def test_models_that_are_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="cannot read '"):
        LlamaCppBackend(name)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("GGML")
    with pytest.raises(UsageError, match="is not a GGUF file"):
        load_backend(f"llamacpp:{tmp_path}/x.gguf")

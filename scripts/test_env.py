"""The environment that the tests run in: made once, and made again when pyproject.toml changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
LOWEST = ROOT / "scripts" / "lowest.txt"
DIRECTORY = ROOT / ".venv-test"
# Installed first and alone: several packages ask for torch, and each of them would take the newest build for CUDA.
TORCH = "torch==2.13.0"
# A worker a core: then one thread each is enough, and threads that wait must not spin.
SINGLE_THREAD = MappingProxyType(
    {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
)


def python_of(directory: Path) -> Path:
    """Return the interpreter of an environment."""
    return directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_made(directory: Path, *made_for: Path) -> bool:
    """Return whether the environment is there and made for this pyproject.toml (and for these files)."""
    mark = directory / "made-for"
    return mark.is_file() and mark.read_text() == _mark(*made_for)


def stamp(directory: Path, *made_for: Path) -> None:
    """Note what the environment is made for; to be called when it is whole."""
    (directory / "made-for").write_text(_mark(*made_for))


def make(directory: Path) -> None:
    """Make the environment that has all that the tests need; one that is there is replaced."""
    install = create(directory)
    groups = _groups()
    run(*install, TORCH)
    run(*install, "--editable", f"{ROOT}[all]", *groups["test"], *groups["docs"])
    stamp(directory)


def make_lowest(directory: Path) -> None:
    """Make the environment of the oldest dependencies, without torch; one that is there is replaced."""
    install = create(directory)
    extras = f"{ROOT}[langchain,llama-index,serve,eval,ray]"
    run(*install, "--editable", extras, "tokenizers", *_groups()["test"], "--constraint", LOWEST)
    stamp(directory, LOWEST)


def create(directory: Path) -> tuple[object, ...]:
    """Create an empty environment, also where there is one; return the command that installs into it.

    What is imported is compiled then (`run`); to compile all modules of all packages takes pip longer than to install
    them.
    """
    venv.create(directory, with_pip=True, clear=True)
    return python_of(directory), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"


def run(*command: object, env: Mapping[str, str] = MappingProxyType({}), capture: bool = False) -> str:
    """Run a command at the project's root; a failure ends the script with the command's exit code.

    Python may keep what it compiles, whatever the environment says: else each process compiled all of torch again.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**kept, **env},
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def _groups() -> dict[str, list[str]]:
    """Return the dependency groups of the project."""
    groups: dict[str, list[str]] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["dependency-groups"]
    return groups


def _mark(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in (PROJECT, *files))).hexdigest()

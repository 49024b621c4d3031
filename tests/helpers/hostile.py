"""What somebody who wants to do harm may send, and a watch over what it makes this process do."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from memagent_integrations import Budgets, Journal, PromptSet
from memagent_integrations.journal import settings_of

CANARY = "canary"
"""What is in the name of every file that no test may make, and of every module that none may import."""
_DEEDS = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.getaddrinfo": 0,
    "urllib.Request": 0,
    "subprocess.Popen": 1,
    "os.system": 0,
    "os.exec": 0,
    "os.posix_spawn": 0,
}
"""Events of `sys.audit`, each with the argument that says what was meant."""
_watches: list[list[str]] = []


@cache
def _hooked() -> None:
    sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watches:
        return
    deed = None
    if event in _DEEDS:
        deed = f"{event} {arguments[_DEEDS[event]]!r}"
    elif event == "import" and CANARY in str(arguments[0]):
        deed = f"import {arguments[0]}"
    elif event == "open" and CANARY in Path(str(arguments[0])).name:
        deed = f"open {arguments[0]!r}"
    if deed:
        for watch in _watches:
            watch.append(deed)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield the list of what the process does meanwhile: connections, processes, whatever has to do with a canary."""
    _hooked()
    deeds: list[str] = []
    _watches.append(deeds)
    try:
        yield deeds
    finally:
        _watches.remove(deeds)


def settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a run, some of them others."""
    made = settings_of("Who?", "openai:m", {"tokenizer": "approximate"}, Budgets(), PromptSet.default())
    return json.loads(json.dumps(made)) | changes


def forged(file: Path, run: dict[str, Any], *, files: Sequence[str] = (), mark: str | None = None) -> Path:
    """Write a journal with a run "mine" of any settings, as somebody else may write it."""
    Journal(file).close()
    with closing(sqlite3.connect(file)) as database, database:
        row = ("mine", json.dumps(run), json.dumps(files), None, None, "2026-01-01T00:00:00+00:00", None, mark)
        database.execute(
            f"INSERT INTO run VALUES ({', '.join('?' * len(_columns(database)))})", row[: len(_columns(database))]
        )
    return file


def _columns(database: sqlite3.Connection) -> list[Any]:
    return database.execute("PRAGMA table_info(run)").fetchall()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
"""Anything that JSON holds."""


def corrupted(value: Any, names: Sequence[str] = ()) -> st.SearchStrategy[Any]:
    """Draw a JSON object with one place of it changed, removed, or one of these names added."""
    return st.builds(
        _changed, st.just(json.dumps(value)), st.randoms(use_true_random=False), VALUES, st.sampled_from([*names, "x"])
    )


def _changed(text: str, random: Any, value: Any, name: str) -> Any:
    whole = json.loads(text)
    place, where = whole, random.choice(list(whole))
    while isinstance(place[where], dict | list) and place[where] and random.random() < 0.7:
        place = place[where]
        where = random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
    deed = random.randrange(4)
    if deed == 0:
        del place[where]
    elif deed == 1 and isinstance(place, dict):
        place[name] = value
    else:
        place[where] = value
    return whole

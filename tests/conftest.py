from __future__ import annotations

import os
import re
import ssl
import sys
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.data import DATA
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from tenacity import wait_none

from memagent_integrations import calls

HEAVY = {
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "socket.bind": "starts a server",
    "torch": "imports torch",
    "xllamacpp": "imports llama.cpp",
}
"""What no test does that is not marked `heavy`: events of `sys.audit`, and modules."""
_BACKOFF = calls._BACKOFF
LONGEST = ("test_resume.py", "test_learns.py", "test_crash.py", "test_sft.py", "test_shipped.py")
"""Files of few tests that take more than a minute."""


# In the gate the same few examples each time: a failure is that of the change. `long` is scripts/fuzz: new ones with
# each run, and those that failed first. A loaded machine is slow, which is no failure of a test.
settings.register_profile(
    "default", max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long",
    settings.get_profile("default"),
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis" / "examples"),
    max_examples=int(os.environ.get("MEMAGENT_FUZZ_EXAMPLES", "1000")),
    print_blob=True,
)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-light", action="store_true", help="refuse what only tests marked heavy may do")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --only-light, do not even import what is heavy as a whole: that takes seconds."""
    light = config.getoption("--only-light") and collection_path.suffix == ".py"
    heavy = re.compile(r"^pytestmark = .*\bpytest\.mark\.heavy\b", re.MULTILINE)
    return True if light and heavy.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: else one worker would still be at them when the others have ended."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """With --only-light, make a test fail that does what only heavy ones may."""
    if not session.config.getoption("--only-light"):
        return (yield)
    refusing = True

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        action = HEAVY.get(str(arguments[0]) if event == "import" else event)
        if refusing and action and not (event == "import" and arguments[0] in sys.modules):
            raise RuntimeError(f"this test {action}: mark it with pytest.mark.heavy")

    sys.addaudithook(refuse)
    try:
        return (yield)
    finally:
        refusing = False


def pytest_configure(config: pytest.Config) -> None:
    """Point tiktoken to the vocabularies that llama-index-core ships, so that no test downloads one.

    The key by which this user's runs are known is one of the tests, in a folder of theirs. A failed call is tried again
    at once, and no client reads the certificates of this machine, which takes 40 ms: none of their servers has TLS.
    """
    calls._BACKOFF = wait_none()
    ssl.SSLContext.load_verify_locations = lambda *_, **__: None
    if "MEMAGENT_TESTS_STATE" not in os.environ:  # the workers of one session share it
        folder = tempfile.TemporaryDirectory(prefix="memagent-state-")
        config.add_cleanup(folder.cleanup)
        os.environ["MEMAGENT_TESTS_STATE"] = os.environ["XDG_STATE_HOME"] = folder.name
    spec = find_spec("llama_index") and find_spec("llama_index.core")
    if spec and spec.origin and "TIKTOKEN_CACHE_DIR" not in os.environ:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(spec.origin).parent / "_static" / "tiktoken_cache")


@pytest.fixture(scope="session")
def books() -> Path:
    """Return the folder of the novels in shared/data."""
    folder = DATA / "books"
    if not folder.is_dir():
        pytest.skip("the books of shared/data are not here")
    return folder


@pytest.fixture
def backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry calls after a pause, as elsewhere."""
    monkeypatch.setattr(calls, "_BACKOFF", _BACKOFF)

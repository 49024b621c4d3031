"""Imports point down, heavy packages have one home, and the package imports without any of them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memagent_integrations

NAME = "memagent_integrations"
ROOT = Path(memagent_integrations.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
HOMES = {  # heavy package -> the only files and folders that may import it
    "torch": {"backends/transformers.py", "backends/past.py", "backends/gguf_adapter.py", "training/"},
    "transformers": {"backends/transformers.py", "backends/past.py", "training/"},
    "accelerate": {"training/"},
    "safetensors": {"training/"},
    "peft": {"backends/transformers.py", "backends/gguf_adapter.py", "training/"},
    "gguf": {"backends/gguf_adapter.py", "backends/requantise.py"},
    "vllm": {"backends/vllm.py"},
    "xllamacpp": {"backends/llamacpp.py"},
    "httpx": {"backends/connections.py", "backends/http_replies.py", "backends/openai.py"},
    "tiktoken": {"tokens.py"},
    "tokenizers": {"tokens.py"},
    "langchain": {"langchain/"},
    "langchain_classic": {"evaluation/baselines/langchain.py"},
    "langchain_core": {"langchain/", "evaluation/baselines/langchain.py"},
    "langchain_text_splitters": {"evaluation/baselines/langchain_splitter.py"},
    "langgraph": {"langchain/", "evaluation/baselines/langgraph.py"},
    "llama_index": {"llama_index/", "evaluation/baselines/llama_index.py"},
    "pyarrow": {"ray.py"},
    "ray": {"ray.py"},
    "bm25s": {"evaluation/baselines/bm25.py"},
    "sentence_transformers": {"evaluation/baselines/embedding.py"},
    "datasets": {"evaluation/data.py"},
    "lm_eval": {"evaluation/lm_eval.py"},
    "wonderwords": {"evaluation/tasks/words.py"},
    "matplotlib": {"evaluation/plots.py", "training/plots.py"},
    "scipy": {"evaluation/statistics.py"},
    "tabulate": {"evaluation/report.py"},
    "typer": {"cli/"},
    "rich": {"cli/"},
    "jinja2": {"trace/"},
    "starlette": {"serve/"},
    "uvicorn": {"serve/"},
    "platformdirs": {"backends/embedded.py", "ownership.py"},
    "filelock": {"files.py"},
    "opentelemetry": {"telemetry.py"},
    "tenacity": {"calls.py"},
}
HEAVY = [name for name in HOMES if name not in ("platformdirs", "filelock", "jinja2", "tenacity")]


def module_of(path: Path) -> str:
    """Return the dotted name of a module below the package; "" is the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


def ordered_modules() -> list[str]:
    """Return the modules that docs/architecture.md lists; a folder's `__init__` stands after its last module."""
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Modules\n")[2]
    [block] = re.findall(r"^```text\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[:1]
    names: list[str] = []
    for line in block.splitlines():
        folder, _, listed = line.rpartition("/:")
        names += [f"{folder}/{name}".strip("/").replace("/", ".") for name in listed.split()]
    folders = {name.rpartition(".")[0] for name in names} - {""}
    for folder in sorted(folders, key=lambda name: -name.count(".")):
        last = max(place for place, name in enumerate(names) if name.startswith(f"{folder}."))
        names.insert(last + 1, folder)
    return names


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports, wherever it does, except for the type checker alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a module imports; "" where it takes a name from the package itself."""
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == NAME and rest != "__version__":
            yield rest if rest in MODULES else rest.rpartition(".")[0]


def test_the_page_lists_every_module_once() -> None:
    assert sorted(ordered_modules()) == sorted(MODULES.keys() - {"", "__main__"})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    order, module = ordered_modules(), module_of(path)
    if module == "__main__":
        return
    allowed = set(order[: order.index(module)]) if module else set()
    above = [name for name in own_imports(path) if name not in allowed]
    assert not above, f"docs/architecture.md lists {above} after {module or NAME}, which imports them"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_have_one_home(path: Path) -> None:
    place = path.relative_to(ROOT).as_posix()
    for name in imports(path):
        homes = HOMES.get(name.split(".")[0])
        if homes is not None:
            assert any(place == home or (home.endswith("/") and place.startswith(home)) for home in homes), name


def test_every_home_imports_its_package() -> None:
    """An entry of HOMES without an import would allow one that nobody has looked at."""
    used = {(name.split(".")[0], path.relative_to(ROOT).as_posix()) for path in SOURCES for name in imports(path)}
    idle = [
        (package, home)
        for package, homes in HOMES.items()
        for home in homes
        if not any(name == package and place.startswith(home) for name, place in used)
    ]
    assert not idle


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_own_imports_stand_at_the_top(path: Path) -> None:
    """An import of one's own package inside a function hides a cycle."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == NAME for name in names), f"{path}: {function.name}"


def test_the_loop_does_not_know_backends() -> None:
    for file in ("loop.py", "drivers.py"):
        assert not [name for name in imports(ROOT / file) if "backends" in name]


@pytest.mark.heavy
def test_importing_needs_none_of_the_heavy_packages() -> None:
    script = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None
import memagent_integrations
from memagent_integrations import Reader, ScriptedBackend, MissingExtra
reading = Reader(ScriptedBackend(["memory", "answer"])).read("q", "text")
assert reading.answer == "answer"
for name, command in [("MemAgentReader", "[langchain]"), ("MemAgentQueryEngine", "[llama-index]")]:
    try:
        getattr(memagent_integrations, name)
    except MissingExtra as error:
        assert command in error.command, error
    else:
        raise SystemExit(name + " came without its package")
try:
    import memagent_integrations.ray
except MissingExtra as error:
    assert "[ray]" in error.command, error
else:
    raise SystemExit("Ray's module came without its package")
for spec in ["transformers:x", "vllm:x", "llamacpp:" + sys.argv[1]]:
    try:
        Reader(spec)
    except MissingExtra as error:
        assert "[" + spec.split(":")[0] + "]" in error.command, error
    else:
        raise SystemExit(spec + " came without its package")
"""
    gguf = ROOT.parent / "never-read.gguf"
    done = subprocess.run([sys.executable, "-c", script, str(gguf)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_door_is_pinned() -> None:
    assert memagent_integrations.__all__ == [
        "Backend",
        "BackendError",
        "Budgets",
        "Citation",
        "ContextOverflow",
        "Journal",
        "JournalError",
        "JournalMismatch",
        "Limits",
        "MemAgentError",
        "MemAgentQueryEngine",
        "MemAgentReader",
        "MemAgentSynthesizer",
        "MissingExtra",
        "PromptSet",
        "Reader",
        "Reading",
        "RunPaused",
        "ScriptedBackend",
        "Step",
        "UsageError",
        "load_backend",
        "save_trace",
    ]
    for name in memagent_integrations.__all__:
        assert getattr(memagent_integrations, name).__name__ == name
    assert set(memagent_integrations.__all__) < set(dir(memagent_integrations))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        memagent_integrations.nothing  # noqa: B018


@pytest.mark.heavy
def test_every_module_imports() -> None:
    for module in MODULES:
        if module not in ("backends.vllm", "ray", "__main__"):  # whose own tests skip where the package is missing
            importlib.import_module(f"{NAME}.{module}".rstrip("."))

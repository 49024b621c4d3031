"""Imports point down, heavy packages have one home, and the door opens without any of them."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memagent_integrations

ROOT = Path(memagent_integrations.__file__).parent
LAYERS = {  # a module may import from lower layers, and from its own where WITHIN says so
    "errors": 0,
    "settings": 0,
    "records": 0,
    "trace": 0,
    "tokens": 1,
    "documents": 1,
    "chunking": 1,
    "prompts": 1,
    "policies": 1,
    "models": 1,
    "backends": 1,
    "loop": 2,
    "store": 2,
    "recording": 2,
    "journal": 2,
    "telemetry": 2,
    "calls": 2,
    "place": 2,
    "conversation": 2,
    "jobs": 3,
    "fitting": 3,
    "reader": 3,
    "langchain": 4,
    "llama_index": 4,
    "evaluation": 4,
    "serve": 5,
    "training": 5,
    "options": 6,
    "progress": 6,
    "streams": 6,
    "watch": 6,
    "runs": 6,
    "evals": 6,
    "trains": 6,
    "cli": 6,
    "__main__": 7,
}
WITHIN = {
    ("cli", "options"),
    ("evals", "options"),
    ("trains", "options"),
    ("cli", "progress"),
    ("evals", "progress"),
    ("trains", "progress"),
    ("progress", "streams"),
    ("cli", "runs"),
    ("cli", "evals"),
    ("cli", "trains"),
    ("evals", "streams"),
    ("cli", "streams"),
    ("cli", "watch"),
    ("watch", "progress"),
    ("watch", "streams"),
    ("runs", "streams"),
    ("settings", "errors"),
    ("records", "errors"),
    ("records", "trace"),
    ("trace", "errors"),
    ("records", "settings"),
    ("journal", "loop"),
    ("journal", "store"),
    ("journal", "recording"),
    ("recording", "store"),
    ("recording", "loop"),
    ("telemetry", "loop"),
    ("calls", "loop"),
    ("calls", "telemetry"),
    ("reader", "jobs"),
    ("reader", "fitting"),
    ("chunking", "documents"),
    ("chunking", "tokens"),
    ("prompts", "tokens"),
    ("policies", "prompts"),
    ("backends", "backends"),
    ("backends", "tokens"),
    ("backends", "prompts"),
    ("backends", "models"),
    ("backends", "policies"),
}
HOMES = {  # heavy package -> the only files that may import it
    "torch": {"backends/transformers.py", "training/"},
    "transformers": {"backends/transformers.py", "training/"},
    "accelerate": {"training/"},
    "safetensors": {"training/"},
    "peft": {"backends/transformers.py", "training/"},
    "gguf": {"training/gguf_adapter.py"},
    "vllm": {"backends/vllm.py"},
    "xllamacpp": {"backends/llamacpp.py"},
    "openai": {"backends/openai.py"},
    "tiktoken": {"tokens.py"},
    "tokenizers": {"tokens.py"},
    "langchain": {"langchain/"},
    "langchain_classic": {"evaluation/baselines/langchain.py"},
    "langchain_core": {"langchain/", "evaluation/baselines/langchain.py"},
    "langgraph": {"langchain/"},
    "llama_index": {"llama_index/", "evaluation/baselines/llama_index.py"},
    "bm25s": {"evaluation/baselines/bm25.py"},
    "datasets": {"evaluation/data.py"},
    "lm_eval": {"evaluation/lm_eval.py"},
    "wonderwords": {"evaluation/tasks/words.py"},
    "matplotlib": {"evaluation/plots.py", "training/plots.py"},
    "scipy": {"evaluation/statistics.py"},
    "tabulate": {"evaluation/report.py"},
    "typer": {"cli.py", "evals.py", "options.py", "runs.py", "trains.py"},
    "rich": {"cli.py", "progress.py", "runs.py", "watch.py"},
    "jinja2": {"trace/"},
    "starlette": {"serve/"},
    "uvicorn": {"serve/"},
    "platformdirs": {"models.py"},
    "filelock": {"models.py", "store.py", "evaluation/results.py", "training/data.py", "training/trainer.py"},
    "opentelemetry": {"telemetry.py"},
    "tenacity": {"calls.py"},
}
HEAVY = [name for name in HOMES if name not in ("platformdirs", "filelock", "jinja2", "tenacity")]


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or "", node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    mine = name_of(path)
    if mine == "__init__":
        return
    assert mine in LAYERS, f"give {mine} a layer"
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] != "memagent_integrations" or len(parts) < 2 or parts[1] not in LAYERS:
            continue
        theirs = parts[1]
        assert LAYERS[theirs] < LAYERS[mine] or theirs == mine or (mine, theirs) in WITHIN, f"{mine} imports {theirs}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_have_one_home(path: Path) -> None:
    for name, _ in imports(path):
        home = HOMES.get(name.split(".")[0])
        assert home is None or path.relative_to(ROOT).as_posix().startswith(tuple(home)), f"{path} imports {name}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_own_imports_stand_at_the_top(path: Path) -> None:
    """An import of one's own package inside a function hides a cycle."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    assert not (node.module or "").startswith("memagent_integrations"), f"{path}: {function.name}"


def test_the_loop_does_not_know_backends() -> None:
    assert not [name for name, _ in imports(ROOT / "loop.py") if "backends" in name]


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


def test_every_module_imports() -> None:
    for path in files():
        if path.name not in ("vllm.py", "__main__.py"):
            importlib.import_module(
                ".".join(("memagent_integrations", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
                    ".__init__"
                )
            )


def test_the_layout_is_told_in_one_line_a_file() -> None:
    told = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in files():
        first, _, _ = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")
        assert f"  {path.relative_to(ROOT).as_posix():<28} {first}\n" in told

"""Every fence of Python in README and docs runs and prints what it says, and so does every example."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from opentelemetry import trace
from opentelemetry.util._once import Once
from pytest_examples import CodeExample, EvalExample, find_examples

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("example", list(find_examples(str(ROOT / "README.md"), str(ROOT / "docs"))), ids=str)
def test_a_fence(example: CodeExample, eval_example: EvalExample, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.prefix_settings().get("test") == "skip":  # it needs a server or a download; its syntax counts
        compile(example.source, str(example.path), "exec")
        return
    # a page may set up tracing for the whole process: that ends with its fence
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    eval_example.set_config(line_length=150)
    run = (
        eval_example.run_print_update if eval_example.update_examples else eval_example.run_print_check
    )  # pytest --update-examples
    failure = None
    try:
        run(example)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if failure:  # raised out here, because pytest cannot show the traceback that leads into a page
        pytest.fail(failure, pytrace=False)


def test_the_settings_of_a_fence_are_in_braces() -> None:
    """Others are none to the built pages, which take the fence for text, and the text after it for code."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    heads = [head for text in texts for head in re.findall(r"^```(\w.*)$", text, re.MULTILINE)]
    assert len(heads) > 50
    assert [head for head in heads if not re.fullmatch(r"\w+( \{.+\})?", head)] == []


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of LlamaIndex's own agents
@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince211")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook(path: Path, tmp_path: Path) -> None:
    options: Any = {"timeout": 120, "coalesce_streams": True, "resources": {"metadata": {"path": str(tmp_path)}}}
    kept, ran = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(ran, **options).execute()
    assert outputs(kept) == outputs(ran), "run the notebook anew and keep it with its output"
    assert "text/html" in str(outputs(ran))
    assert (tmp_path / "trace.html").exists()


def outputs(notebook: Any) -> list[list[tuple[str, ...]]]:
    """The kinds of output of each cell; the text itself is that of one version of Python's manual."""
    return [
        [(output.output_type, *sorted(output.get("data", ()))) for output in cell.get("outputs", ())]
        for cell in notebook.cells
    ]

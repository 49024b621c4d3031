"""The versions that scripts/lowest.txt installs are the lower bounds of pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("langchain", "llama-index", "serve", "eval", "ray")


def test_the_lowest_versions_are_the_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "scripts" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    optional = [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    requirements = [Requirement(each) for each in (*project["dependencies"], *optional)]
    for requirement in requirements:
        [bound] = [each.version for each in requirement.specifier if each.operator == ">="]
        version = lowest[requirement.name]
        assert f"{version}.".startswith(f"{bound}."), f"{requirement} is tested with {version}"
    # what a dependency holds wrongly at its newest version
    assert lowest.keys() - {requirement.name for requirement in requirements} == {"click"}

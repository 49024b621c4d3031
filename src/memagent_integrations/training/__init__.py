"""Teach a model what to remember: multi-conversation DAPO on one machine, exact and restartable."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memagent_integrations.errors import MissingExtra

if TYPE_CHECKING:
    from memagent_integrations.training.losses import Clip
    from memagent_integrations.training.mixture import Drawn, Mixture
    from memagent_integrations.training.recipe import Recipe
    from memagent_integrations.training.sampler import Sampler
    from memagent_integrations.training.served import ServedSampler
    from memagent_integrations.training.settings import Lora, Settings
    from memagent_integrations.training.trainer import Trainer
    from memagent_integrations.training.warmstart import warm_start

__all__ = [
    "Clip",
    "Drawn",
    "Lora",
    "Mixture",
    "Recipe",
    "Sampler",
    "ServedSampler",
    "Settings",
    "Trainer",
    "warm_start",
]

_HOMES = {
    "Clip": "losses",
    "Drawn": "mixture",
    "Lora": "settings",
    "Mixture": "mixture",
    "Recipe": "recipe",
    "Sampler": "sampler",
    "ServedSampler": "served",
    "Settings": "settings",
    "Trainer": "trainer",
    "warm_start": "warmstart",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(part(_HOMES[name]), name)


def part(module: str) -> Any:
    """A module of this package, most of which need torch: whoever does not train does without.

    Raises:
        MissingExtra: a package of the extra "train" is not installed.
    """
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except ImportError as error:
        if isinstance(error, MissingExtra) or (error.name or "").startswith("memagent_integrations"):
            raise
        raise MissingExtra.extra(error.name or str(error), "train") from error

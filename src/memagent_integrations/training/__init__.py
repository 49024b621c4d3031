"""Teach a model what to remember: multi-conversation DAPO on one machine, exact and restartable."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memagent_integrations.errors import MissingExtra

if TYPE_CHECKING:
    from memagent_integrations.training import export as export
    from memagent_integrations.training import metrics as metrics
    from memagent_integrations.training import plots as plots
    from memagent_integrations.training import recipe as recipe
    from memagent_integrations.training.given import Given
    from memagent_integrations.training.losses import Clip
    from memagent_integrations.training.mixture import Drawn, Mixture
    from memagent_integrations.training.recipe import Recipe
    from memagent_integrations.training.sampler import Sampler
    from memagent_integrations.training.served import ServedSampler
    from memagent_integrations.training.settings import Lora, Settings
    from memagent_integrations.training.sft import SftSettings, SftTrainer
    from memagent_integrations.training.trainer import Trainer

__all__ = [
    "Clip",
    "Drawn",
    "Given",
    "Lora",
    "Mixture",
    "Recipe",
    "Sampler",
    "ServedSampler",
    "Settings",
    "SftSettings",
    "SftTrainer",
    "Trainer",
]

_HOMES = {
    "Clip": "losses",
    "Drawn": "mixture",
    "Given": "given",
    "Lora": "settings",
    "Mixture": "mixture",
    "Recipe": "recipe",
    "Sampler": "sampler",
    "ServedSampler": "served",
    "Settings": "settings",
    "SftSettings": "sft",
    "SftTrainer": "sft",
    "Trainer": "trainer",
}
_MODULES = ("export", "metrics", "plots", "recipe")


if not TYPE_CHECKING:  # with a `__getattr__` mypy would accept any name

    def __getattr__(name: str) -> Any:
        """Import what is asked for when it is first used: most of this package needs torch.

        Raises:
            MissingExtra: a package of the extra "train" is not installed.
        """
        module = name if name in _MODULES else _HOMES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            imported = importlib.import_module(f"{__name__}.{module}")
        except ImportError as error:
            if isinstance(error, MissingExtra) or (error.name or "").startswith("memagent_integrations"):
                raise
            raise MissingExtra.extra(error.name or str(error), "train") from error
        return imported if name in _MODULES else getattr(imported, name)

"""What a recipe does not choose by itself: code that is run, addresses and services, and what is fetched.

A recipe is a file that somebody may have sent; its paths are only read, as data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent_integrations import weights
from memagent_integrations.errors import UsageError

_TRANSFORMERS = "transformers:"
_LOCAL_TRACKERS = {"tensorboard"}
"""Trackers that write files and send nothing."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller gives again of a recipe's settings.

    Args:
        model: as of `Recipe`.
        adapter: as of `Recipe`.
        reward: as of `Recipe`.
        trackers: as of `Recipe`.
        base_url: the address of the server.
        server_folder: the folder of the server.
    """

    model: str | None = None
    adapter: str | None = None
    reward: str | None = None
    trackers: tuple[str, ...] = ()
    base_url: str | None = None
    server_folder: str | None = None

    def confirm(self, recipe: Any, *, sft: bool = False) -> dict[str, Any]:
        """Return the settings of a `Recipe` that are to be others: those that were given.

        `sft`: for a training on demonstrations, which uses neither adapter, reward nor server.

        Raises:
            UsageError: the recipe names what has to be given again, and was not.
        """
        changes: dict[str, Any] = {}
        if self.model is not None:
            changes["model"] = self.model
        else:
            _check_model(recipe.model)
        if self.trackers:
            changes["trackers"] = self.trackers
        elif others := sorted(set(recipe.trackers) - _LOCAL_TRACKERS):
            raise _asked("sends the figures to", f"--tracker {others[0]}", f"trackers={recipe.trackers!r}")
        if sft:
            return changes
        if self.adapter is not None:
            changes["adapter"] = self.adapter
        elif recipe.adapter is not None:
            weights.check_adapter(Path(recipe.adapter))
        if self.reward is not None:
            changes["reward"] = self.reward
        elif recipe.reward is not None:
            raise _asked("runs the code of", f"--reward {recipe.reward}", f"reward={recipe.reward!r}")
        if recipe.server:
            self._check_server(recipe.server)
        return changes

    def _check_server(self, server: Any) -> None:
        if server.base_url != self.base_url:
            shown = f"base_url={server.base_url!r}"
            raise _asked("sends texts and the key in OPENAI_API_KEY to", f"--base-url {server.base_url}", shown)
        if server.folder != self.server_folder:
            shown = f"server_folder={server.folder!r}"
            raise _asked("writes adapters into", f"--server-folder {server.folder}", shown)


NOTHING = Given()


def _check_model(model: str) -> None:
    """Check a model that a recipe names: to load it runs no code, and fetches nothing but an embedded model."""
    if not model.startswith(_TRANSFORMERS):
        return
    name = model.removeprefix(_TRANSFORMERS)
    folder = Path(name)
    if folder.is_dir():
        weights.check_model(folder.resolve())
    elif not (folder.is_file() or folder.is_absolute() or (weights.is_hub_name(name) and weights.is_cached(name))):
        raise _asked("has fetched", f"--model {model}", f"model={model!r}")


def _asked(deed: str, option: str, argument: str) -> UsageError:
    """Return the error that asks for something again."""
    what = option.partition(" ")[2]
    return UsageError(
        f"the recipe {deed} {what!r}. If you want that, say it yourself: {option}, in Python Recipe.load(path, "
        f"Given({argument}))"
    )

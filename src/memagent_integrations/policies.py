"""A policy: the settings that a trained reader needs, together in one directory. One ships with this package.

`memagent.json` holds the model's name, the LoRA adapter, the prompts and the budgets. Its paths are relative to the
directory, so that the directory can be moved and copied as a whole.

A directory that somebody sent can do no harm: nothing in it runs code or leads out of it, and it has nothing fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from memagent_integrations import files, weights
from memagent_integrations.checks import drop_none
from memagent_integrations.errors import UsageError
from memagent_integrations.ownership import is_marked, mark
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets

FILE = "memagent.json"
SHIPPED: Mapping[str, Path] = MappingProxyType({"smollm2": Path(__file__).parent / "shipped" / "smollm2"})
"""The directories of the policies in this package, by the names of models that mean them."""
_PREFIX, _IN_TRANSFORMERS = "policy:", "transformers:"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model (as `load_backend` names it), an optional adapter, the prompts it was trained with, and its budgets.

    A model whose path begins with "./" lies in the policy's directory: "transformers:./model". `adapter` is a folder
    with a LoRA adapter in PEFT's format, beside which a GGUF file with the same name lies for llama.cpp; or a GGUF
    file alone, which transformers reads too.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str
    adapter: str | None = None
    prompts: PromptSet
    budgets: Budgets = field(default_factory=Budgets)

    def adapter_for(self, kind: str) -> str | None:
        """Return the path of the adapter in the format that a kind of backend reads; None if there is no adapter.

        Raises:
            UsageError: there is none in that format, or loading the adapter could run code.
        """
        if not self.adapter:
            return None
        file = Path(self.adapter)
        if kind == "llamacpp" and file.suffix != ".gguf":
            file = Path(f"{self.adapter}.gguf")
        if file.suffix == ".gguf":
            if kind == "vllm":
                raise UsageError(f"vLLM reads adapters in PEFT's form, and this policy has {file.name} alone")
            if not file.is_file():
                advice = (
                    "name another backend that has the same weights: model='transformers:NAME' or model='vllm:NAME'"
                )
                raise UsageError(f"llama.cpp cannot load the adapter of this policy: there is no {file}; {advice}")
            weights.check_file(file)
        elif kind in _LOADED:
            weights.check_adapter(file)
        return str(file)


_ADAPTER = TypeAdapter(Policy)
_LOADED = ("transformers", "vllm")


def names_policy(model: object) -> bool:
    """Return whether a model is given as a policy: "policy:DIR", a name of `SHIPPED`, "transformers:" before that."""
    return isinstance(model, str) and (model.removeprefix(_IN_TRANSFORMERS) in SHIPPED or model.startswith(_PREFIX))


def load_named(model: str, *, base: object = None) -> Policy:
    """Return the policy that a model's name means; `base` is a model that the caller names in place of the policy's.

    Raises:
        UsageError: as of `load`.
    """
    name = model.removeprefix(_IN_TRANSFORMERS)
    policy = load(SHIPPED.get(name) or name.removeprefix(_PREFIX), model=base)
    return policy if name == model else replace(policy, model=f"{_IN_TRANSFORMERS}{policy.model}")


def load(directory: str | Path, *, model: object = None) -> Policy:
    """Return the policy in a directory, with absolute paths.

    `model` is a model that the caller names in place of the policy's; else the policy's has to lie in its directory, or
    on this machine under a name of the Hugging Face hub. A policy that this user has saved may name any.

    Raises:
        UsageError: the directory holds no valid `memagent.json`, what it names lies elsewhere, or loading the model in
            it could run code.
    """
    folder = Path(directory)
    path = folder / FILE
    with files.accessing("read", path, hint="a directory without this file is no policy"):
        content = path.read_bytes()
    try:
        value = json.loads(content)
        given = value.pop("mark", None) if isinstance(value, dict) else None
        policy = _ADAPTER.validate_json(json.dumps(value))
    except ValidationError as error:
        raise UsageError(f"{path} is not valid: {files.first_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid: {error}") from error
    own = is_marked(given, _json(policy))
    kind, _, name = policy.model.partition(":")
    if kind == "policy":
        raise UsageError(f"{path} is not valid: model: a policy names a model, not another policy")
    if name.startswith("./"):
        target = weights.inside(folder, name)
        if model is None and target.suffix == ".gguf":
            weights.check_file(target)
        elif model is None and kind in _LOADED:
            weights.check_model(target)
        policy = replace(policy, model=f"{kind}:{target}")
    elif kind in (*_LOADED, "llamacpp") and not own and model is None:
        _check_named(policy.model, kind, name)
    return replace(policy, adapter=str(weights.inside(folder, policy.adapter))) if policy.adapter else policy


def _check_named(model: str, kind: str, name: str) -> None:
    """Check that a model that a policy from elsewhere names is one of the hub that is on this machine already."""
    if kind in _LOADED and weights.is_hub_name(name):
        problem = "" if weights.is_cached(name) else "it is not on this machine, and a policy has nothing fetched"
    else:
        problem = "it lies outside of the policy's directory"
    if problem:
        raise UsageError(
            f"this policy was not saved by you on this machine, and reads with {model!r}: {problem}. If you want "
            f"it, name it: --base-model, model={model!r} of load_backend, or backend_options={{'model': {model!r}}}"
        )


def _json(policy: Policy) -> str:
    return _ADAPTER.dump_json(policy, indent=1).decode()


def save(policy: Policy, directory: str | Path) -> None:
    """Write a policy's `memagent.json`; the directory is created if necessary.

    It gets a mark, by which this user's policies are known on this machine.

    Raises:
        UsageError: it cannot be written.
    """
    path = Path(directory) / FILE
    with files.accessing("write", path):
        path.parent.mkdir(files.OWNERS_FOLDER, parents=True, exist_ok=True)
    text = _json(policy)
    value: dict[str, Any] = json.loads(text)
    files.write(path, json.dumps(value | drop_none(mark=mark(text)), indent=1, ensure_ascii=False))

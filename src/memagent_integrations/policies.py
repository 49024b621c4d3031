"""A policy: the settings that a trained reader needs, together in one directory.

`memagent.json` holds the model's name, the LoRA adapter, the prompts and the budgets. Its paths are relative to the
directory, so that the directory can be moved and copied as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from memagent_integrations import files
from memagent_integrations.errors import UsageError
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets

FILE = "memagent.json"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model (as `load_backend` names it), an optional adapter, the prompts it was trained with, and its budgets.

    A model whose path begins with "./" lies in the policy's directory: "transformers:./model". `adapter` is a folder
    with a LoRA adapter in PEFT's format; for llama.cpp, a GGUF file with the same name lies beside it.
    """

    model: str
    adapter: str | None = None
    prompts: PromptSet
    budgets: Budgets = field(default_factory=Budgets)

    def adapter_for(self, kind: str) -> str | None:
        """Return the path of the adapter in the format that a kind of backend reads; None if there is no adapter.

        Raises:
            UsageError: there is no GGUF file for llama.cpp.
        """
        if not self.adapter or kind != "llamacpp" or self.adapter.endswith(".gguf"):
            return self.adapter
        file = Path(f"{self.adapter}.gguf")
        if not file.is_file():
            advice = "name another backend that has the same weights: model='transformers:NAME' or model='vllm:NAME'"
            raise UsageError(f"llama.cpp cannot load the adapter of this policy: there is no {file}; {advice}")
        return str(file)


_ADAPTER = TypeAdapter(Policy)


def load(directory: str | Path) -> Policy:
    """Return the policy in a directory, with absolute paths.

    Raises:
        UsageError: the directory holds no valid `memagent.json`.
    """
    path = Path(directory) / FILE
    with files.accessing("read", path, hint="a directory without this file is no policy"):
        content = path.read_bytes()
    try:
        policy = _ADAPTER.validate_json(content)
    except ValidationError as error:
        raise UsageError(f"{path} is not valid: {files.first_error(error)}") from error
    kind, _, name = policy.model.partition(":")
    if kind == "policy":
        raise UsageError(f"{path} is not valid: model: a policy names a model, not another policy")
    if name.startswith("./"):
        policy = replace(policy, model=f"{kind}:{(path.parent / name).resolve()}")
    return replace(policy, adapter=str((path.parent / policy.adapter).resolve())) if policy.adapter else policy


def save(policy: Policy, directory: str | Path) -> None:
    """Write a policy's `memagent.json`; the directory is created if necessary.

    Raises:
        UsageError: it cannot be written.
    """
    path = Path(directory) / FILE
    with files.accessing("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, _ADAPTER.dump_json(policy, indent=1))

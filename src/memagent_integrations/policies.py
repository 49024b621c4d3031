"""A policy: what has to agree for a trained reader to work, in one directory.

`memagent.json` holds the model's name, the LoRA adapter, the prompts and the budgets. Paths in it are inside the directory, so that it can be
moved and copied as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from memagent_integrations.errors import UsageError
from memagent_integrations.files import reason
from memagent_integrations.prompts import PromptSet
from memagent_integrations.records import Budgets

FILE = "memagent.json"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model (as `load_backend` names it), an optional adapter, the prompts it was trained with, and its budgets.

    A model whose name begins with "./" lies in the policy's directory: "transformers:./model". `adapter` is a LoRA adapter in PEFT's form, a
    folder; where there is a GGUF file of the same name beside it, llama.cpp reads that.
    """

    model: str
    adapter: str | None = None
    prompts: PromptSet
    budgets: Budgets = field(default_factory=Budgets)

    def adapter_for(self, kind: str) -> str | None:
        """The adapter in the form that a kind of backend reads.

        Raises:
            UsageError: there is no form of it for llama.cpp.
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
    """The policy in a directory; its paths are made absolute.

    Raises:
        UsageError: the directory holds no valid `memagent.json`.
    """
    path = Path(directory) / FILE
    try:
        policy = _ADAPTER.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path} is not valid: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        raise UsageError(f"{str(directory)!r} is no policy: cannot read {FILE} ({reason(error)})") from error
    kind, _, name = policy.model.partition(":")
    if kind == "policy":
        raise UsageError(f"{path} is not valid: model: a policy names a model, not another policy")
    if name.startswith("./"):
        policy = replace(policy, model=f"{kind}:{(path.parent / name).resolve()}")
    return replace(policy, adapter=str((path.parent / policy.adapter).resolve())) if policy.adapter else policy


def save(policy: Policy, directory: str | Path) -> None:
    """Write a policy's `memagent.json`; the directory is made if need be.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / FILE).write_bytes(_ADAPTER.dump_json(policy, indent=1))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {FILE} to {str(directory)!r}: {reason(error)}") from error

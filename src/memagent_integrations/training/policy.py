"""The weights that are trained: an adapter, or all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from memagent_integrations.backends.transformers import ignore_peft_warning
from memagent_integrations.errors import UsageError
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Settings


def take(policy: Sampler, folder: Path) -> None:
    """Keep a policy for the training in a folder: with what it has learned there, none is begun in another.

    Raises:
        UsageError: it belongs to another folder's.
    """
    here = folder.resolve()
    if policy.trained_in not in (None, here):
        raise UsageError(
            f"this policy is being trained in {str(policy.trained_in)!r} already; load it anew for another training"
        )
    policy.trained_in, policy.loaded = here, policy.loaded or _digest(policy.model)


def start(policy: Sampler, settings: Settings) -> None:
    """Make the policy's model ready to learn. An adapter that it has already goes on being trained; else `settings.lora` says which to add, if any.

    Raises:
        UsageError: the adapter does not fit the model or the settings, or the weights are too coarse to learn.
    """
    torch.manual_seed(settings.seed)
    model, lora = policy.model, settings.lora
    if isinstance(model, PeftModel):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        if not named(model):
            raise UsageError("the policy's adapter is no LoRA adapter: another kind cannot be trained")
        if lora and (lora.rank, lora.alpha) != (own := _shape(model)):
            raise UsageError(
                f"the policy has an adapter of rank {own[0]} and alpha {own[1]}, the settings say {lora.rank} and {lora.alpha}"
            )
    elif lora is None:
        if model.dtype not in (torch.float32, torch.float64):  # an update is smaller than the step between two numbers
            raise UsageError(
                f"all weights learn, and {model.dtype} is too coarse for that: load the model with dtype='float32', or train an adapter"
            )
        model.requires_grad_(True)
    else:
        targets = lora.targets
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
        )
        try:
            with ignore_peft_warning():
                policy.model = get_peft_model(model, config)  # the adapter of a model in bfloat16 is in float32
        except ValueError as error:
            raise UsageError(f"no adapter can be added to the layers {targets!r}: {error}") from error
    if settings.gradient_checkpointing:
        enable = (
            getattr(policy.model, "activation_checkpointing_enable", None) or policy.model.gradient_checkpointing_enable
        )  # its older name
        enable({"use_reentrant": False})
        policy.model.enable_input_require_grads()
    policy.model.eval()  # no dropout: what is learned from is what was sampled


def _shape(model: PeftModel) -> tuple[int, int]:
    config: Any = model.active_peft_config
    return config.r, config.lora_alpha


def _digest(model: Any) -> str:
    """What tells a model's weights from others: the first thousand numbers of each tensor."""
    found = sha256()
    for name, weights in model.named_parameters():
        found.update(f"{name} {tuple(weights.shape)} {weights.dtype}".encode())
        found.update(weights.detach().flatten()[:1000].cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Layers that compute activations anew (gradient checkpointing) do so in this block only: they keep no keys and values, which sampling needs."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True  # not train(): dropout below them stays off
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextmanager
def swapped(model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other values of the parameters that learn, for as long as this is open."""
    own = {name: parameter.data for name, parameter in named(model).items()}
    try:
        for name, parameter in named(model).items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in named(model).items():
            parameter.data = own[name]


def named(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by their names."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

"""Prepare a policy's weights for training: an adapter, or all of them."""

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
from memagent_integrations.training import lora as lora_layers
from memagent_integrations.training.sampler import Sampler
from memagent_integrations.training.settings import Lora, Settings


def reserve(policy: Sampler, folder: Path) -> None:
    """Reserve a policy for the training in a folder: once it has learned there, no other training can begin with it.

    Raises:
        UsageError: it is reserved for another folder.
    """
    folder = folder.resolve()
    if policy.trained_in not in (None, folder):
        raise UsageError(
            f"this policy is being trained in {str(policy.trained_in)!r} already; load it anew for another training"
        )
    policy.trained_in, policy.loaded = folder, policy.loaded or _digest(policy.model)


def start(policy: Sampler, settings: Settings) -> None:
    """Prepare the policy's model to learn.

    An adapter that the model has is trained further. Otherwise the one of `settings.lora` is added, or all weights
    learn if that is None.

    Weights learn in the dtype of the model; in bfloat16 that takes the masters of `MasterAdamW`.

    Raises:
        UsageError: the adapter does not fit the model or the settings.
    """
    torch.manual_seed(settings.seed)
    if isinstance(policy.model, PeftModel):
        _train_adapter(policy.model, settings.lora)
    elif settings.lora:
        policy.model = _with_adapter(policy.model, settings.lora)
    else:
        _train_all(policy.model, embeddings=settings.embeddings)
    if isinstance(policy.model, PeftModel):
        lora_layers.fuse(policy.model)
    if settings.gradient_checkpointing:
        _enable_checkpointing(policy.model)
    policy.model.eval()  # no dropout: the probabilities that learn have to be those of sampling


def _train_all(model: Any, *, embeddings: bool) -> None:
    """Let all weights learn; the embeddings, and a head that is tied to them, only if `embeddings` says so."""
    model.requires_grad_(True)
    if not embeddings:
        model.get_input_embeddings().requires_grad_(False)


def _train_adapter(model: PeftModel, lora: Lora | None) -> None:
    base: Any = model.get_base_model()
    for name, parameter in model.named_parameters():
        learns = "lora_" in name
        parameter.requires_grad_(learns)
        if learns:
            parameter.data = parameter.data.to(base.dtype)
    if not trainable(model):
        raise UsageError("the policy's adapter is no LoRA adapter: another kind cannot be trained")
    rank, alpha = adapter_shape(model)
    if lora and (lora.rank, lora.alpha) != (rank, alpha):
        raise UsageError(
            f"the policy has an adapter of rank {rank} and alpha {alpha}, the settings say {lora.rank} and {lora.alpha}"
        )


def _with_adapter(model: Any, lora: Lora) -> PeftModel:
    """Return the model with a new adapter, in the dtype of the model, so that nothing is cast where it is computed."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    try:
        with ignore_peft_warning():
            adapted: PeftModel = get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise UsageError(f"no adapter can be added to the layers {lora.targets!r}: {error}") from error
    return adapted


def _enable_checkpointing(model: Any) -> None:
    older_name = "gradient_checkpointing_enable"
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, older_name)
    enable({"use_reentrant": False})
    model.enable_input_require_grads()


def adapter_shape(model: PeftModel) -> tuple[int, int]:
    """Return the rank and the alpha of a model's adapter."""
    config: Any = model.active_peft_config
    return config.r, config.lora_alpha


def _digest(model: Any) -> str:
    """Return a digest that differs for models with other weights; it covers the first 1,000 numbers of each tensor."""
    digest = sha256()
    for name, weights in model.named_parameters():
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype}".encode())
        digest.update(weights.detach().flatten()[:1000].cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """Let the layers with gradient checkpointing recompute activations in this block, and only here.

    Layers that recompute keep no keys and values, which sampling needs.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True  # not train(): dropout inside the layer stays off
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@contextmanager
def swapped(model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the parameters that learn these values in the block."""
    current = {name: parameter.data for name, parameter in trainable(model).items()}
    try:
        for name, parameter in trainable(model).items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in trainable(model).items():
            parameter.data = current[name]


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that learn, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

"""LoRA layers in one operation each: their product is added to the layer's in place, forward and backward.

PEFT adds it by operations of their own, each of which reads and writes states as wide as the layer's output: on a CPU
they take as long as the products.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from torch import Tensor

_Forward = Callable[..., Tensor]


def fuse(model: PeftModel) -> None:
    """Let the layers of a model compute their only adapter in one operation; the results are PEFT's, but for rounding.

    Layers of another kind, with a bias or dropout, and models whose adapter is switched off stay with PEFT's own.
    """
    for module in model.modules():
        if isinstance(module, Linear) and type(module.base_layer) is torch.nn.Linear and not module.lora_variant:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: Linear, x: Tensor, *args: Any, **options: Any) -> Tensor:
    base, active = self.base_layer, self.active_adapters
    plain = not (args or options or self.disable_adapters or self.merged) and base.bias is None and len(active) == 1
    if not plain or active[0] not in self.lora_A or not isinstance(self.lora_dropout[active[0]], torch.nn.Identity):
        result: Tensor = type(self).forward(self, x, *args, **options)
        return result
    down, up = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
    if not x.dtype == base.weight.dtype == down.dtype:
        return type(self).forward(self, x)
    return _Sum.apply(x, base.weight, down, up, self.scaling[active[0]])  # type: ignore[no-any-return,no-untyped-call]


class _Sum(torch.autograd.Function):
    """x W' + s (x A') B', where W learns nothing. Shapes: x (..., in), W (out, in), A (rank, in), B (out, rank)."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        states = x.flatten(0, -2)
        low = states @ down.T
        result = (states @ weight.T).addmm_(low, up.T, alpha=scaling)
        context.save_for_backward(states, low, weight, down, up)
        context.scaling, context.shape = scaling, x.shape
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        states, low, weight, down, up = context.saved_tensors
        gradient = gradient.flatten(0, -2)
        of_low = (gradient @ up).mul_(context.scaling)
        of_x = None
        if context.needs_input_grad[0]:
            of_x = (gradient @ weight).addmm_(of_low, down).view(context.shape)
        return of_x, None, of_low.T @ states, (gradient.T @ low).mul_(context.scaling), None

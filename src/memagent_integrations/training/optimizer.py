"""AdamW for weights in bfloat16: it steps a copy of each in float32, from gradients that are summed in float32.

A number of bfloat16 has 8 significant bits: an update of less than 1/256 of a weight would be lost in it, and so would
the gradients of a late micro-batch in the sum of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_FINE = (torch.float32, torch.float64)


class MasterAdamW(torch.optim.AdamW):
    """AdamW over `masters`: the weights themselves or, of weights in a coarser dtype, copies in float32.

    The gradients are on the masters: look for them there, and clear them with `zero_grad`. Gradients of coarse weights
    go to their masters as soon as a backward pass has computed them.

    Args:
        weights: the parameters that learn; only one such optimizer at a time for each.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], *, learning_rate: float, weight_decay: float) -> None:
        pairs = [(weight, _master(weight)) for weight in weights]
        self.masters = [master for _, master in pairs]
        self._copies = [(weight, master) for weight, master in pairs if weight is not master]
        super().__init__(self.masters, lr=learning_rate, weight_decay=weight_decay)
        for weight, master in self._copies:
            weight.register_post_accumulate_grad_hook(_Handover(master))  # type: ignore[no-untyped-call]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters from their gradients, and round the weights from the masters."""
        super().step(closure)
        self._round()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with the masters that are copies."""
        return super().state_dict() | {"masters": [master.detach() for _, master in self._copies]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; the weights are rounded from the masters."""
        super().load_state_dict({name: part for name, part in state_dict.items() if name != "masters"})
        with torch.no_grad():
            for (_, master), saved in zip(self._copies, state_dict.get("masters", ()), strict=True):
                master.copy_(saved)
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for weight, master in self._copies:
                weight.copy_(master)


class _Handover:
    """Adds a weight's gradient to that of its master, and removes it from the weight."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, weight: Tensor) -> None:
        if weight.grad is None:
            return
        gradient, weight.grad = weight.grad.float(), None
        self._master.grad = gradient if self._master.grad is None else self._master.grad.add_(gradient)


def _master(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    return weight if weight.dtype in _FINE else torch.nn.Parameter(weight.detach().float())

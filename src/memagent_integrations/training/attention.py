"""Attention of rows that share their first tokens: the prefix stands once in the sequence, and every row sees it.

The sequence of a bundle is its prefix and then its rows, all of one width: (1, prefix + rows * width) tokens. Only
attention has to know, since the other layers treat each token by itself: the prefix sees itself, and a row sees the
prefix and itself. Keys and values of the prefix are repeated only inside one layer's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_NAME = "memagent_shared_prefix"


@contextmanager
def sharing(model: Any, prefix: int, rows: int) -> Iterator[dict[str, int]]:
    """Let a model's attention treat its sequence as a prefix of so many tokens and rows after it.

    The block gets the keyword arguments for the call of the model.
    """
    config = model.config.get_text_config(decoder=True)
    usual = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield {"shared_prefix": prefix, "shared_rows": rows}
    finally:
        config._attn_implementation = usual


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prefix: int,
    shared_rows: int,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a bundle, as transformers calls it: states (1, heads, tokens, size) -> (1, tokens, ...).

    Raises:
        ValueError: the layer sees only a part of the text, or computes something else than plain attention.
    """
    if options.get("sliding_window") or options.get("softcap") or options.get("s_aux") is not None:
        raise ValueError("its attention is not the plain one over the whole text")
    prefix_query, prefix_key, prefix_value = (state[:, :, :shared_prefix] for state in (query, key, value))
    row_query, row_key, row_value = (
        _per_row(state[0, :, shared_prefix:], shared_rows) for state in (query, key, value)
    )
    keys = torch.cat([prefix_key.expand(shared_rows, -1, -1, -1), row_key], dim=2)
    values = torch.cat([prefix_value.expand(shared_rows, -1, -1, -1), row_value], dim=2)
    width = row_query.shape[2]
    visible = torch.ones(width, shared_prefix + width, dtype=torch.bool, device=query.device).tril(shared_prefix)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":  # the fast kernels of GPUs take either a mask or fewer heads of keys
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    of_prefix = scaled_dot_product_attention(
        prefix_query, prefix_key, prefix_value, is_causal=True, scale=scaling, enable_gqa=groups > 1
    )
    of_rows = scaled_dot_product_attention(
        row_query, keys, values, attn_mask=visible, scale=scaling, enable_gqa=keys.shape[1] != query.shape[1]
    )
    one_after_another = of_rows.transpose(1, 2).flatten(0, 1)[None]  # (1, rows * width, heads, size)
    return torch.cat([of_prefix.transpose(1, 2), one_after_another], dim=1), None


def _per_row(states: Tensor, rows: int) -> Tensor:
    """Return states (heads, rows * width, size) as (rows, heads, width, size)."""
    heads, _, size = states.shape
    return states.reshape(heads, rows, -1, size).transpose(0, 1)


AttentionInterface.register(_NAME, _attend)

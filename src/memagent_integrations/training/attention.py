"""Attention of rows that share their first tokens: the prefix stands once in the sequence, and every row sees it.

The sequence of a bundle is its prefix and then its rows, all of one width: (1, prefix + rows * width) tokens. All layers
but attention treat a token alone, so they need not know. In attention the prefix sees itself; a row sees the prefix and
itself. The keys and values of the prefix are repeated only inside one layer's attention.
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
    states = (query, key, value)
    first = [state[:, :, :shared_prefix] for state in states]
    # (1, heads, rows * width, size) -> (rows, heads, width, size)
    each = [state[0, :, shared_prefix:].unflatten(1, (shared_rows, -1)).transpose(0, 1) for state in states]
    keys, values = (
        torch.cat([before.expand(shared_rows, -1, -1, -1), own], dim=2)
        for before, own in zip(first[1:], each[1:], strict=True)
    )
    width = each[0].shape[2]
    visible = torch.ones(width, shared_prefix + width, dtype=torch.bool, device=query.device).tril(shared_prefix)
    options = {"scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
    prefix_output = scaled_dot_product_attention(*first, is_causal=True, **options)
    rows_output = scaled_dot_product_attention(each[0], keys, values, attn_mask=visible, **options)
    # (rows, heads, width, size) -> (1, rows * width, heads, size)
    flat = rows_output.transpose(1, 2).flatten(0, 1)[None]
    return torch.cat([prefix_output.transpose(1, 2), flat], dim=1), None


AttentionInterface.register(_NAME, _attend)

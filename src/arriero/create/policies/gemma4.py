"""Gemma 4: its table is its head, so it is packed; keys, values and down projections get more bits by a schedule."""

from __future__ import annotations

from arriero.create.policies import default
from arriero.create.policies.default import packed
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import PACKED, eight_bit

_SCHEDULED_AT = 8
"""A model of so many experts gets more bits for all keys and values."""


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    better = eight_bit(asked)
    if tensor.last == "embed_tokens":
        return packed(tensor, better, asked)
    key, value, down = (word in tensor.name for word in ("k_proj", "v_proj", "down_proj"))
    if not (key or value or down) or PACKED[asked].bits != 4 or not default.is_matrix(tensor):
        return default.decide(tensor, asked, model)
    all_of_them = model.experts == _SCHEDULED_AT
    more = all_of_them if key else (value and all_of_them) or model.more_bits(tensor.layer)
    return packed(tensor, better) if more and packed(tensor, better) else packed(tensor, asked)

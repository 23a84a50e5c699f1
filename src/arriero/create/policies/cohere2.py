"""Cohere 2 and its mixture: the table, which is the head, at eight bits; sensitive matrices by a schedule."""

from __future__ import annotations

from arriero.create.policies import default
from arriero.create.policies.default import packed
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import PACKED, eight_bit


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    better = eight_bit(asked)
    if tensor.last == "embed_tokens":
        return packed(tensor, better)
    sensitive = any(word in tensor.name for word in (".v_proj", ".k_proj", "down_proj"))
    if not sensitive or PACKED[asked].bits != 4 or not default.is_matrix(tensor):
        return default.decide(tensor, asked, model)
    return packed(tensor, better, asked) if model.more_bits(tensor.layer) else packed(tensor, asked)

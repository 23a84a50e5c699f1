"""Drafts: what they get wrong costs a guess and no answer, so nothing is promoted, and their heads are packed too.

A head or a table of a draft's own is read at every step; norms, kernels and what is small keep their precision.
"""

from __future__ import annotations

from arriero.create.policies.default import SMALL, is_matrix, packed
from arriero.create.policies.tensor import Tensor
from arriero.create.precisions import DENSE, SOURCE

_HEADS = ("embed_tokens", "lm_head", "predecessor_codebook", "successor_codebook")


def decide(tensor: Tensor, asked: str) -> str:
    """The tensor's precision."""
    if len(tensor.shape) != 2:
        return SOURCE
    if asked in DENSE:
        return asked
    head = tensor.last in _HEADS and tensor.shape[0] * tensor.shape[1] >= SMALL
    return packed(tensor, asked) if head or is_matrix(tensor) else SOURCE

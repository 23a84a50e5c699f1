"""Qwen3.8 Flash Next.

At NVFP4, its experts and its tables of n-grams get that. Projections of indexed attention, whose choice of blocks is
all or nothing, and whatever the head for drafts has besides experts keep their precision. All else gets MXFP8.
"""

from __future__ import annotations

from arriero.create.policies import qwen3_5
from arriero.create.policies.default import packed
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import SOURCE

_TABLE = ".ngram_embedding.shard_"


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    name = tensor.name
    if _TABLE in name and name.endswith(".weight") and len(tensor.shape) == 2:
        return packed(tensor, asked)
    if tensor.last == "block_inject_weight":
        return SOURCE
    if asked != "nvfp4" or tensor.routed:
        return qwen3_5.decide(tensor, asked, model)
    if ".self_attn." in name or name.startswith("mtp.") or ".mtp." in name:
        return SOURCE
    if tensor.last == "embed_tokens":
        return packed(tensor, "mxfp8")
    return qwen3_5.decide(tensor, "mxfp8", model)

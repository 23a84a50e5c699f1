"""Laguna: whole numbers by default; in floating point the shared expert's last matrix gets more bits by a schedule."""

from __future__ import annotations

from arriero.create.policies import default
from arriero.create.policies.default import packed
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import SOURCE


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    if asked.startswith("int"):
        return default.decide(tensor, asked, model)
    if tensor.last in ("embed_tokens", "lm_head"):
        return packed(tensor, "mxfp8")
    if not default.is_matrix(tensor) or ".mlp.gate." in tensor.name or ".router." in tensor.name:
        return SOURCE
    eight, down = asked == "mxfp8", tensor.last == "down_proj"
    more = model.more_bits(tensor.layer, model.layers // 2 - 4)
    if tensor.routed:
        return SOURCE if eight and down and more else packed(tensor, asked)
    if ".self_attn." in tensor.name:
        return SOURCE if eight else packed(tensor, asked)
    if ".shared_expert" in tensor.name:
        if not (down and more):
            return packed(tensor, asked)
        return SOURCE if eight else packed(tensor, "mxfp8")
    return packed(tensor, asked) if ".mlp." in tensor.name else SOURCE

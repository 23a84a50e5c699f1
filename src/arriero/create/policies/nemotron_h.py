"""Nemotron-H: attention, of which there is little, at eight bits; what closes a layer by a schedule."""

from __future__ import annotations

from arriero.create.policies import default
from arriero.create.policies.default import packed
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import SOURCE, eight_bit

_OTHER_MODALITIES = ("vision_model.", "mlp1.", "sound_encoder.", "sound_projection.")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    better = eight_bit(asked)
    if tensor.name.startswith(_OTHER_MODALITIES):
        return SOURCE
    if tensor.last in ("embeddings", "lm_head"):
        return packed(tensor, better)
    if asked not in ("nvfp4", "mxfp4") or not default.is_matrix(tensor):
        return default.decide(tensor, asked, model)
    if tensor.last in _ATTENTION:
        return packed(tensor, better)
    if tensor.last in ("out_proj", "down_proj"):
        more = tensor.layer is None or model.more_bits(tensor.layer)
        return packed(tensor, better, asked) if more else packed(tensor, asked)
    return default.decide(tensor, asked, model)

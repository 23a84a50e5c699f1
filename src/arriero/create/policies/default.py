"""The default policy: matrices of layers at the precision asked for, the head and values at eight bits.

Embeddings, norms, routers, towers and what is small keep what they have.
"""

from __future__ import annotations

from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import SOURCE, eight_bit, fits

SMALL = 1024
"""Numbers below which packing saves nothing worth an error."""
_KEPT = ("audio", "embed", "norm", "ln_", "vision", "visual", "multi_modal_projector", "conv1d")
_ROUTERS = (".mlp.gate.weight", ".mixer.gate.weight", ".shared_expert_gate.weight", ".router.proj.weight",
            ".router.weight")  # fmt: skip
_SENSITIVE = (".v_proj", ".k_proj", "down_proj")


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    if not is_matrix(tensor) or tensor.name.endswith(_ROUTERS):
        return SOURCE
    better = eight_bit(asked)
    if tensor.last == "lm_head":
        return packed(tensor, better)
    if any(word in tensor.name for word in _SENSITIVE) and (
        asked == "int4" or (asked in ("nvfp4", "mxfp4") and not tensor.routed)
    ):
        return packed(tensor, better)
    return packed(tensor, asked)


def is_matrix(tensor: Tensor) -> bool:
    """Whether it is one that products read: of a layer or a stack of experts, not small, not of another modality."""
    if not tensor.routed and (not tensor.name.endswith(".weight") or any(word in tensor.name for word in _KEPT)):
        return False
    if len(tensor.shape) != 2 and not (tensor.routed and len(tensor.shape) == 3):
        return False
    numbers = 1
    for size in tensor.shape:
        numbers *= size
    return numbers >= SMALL


def packed(tensor: Tensor, *choices: str) -> str:
    """The first precision whose groups fit the tensor's rows, else its own."""
    return next((kind for kind in choices if fits(tensor.shape, kind)), SOURCE)

"""What the files of Qwen 3.5 and its relatives have in common: how gains are stored, and the axes of images.

And the names of the parts that a text model leaves out.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import RopeConfig

log = logging.getLogger(__name__)

SECTIONS = (11, 11, 10)
"""Frequencies of the axes of an image, where the configuration doesn't say."""

VISION = r"^((model\.)?(visual|vision_tower)|v)\."
DRAFTS = r"^((model|language_model)\.)?mtp\."


def load_norm(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, width: int, eps: float, *, baked: bool) -> RMSNorm:
    """A norm whose weight is stored around 0, or as the whole gain where the file is `baked`."""
    return RMSNorm.load(checkpoint, prefix, dtype, eps=eps, width=width, centred=True, baked=baked)


def gains_are_baked(checkpoint: Checkpoint) -> bool:
    """Whether the file holds `1 + w` where the original holds w; decided once, by the layout of a convolution.

    MLX's tools turn kernels `[channels, 1, K]` into `[channels, K, 1]` and add the 1 in the same step. CheckpointError
    when there is no convolution to tell by.
    """
    if checkpoint.dialect == "gguf":
        return True
    kernels = [name for name in checkpoint.names() if name.endswith(".conv1d.weight")]
    name = next((name for name in kernels if name.endswith(".linear_attn.conv1d.weight")), None)
    if name is None:
        raise CheckpointError(
            "the checkpoint has no linear_attn.conv1d.weight, whose layout tells how the gains of norms are stored"
        )
    baked = checkpoint.info(name).shape[-1] == 1
    other = next((n for n in kernels if (checkpoint.info(n).shape[-1] == 1) != baked), None)
    if other is not None:
        raise CheckpointError(
            f"tensor {name} has shape {list(checkpoint.info(name).shape)}, but {other} "
            f"{list(checkpoint.info(other).shape)}: one is laid out as in the original, one as by MLX's tools, so that "
            "nothing tells how the gains of norms are stored; convert the model again"
        )
    log.info("norm weights are stored %s (by the layout of %s)", "as gains" if baked else "around 0", name)
    return baked


def image_rope(rope: RopeConfig, *, vision: bool) -> RopeConfig:
    """The rotary embedding, which frequency follows which axis of an image included."""
    return replace(rope, sections=rope.sections or SECTIONS) if vision else rope

"""Images of Gemma 4 without a tower (12B): large patches, normed and projected, positions by column and row.

Patches come row by row with their values as `[p, p, channels]`, from 0 to 1; each becomes one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.errors import InvalidRequest
from arriero.image import ImagePatches, PlacedImage
from arriero.kernels.rms_norm import rms_norm
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.vision import tower_of
from arriero.model.vision.gemma4 import check_grid, raster
from arriero.model.vision.parts import CHANNELS, LayerNorm, check_patches, find_tower, pixel_rows

NORM_EPS = 1e-5
"""Of the norms with a mean; configurations don't say it."""
ROOTS = ("model.vision_embedder.", "vision_embedder.", "model.embed_vision.", "embed_vision.")


@dataclass(frozen=True)
class EmbedderConfig:
    """Sizes, from `vision_config`."""

    hidden: int
    patch: int
    """Pixels along a side of what becomes one token."""
    positions: int
    """Rows of the table of each axis."""
    eps: float

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is wrong."""
        fields = Fields(Fields(values).section("vision_config") or {}, "config.json: vision_config")
        return cls(
            hidden=fields.integer("mm_embed_dim", 3840),
            patch=fields.integer("patch_size", 16) * fields.integer("pooling_kernel_size", 3),
            positions=fields.integer("mm_posemb_size", 1120),
            eps=fields.number("rms_norm_eps", 1e-6),
        )


class Embedder:
    """Norm, product, norm, positions, norm, and the projection to the text model's width."""

    def __init__(
        self,
        config: EmbedderConfig,
        dtype: mx.Dtype,
        *,
        atomic: bool,
        longest: int,
        norms: tuple[LayerNorm, LayerNorm, LayerNorm],
        patch: Linear,
        positions: mx.array,
        project: Linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.atomic = atomic
        self.longest = longest
        """Tokens of an image that see each other in every layer."""
        self.before, self.between, self.after = norms
        self.patch = patch
        self.positions = positions
        """`[positions, 2, hidden]`, by column and by row."""
        self.project = project

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int, atomic: bool, longest: int) -> Self:
        """From a checkpoint that has one; CheckpointError names the tensor that is missing or wrong."""
        config = EmbedderConfig.read(checkpoint.config)
        c = config
        root = find_tower(checkpoint, "patch_dense.weight", ROOTS)
        outer = root.rpartition(".")[0].rpartition(".")[0]
        inner = f"{outer}.embed_vision" if outer else "embed_vision"
        name = f"{inner}.embedding_projection"
        if f"{name}.weight" not in checkpoint:
            name = f"{inner}.multimodal_embedder.embedding_projection"
        values = CHANNELS * c.patch**2
        positions = checkpoint.tensor(f"{root}pos_embedding")
        expect_shape(f"{root}pos_embedding", tuple(positions.shape), (c.positions, 2, c.hidden))

        def norm(name: str, width: int) -> LayerNorm:
            return LayerNorm.load(checkpoint, f"{root}{name}", dtype, eps=NORM_EPS, width=width)

        return cls(
            config,
            dtype,
            atomic=atomic,
            longest=longest,
            norms=(norm("patch_ln1", values), norm("patch_ln2", c.hidden), norm("pos_norm", c.hidden)),
            patch=Linear.load(checkpoint, f"{root}patch_dense", dtype, bias=True, shape=(c.hidden, values)),
            positions=positions.astype(dtype),
            project=Linear.load(checkpoint, name, dtype, bias=False, shape=(hidden, c.hidden)),
        )

    def check(self, patches: ImagePatches) -> None:
        """InvalidRequest for patches that are not of this form, and for more than see each other."""
        check_patches(patches, CHANNELS * self.config.patch**2)
        check_grid(patches, pool=1, positions=self.config.positions)
        if self.atomic and patches.tokens > self.longest:
            raise InvalidRequest(
                f"an image of {patches.tokens} tokens is too large: the model's window holds {self.longest}"
            )

    def encode(self, patches: ImagePatches) -> mx.array:
        """Embeddings `[tokens, hidden]`, row by row."""
        row, column = raster(patches)
        x = self.between(self.patch(self.before(pixel_rows(patches, "channels last").astype(self.dtype))))
        x = self.after(x + (self.positions[mx.array(column), 0] + self.positions[mx.array(row), 1]))
        return self.project(rms_norm(x, None, self.config.eps))

    def layout(self, length: int, images: Sequence[PlacedImage]) -> None:
        """Tokens of images stand where they stand."""
        return


def load_embedder(
    checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int, atomic: bool, longest: int
) -> Embedder | None:
    """The embedder of a checkpoint that declares one and holds it.

    `hidden` is the text model's width; `atomic` says that its attention shows an image's tokens to each other, of
    which a window holds `longest`.
    """
    if tower_of(checkpoint.config, checkpoint.names()) != "gemma4_unified":
        return None
    return Embedder.load(checkpoint, dtype, hidden=hidden, atomic=atomic, longest=longest)

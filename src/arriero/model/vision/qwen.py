"""The tower of Qwen 3.5, 3.6, 3.8 and Flash Next: patches of any grid to one embedding for each block of patches.

Patches come block by block (the four of a 2 × 2 block one after another) with their values as `[channels, p, p]`. A
still image is the same frame twice, so the two halves of the patch embedding's kernel are added up once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.errors import InvalidRequest
from arriero.image import ImagePatches, PlacedImage
from arriero.kernels.rope import rope
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Layout
from arriero.model.layers.config import Fields
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.mlp import activation
from arriero.model.vision import tower_of
from arriero.model.vision.parts import (
    CHANNELS,
    LayerNorm,
    check_patches,
    find_tower,
    gelu,
    mutual_attention,
    pixel_rows,
    settle,
)
from arriero.model.weight import Weight

ROOTS = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")

EPS = 1e-6
"""Of all norms; configurations don't say it."""


@dataclass(frozen=True)
class VisionConfig:
    """Sizes, from `vision_config`."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    """Pixels along a side."""
    frames: int
    """Of the patch embedding's kernel."""
    merge: int
    """Patches along the side of a block, which becomes one token."""
    side: int
    """Positions along a side of the learned grid."""
    out: int
    theta: float

    @classmethod
    def read(cls, values: Mapping[str, Any], *, hidden: int) -> Self:
        """`hidden` is the text model's width. CheckpointError names a field that is wrong or not honoured."""
        section = Fields(values).section("vision_config")
        fields = Fields(section or {}, "config.json: vision_config")
        if fields.get("deepstack_visual_indexes"):
            raise fields.wrong("deepstack_visual_indexes", "empty", fields.get("deepstack_visual_indexes"))
        if activation(fields, "hidden_act", default="gelu_tanh") != "gelu_tanh":
            raise fields.wrong("hidden_act", "gelu_pytorch_tanh", fields.get("hidden_act"))
        if fields.integer("in_channels", CHANNELS) != CHANNELS:
            raise fields.wrong("in_channels", str(CHANNELS), fields.get("in_channels"))
        positions = fields.integer("num_position_embeddings", 2304)
        side = int(positions**0.5)
        if side * side != positions:
            raise fields.wrong("num_position_embeddings", "a square", positions)
        rope = Fields(fields.section("rope_parameters") or {}, "config.json: vision_config.rope_parameters")
        if rope.get("rope_type", "axial") != "axial":
            raise rope.wrong("rope_type", "axial", rope.get("rope_type"))
        config = cls(
            layers=fields.integer("depth", 27),
            hidden=fields.integer("hidden_size", 1152),
            intermediate=fields.integer("intermediate_size", 4304),
            heads=fields.integer("num_heads", 16),
            patch=fields.integer("patch_size", 16),
            frames=fields.integer("temporal_patch_size", 2),
            merge=fields.integer("spatial_merge_size", 2),
            side=side,
            out=fields.integer("out_hidden_size", 3584),
            theta=rope.number("rope_theta", 10000.0),
        )
        if config.hidden % (4 * config.heads):
            raise fields.wrong("hidden_size", f"a multiple of 4 × num_heads ({4 * config.heads})", config.hidden)
        if config.out != hidden:
            raise fields.wrong("out_hidden_size", f"the text model's hidden_size ({hidden})", config.out)
        return config

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class VisionBlock:
    """`x += attention(norm(x)); x += mlp(norm(x))`, every patch seeing every other."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        norms: tuple[LayerNorm, LayerNorm],
        qkv: Linear,
        out: Linear,
        up: Linear,
        down: Linear,
    ) -> None:
        self.config = config
        self.before, self.between = norms
        self.qkv = qkv
        self.out = out
        self.up = up
        self.down = down

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: VisionConfig) -> Self:
        """Tensors under `prefix`, e.g. `model.visual.blocks.0`."""
        c = config

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=True, shape=(out, width))

        def norm(name: str) -> LayerNorm:
            return LayerNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=EPS, width=c.hidden)

        return cls(
            config,
            norms=(norm("norm1"), norm("norm2")),
            qkv=linear("attn.qkv", 3 * c.hidden, c.hidden),
            out=linear("attn.proj", c.hidden, c.hidden),
            up=linear("mlp.linear_fc1", c.intermediate, c.hidden),
            down=linear("mlp.linear_fc2", c.hidden, c.intermediate),
        )

    def __call__(self, x: mx.array, angles: mx.array) -> mx.array:
        c = self.config
        q, k, v = mx.split(self.qkv(self.before(x)).reshape(-1, 3 * c.heads, c.head_dim), 3, axis=1)
        y = mutual_attention(rope(q, angles), rope(k, angles), v, scale=c.head_dim**-0.5)
        x = x + self.out(y.reshape(-1, c.hidden))
        return x + self.down(gelu(self.up(self.between(x)), tanh=True))


class Tower:
    """Patch embedding, positions of two kinds, blocks, and the merger into the text model's width."""

    atomic = False

    def __init__(
        self,
        config: VisionConfig,
        dtype: mx.Dtype,
        *,
        patch: Linear,
        positions: Embedding,
        blocks: list[VisionBlock],
        norm: LayerNorm,
        merge: tuple[Linear, Linear],
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.patch = patch
        """In float32, as its inputs are."""
        self.positions = positions
        self.blocks = blocks
        self.norm = norm
        self.merge_in, self.merge_out = merge

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int) -> Self:
        """From a checkpoint that has one; CheckpointError names the tensor that is missing or wrong."""
        config = VisionConfig.read(checkpoint.config, hidden=hidden)
        c = config
        root = find_tower(checkpoint, "patch_embed.proj.weight", ROOTS)
        group = c.hidden * c.merge**2

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear.load(checkpoint, f"{root}{name}", dtype, bias=True, shape=(out, width))

        return cls(
            config,
            dtype,
            patch=load_patch(checkpoint, f"{root}patch_embed.proj", config),
            positions=Embedding.load(checkpoint, f"{root}pos_embed", dtype, shape=(c.side**2, c.hidden)),
            blocks=[VisionBlock.load(checkpoint, f"{root}blocks.{i}", dtype, config) for i in range(c.layers)],
            norm=LayerNorm.load(checkpoint, f"{root}merger.norm", dtype, eps=EPS, width=c.hidden),
            merge=(linear("merger.linear_fc1", group, group), linear("merger.linear_fc2", c.out, group)),
        )

    def check(self, patches: ImagePatches) -> None:
        """InvalidRequest for patches that are not of this tower's form."""
        c = self.config
        check_patches(patches, CHANNELS * c.patch**2)
        if patches.rows % c.merge or patches.columns % c.merge:
            raise InvalidRequest(
                f"an image of {patches.rows} × {patches.columns} patches cannot be cut into blocks of {c.merge}"
            )
        expected = patches.rows * patches.columns // c.merge**2
        if patches.tokens != expected:
            raise InvalidRequest(f"an image takes {expected} placeholders, but {patches.tokens} were given")

    def encode(self, patches: ImagePatches) -> mx.array:
        """Embeddings `[tokens, hidden]`, by rows of blocks."""
        c = self.config
        row, column = block_order(patches.rows, patches.columns, c.merge)
        x = self.patch(pixel_rows(patches, "channels first"))
        indices, weights = grid_weights(row, column, patches, c.side)
        placed = (self.positions(mx.array(indices).reshape(-1)).reshape(-1, 4, c.hidden) * weights[:, :, None]).sum(1)
        x = (x + placed).astype(self.dtype)
        angles = mx.array(axial_table(row, column, c.head_dim, c.theta))
        for block in self.blocks:
            x = settle(block(x, angles))
        merged = self.merge_in(self.norm(x).reshape(patches.tokens, -1))
        return self.merge_out(gelu(merged, tanh=False))

    def layout(self, length: int, images: Sequence[PlacedImage]) -> Layout:
        """Time, height and width of every token: text steps on all axes, an image spans a grid at one time."""
        found = np.zeros((3, length), np.int32)
        done = step = 0
        for image in images:
            text = image.offset - done
            found[:, done : image.offset] = np.arange(step, step + text)
            step += text
            rows, columns = (size // self.config.merge for size in (image.patches.rows, image.patches.columns))
            found[0, image.offset : image.end] = step
            found[1, image.offset : image.end] = step + np.repeat(np.arange(rows), columns)
            found[2, image.offset : image.end] = step + np.tile(np.arange(columns), rows)
            step += max(rows, columns)
            done = image.end
        found[:, done:] = np.arange(step, step + length - done)
        return Layout(found, int(found.max()) + 1 - length)


def load_patch(checkpoint: Checkpoint, prefix: str, config: VisionConfig) -> Linear:
    """The embedding of single patches out of the kernel `[hidden, channels, frames, p, p]`.

    MLX's tools write `[hidden, frames, p, p, channels]`.
    """
    c = config
    kernel = checkpoint.tensor(f"{prefix}.weight").astype(mx.float32)
    if tuple(kernel.shape) == (c.hidden, c.frames, c.patch, c.patch, CHANNELS):
        kernel = kernel.transpose(0, 4, 1, 2, 3)
    expect_shape(f"{prefix}.weight", tuple(kernel.shape), (c.hidden, CHANNELS, c.frames, c.patch, c.patch))
    bias = checkpoint.tensor(f"{prefix}.bias").astype(mx.float32)
    expect_shape(f"{prefix}.bias", tuple(bias.shape), (c.hidden,))
    return Linear(Weight(kernel.sum(axis=2).reshape(c.hidden, -1)), bias)


def block_order(rows: int, columns: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every patch, `[patches]`, in the order of blocks."""
    shape = (rows // merge, merge, columns // merge, merge)
    row, column = (
        grid.reshape(shape).swapaxes(1, 2).reshape(-1) for grid in np.mgrid[:rows, :columns].astype(np.int64)
    )
    return row, column


def grid_weights(row: np.ndarray, column: np.ndarray, patches: ImagePatches, side: int) -> tuple[np.ndarray, mx.array]:
    """Bilinear sampling of the learned grid, its corners on the image's: indices int32 and weights float32 `[n, 4]`."""

    def taps(index: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(source)
        share = (source - low)[:, None]
        near = np.minimum(low.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1)
        return near, np.concatenate([1 - share, share], axis=1)

    rows, down = taps(row, patches.rows)
    columns, across = taps(column, patches.columns)
    indices = (rows[:, :, None] * side + columns[:, None]).reshape(-1, 4)
    return indices, mx.array((down[:, :, None] * across[:, None]).reshape(-1, 4))


def axial_table(row: np.ndarray, column: np.ndarray, head_dim: int, theta: float) -> np.ndarray:
    """Rotary angles of a grid, float32 `[n, head_dim / 2, 2]`: half of the frequencies by row, half by column."""
    spatial = head_dim // 2
    inverse = 1.0 / theta ** (np.arange(0, spatial, 2, dtype=np.float64) / spatial)
    angles = np.concatenate([row[:, None] * inverse, column[:, None] * inverse], axis=1)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def load_tower(checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int) -> Tower | None:
    """The tower of a checkpoint that declares one and holds it; `hidden` is the text model's width."""
    if tower_of(checkpoint.config, checkpoint.names()) != "qwen":
        return None
    return Tower.load(checkpoint, dtype, hidden=hidden)

"""The tower of Gemma 4: patches of any grid, positions by column and row, squares of patches averaged to one token.

Patches come row by row with their values as `[p, p, channels]`, from 0 to 1; the tower takes them from −1 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.errors import InvalidRequest
from arriero.image import ImagePatches, PlacedImage
from arriero.kernels.activation import Activation, gated
from arriero.kernels.rms_norm import rms_norm
from arriero.kernels.rope import rope
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.mlp import activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.vision import tower_of
from arriero.model.vision.parts import CHANNELS, check_patches, find_tower, mutual_attention, pixel_rows, settle


@dataclass(frozen=True)
class VisionConfig:
    """Sizes, from `vision_config`."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Activation
    eps: float
    theta: float
    patch: int
    """Pixels along a side."""
    pool: int
    """Patches along the side of the square that becomes one token."""
    positions: int
    """Rows of the table of each axis."""
    clipped: bool
    """Whether linear layers clip what goes in and out."""
    standardized: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is wrong or not honoured."""
        fields = Fields(Fields(values).section("vision_config") or {}, "config.json: vision_config")
        turns = Fields(fields.section("rope_parameters") or {}, "config.json: vision_config.rope_parameters")
        if turns.get("rope_type", "axial") not in ("axial", "default"):
            raise turns.wrong("rope_type", "axial", turns.get("rope_type"))
        if fields.flag("attention_bias", False):
            raise fields.wrong("attention_bias", "false", True)
        heads = fields.integer("num_attention_heads", 12)
        config = cls(
            layers=fields.integer("num_hidden_layers", 16),
            hidden=fields.integer("hidden_size", 768),
            intermediate=fields.integer("intermediate_size", 3072),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", 64),
            activation=activation(fields, "hidden_activation", default="gelu_tanh"),
            eps=fields.number("rms_norm_eps", 1e-6),
            theta=turns.number("rope_theta", 100.0),
            patch=fields.integer("patch_size", 16),
            pool=fields.integer("pooling_kernel_size", 3),
            positions=fields.integer("position_embedding_size", 10240),
            clipped=fields.flag("use_clipped_linears", False),
            standardized=fields.flag("standardize", False),
        )
        if config.head_dim % 4:
            raise fields.wrong("head_dim", "a multiple of 4", config.head_dim)
        if heads % config.kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", config.kv_heads)
        return config


class ClippedLinear:
    """`clip(clip(x) @ Wᵀ)`, the bounds those of training; without bounds a plain product."""

    def __init__(self, linear: Linear, bounds: Sequence[mx.array]) -> None:
        self.linear = linear
        self.bounds = list(bounds)
        """Lowest and highest input, lowest and highest output; empty where nothing is clipped."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, shape: tuple[int, int], clipped: bool) -> Self:
        """`prefix.linear.weight` and the four bounds beside it; also `prefix.weight`, as some tools write it."""
        inner = f"{prefix}.linear"
        name = inner if f"{inner}.weight" in checkpoint else prefix
        linear = Linear.load(checkpoint, name, dtype, bias=False, shape=shape)
        names = ("input_min", "input_max", "output_min", "output_max") if clipped else ()
        return cls(linear, [checkpoint.tensor(f"{prefix}.{bound}").astype(dtype).reshape(()) for bound in names])

    def __call__(self, x: mx.array) -> mx.array:
        if not self.bounds:
            return self.linear(x)
        low, high, least, most = self.bounds
        return mx.clip(self.linear(mx.clip(x, low, high)), least, most)


class VisionLayer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`, every patch seeing every other."""

    def __init__(
        self,
        config: VisionConfig,
        linears: Mapping[str, ClippedLinear],
        norms: Sequence[RMSNorm],
        head_norms: tuple[RMSNorm, RMSNorm],
    ) -> None:
        self.config = config
        self.linears = dict(linears)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.query_norm, self.key_norm = head_norms

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: VisionConfig) -> Self:
        """Tensors under `prefix`, e.g. `model.vision_tower.encoder.layers.0`."""
        c = config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        shapes = {
            "self_attn.q_proj": (queries, c.hidden),
            "self_attn.k_proj": (keys, c.hidden),
            "self_attn.v_proj": (keys, c.hidden),
            "self_attn.o_proj": (c.hidden, queries),
            "mlp.gate_proj": (c.intermediate, c.hidden),
            "mlp.up_proj": (c.intermediate, c.hidden),
            "mlp.down_proj": (c.hidden, c.intermediate),
        }
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=c.eps, width=width)

        return cls(
            config,
            {
                name.split(".")[1]: ClippedLinear.load(checkpoint, f"{prefix}.{name}", dtype, shape, c.clipped)
                for name, shape in shapes.items()
            },
            [norm(f"{name}_layernorm", c.hidden) for name in names],
            (norm("self_attn.q_norm", c.head_dim), norm("self_attn.k_norm", c.head_dim)),
        )

    def __call__(self, x: mx.array, angles: Sequence[mx.array]) -> mx.array:
        x = x + self.after_attention(self._attention(self.before_attention(x), angles))
        y = self.before_mlp(x)
        y = gated(self.config.activation, self.linears["gate_proj"](y), self.linears["up_proj"](y))
        return x + self.after_mlp(self.linears["down_proj"](y))

    def _attention(self, x: mx.array, angles: Sequence[mx.array]) -> mx.array:
        c = self.config
        q, k, v = (self.linears[f"{name}_proj"](x).reshape(-1, heads, c.head_dim) for name, heads in self._heads())
        q, k = turned(self.query_norm(q), angles), turned(self.key_norm(k), angles)
        y = mutual_attention(q, k, rms_norm(v, None, c.eps), scale=1.0)
        return self.linears["o_proj"](y.reshape(-1, c.heads * c.head_dim))

    def _heads(self) -> tuple[tuple[str, int], ...]:
        return ("q", self.config.heads), ("k", self.config.kv_heads), ("v", self.config.kv_heads)


def turned(x: mx.array, angles: Sequence[mx.array]) -> mx.array:
    """Heads `[n, heads, D]`, the first half of each turned by the patch's column, the second by its row."""
    halves = mx.split(x, 2, axis=-1)
    return mx.concatenate([rope(half, table) for half, table in zip(halves, angles, strict=True)], axis=-1)


class Tower:
    """Patch embedding with positions of both axes, layers, average over squares, projection to the text's width."""

    def __init__(
        self,
        config: VisionConfig,
        dtype: mx.Dtype,
        *,
        atomic: bool,
        patch: Linear,
        positions: mx.array,
        layers: list[VisionLayer],
        standard: tuple[mx.array, mx.array] | None,
        project: Linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.atomic = atomic
        self.patch = patch
        """In float32, as its inputs are."""
        self.positions = positions
        """`[2, positions, hidden]`, by column and by row."""
        self.layers = layers
        self.standard = standard
        """What is taken off pooled features and what they are multiplied by, float32."""
        self.project = project

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int, atomic: bool) -> Self:
        """From a checkpoint that has one; CheckpointError names the tensor that is missing or wrong."""
        config = VisionConfig.read(checkpoint.config)
        c = config
        root = find_tower(checkpoint, "patch_embedder.input_proj.weight", ("model.vision_tower.", "vision_tower."))
        outer = root.removesuffix("vision_tower.")
        table = checkpoint.tensor(f"{root}patch_embedder.position_embedding_table")
        expect_shape(f"{root}patch_embedder.position_embedding_table", tuple(table.shape), (2, c.positions, c.hidden))
        standard = None
        if c.standardized:
            bias, scale = (checkpoint.tensor(f"{root}{name}").astype(mx.float32) for name in ("std_bias", "std_scale"))
            standard = bias, scale
        return cls(
            config,
            dtype,
            atomic=atomic,
            patch=Linear.load(
                checkpoint,
                f"{root}patch_embedder.input_proj",
                mx.float32,
                bias=False,
                shape=(c.hidden, CHANNELS * c.patch**2),
            ),
            positions=table.astype(mx.float32),
            layers=[VisionLayer.load(checkpoint, f"{root}encoder.layers.{i}", dtype, c) for i in range(c.layers)],
            standard=standard,
            project=load_projection(checkpoint, outer, dtype, (hidden, c.hidden)),
        )

    def check(self, patches: ImagePatches) -> None:
        """InvalidRequest for patches that are not of this tower's form."""
        c = self.config
        check_patches(patches, CHANNELS * c.patch**2)
        check_grid(patches, pool=c.pool, positions=c.positions)

    def encode(self, patches: ImagePatches) -> mx.array:
        """Embeddings `[tokens, hidden]`, by rows of squares."""
        c = self.config
        row, column = raster(patches)
        x = self.patch(2 * (pixel_rows(patches, "channels last") - 0.5))
        x = (x + self.positions[0][mx.array(column)] + self.positions[1][mx.array(row)]).astype(self.dtype)
        half = c.head_dim // 2
        inverse = 1.0 / c.theta ** (np.arange(0, half, 2, dtype=np.float64) / half)
        angles = [mx.array(table(index[:, None] * inverse)) for index in (column, row)]
        for layer in self.layers:
            x = settle(layer(x, angles))
        grid = (patches.rows // c.pool, c.pool, patches.columns // c.pool, c.pool, c.hidden)
        pooled = x.astype(mx.float32).reshape(grid).mean(axis=(1, 3)).reshape(-1, c.hidden) * c.hidden**0.5
        if self.standard is not None:
            pooled = (pooled - self.standard[0]) * self.standard[1]
        return self.project(rms_norm(pooled.astype(self.dtype), None, c.eps))

    def layout(self, length: int, images: Sequence[PlacedImage]) -> None:
        """Tokens of images stand where they stand."""
        return


def check_grid(patches: ImagePatches, *, pool: int, positions: int) -> None:
    """InvalidRequest unless whole squares of `pool` patches make the tokens, and the grid has so many positions."""
    if patches.rows % pool or patches.columns % pool:
        raise InvalidRequest(
            f"an image of {patches.rows} × {patches.columns} patches cannot be cut into squares of {pool}"
        )
    expected = patches.rows * patches.columns // pool**2
    if patches.tokens != expected:
        raise InvalidRequest(f"an image takes {expected} placeholders, but {patches.tokens} were given")
    if max(patches.rows, patches.columns) > positions:
        raise InvalidRequest(
            f"an image of {patches.rows} × {patches.columns} patches is too large: the model knows {positions} "
            "positions along a side"
        )


def raster(patches: ImagePatches) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every patch, row by row."""
    row, column = (grid.reshape(-1) for grid in np.mgrid[: patches.rows, : patches.columns].astype(np.int32))
    return row, column


def table(angles: np.ndarray) -> np.ndarray:
    """Cosines and sines, float32 `[n, R / 2, 2]`."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def load_projection(checkpoint: Checkpoint, outer: str, dtype: mx.Dtype, shape: tuple[int, int]) -> Linear:
    """`embed_vision.embedding_projection`, to the text model's width."""
    return Linear.load(checkpoint, f"{outer}embed_vision.embedding_projection", dtype, bias=False, shape=shape)


def load_tower(checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int, atomic: bool) -> Tower | None:
    """The tower of a checkpoint that declares one and holds it.

    `hidden` is the text model's width; `atomic` says that its attention shows an image's tokens to each other.
    """
    if tower_of(checkpoint.config, checkpoint.names()) != "gemma4":
        return None
    return Tower.load(checkpoint, dtype, hidden=hidden, atomic=atomic)

"""The tower of Gemma 3 (SigLIP): a square of one size, learned positions, tiles of patches averaged to one token.

Patches come row by row with their values as `[channels, p, p]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.errors import InvalidRequest
from arriero.image import ImagePatches, PlacedImage
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.mlp import activation
from arriero.model.layers.norm import RMSNorm
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

ROOTS = ("model.vision_tower.", "model.vision_tower.vision_model.", "vision_tower.vision_model.", "vision_tower.")


@dataclass(frozen=True)
class VisionConfig:
    """Sizes, from `vision_config` and what the whole model says of images."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    eps: float
    patch: int
    """Pixels along a side."""
    side: int
    """Patches along a side of the picture."""
    tile: int
    """Patches along a side of what becomes one token."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is wrong or not honoured."""
        outer = Fields(values)
        fields = Fields(outer.section("vision_config") or {}, "config.json: vision_config")
        if activation(fields, "hidden_act", default="gelu_tanh") != "gelu_tanh":
            raise fields.wrong("hidden_act", "gelu_pytorch_tanh", fields.get("hidden_act"))
        if fields.integer("num_channels", CHANNELS) != CHANNELS:
            raise fields.wrong("num_channels", str(CHANNELS), fields.get("num_channels"))
        size, patch = fields.integer("image_size", 224), fields.integer("patch_size", 16)
        if size % patch:
            raise fields.wrong("image_size", f"a multiple of patch_size ({patch})", size)
        tokens = outer.integer("mm_tokens_per_image", 256)
        across = math.isqrt(tokens)
        if across * across != tokens or size // patch % across:
            raise outer.wrong("mm_tokens_per_image", f"a square that divides {(size // patch) ** 2} patches", tokens)
        config = cls(
            layers=fields.integer("num_hidden_layers", 12),
            hidden=fields.integer("hidden_size", 768),
            intermediate=fields.integer("intermediate_size", 3072),
            heads=fields.integer("num_attention_heads", 12),
            eps=fields.number("layer_norm_eps", 1e-6),
            patch=patch,
            side=size // patch,
            tile=size // patch // across,
        )
        if config.hidden % config.heads:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({config.heads})", config.hidden)
        return config

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class VisionLayer:
    """`x += attention(norm(x)); x += mlp(norm(x))`, every patch seeing every other."""

    def __init__(self, config: VisionConfig, norms: tuple[LayerNorm, LayerNorm], linears: Mapping[str, Linear]) -> None:
        self.config = config
        self.before, self.between = norms
        self.qkv = FusedLinear([linears[f"self_attn.{name}_proj"] for name in "qkv"])
        self.out = linears["self_attn.out_proj"]
        self.up, self.down = linears["mlp.fc1"], linears["mlp.fc2"]

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: VisionConfig) -> Self:
        """Tensors under `prefix`, e.g. `model.vision_tower.encoder.layers.0`."""
        c = config
        square = (c.hidden, c.hidden)
        shapes = dict.fromkeys([f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")], square)
        shapes |= {"mlp.fc1": (c.intermediate, c.hidden), "mlp.fc2": (c.hidden, c.intermediate)}
        first, second = (
            LayerNorm.load(checkpoint, f"{prefix}.layer_norm{n}", dtype, eps=c.eps, width=c.hidden) for n in (1, 2)
        )
        return cls(
            config,
            (first, second),
            {
                name: Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=True, shape=shape)
                for name, shape in shapes.items()
            },
        )

    def __call__(self, x: mx.array) -> mx.array:
        c = self.config
        q, k, v = (part.reshape(-1, c.heads, c.head_dim) for part in self.qkv(self.before(x)))
        y = mutual_attention(q, k, v, scale=c.head_dim**-0.5)
        x = x + self.out(y.reshape(-1, c.hidden))
        return x + self.down(gelu(self.up(self.between(x)), tanh=True))


class Tower:
    """Patch embedding, positions, layers, a norm, averages over tiles, a norm, and the way to the text's width."""

    atomic = True

    def __init__(
        self,
        config: VisionConfig,
        dtype: mx.Dtype,
        *,
        patch: Linear,
        positions: Embedding,
        layers: list[VisionLayer],
        norm: LayerNorm,
        token_norm: RMSNorm,
        project: Linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.patch = patch
        """In float32, as its inputs are."""
        self.positions = positions
        self.layers = layers
        self.norm = norm
        self.token_norm = token_norm
        self.project = project

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int) -> Self:
        """From a checkpoint that has one; CheckpointError names the tensor that is missing or wrong."""
        config = VisionConfig.read(checkpoint.config)
        c = config
        root = find_tower(checkpoint, "embeddings.patch_embedding.weight", ROOTS)
        outer = root.removesuffix("vision_model.").removesuffix("vision_tower.") + "multi_modal_projector."
        name = f"{outer}mm_input_projection_weight"
        project = checkpoint.tensor(name).astype(dtype)
        expect_shape(name, tuple(project.shape), (c.hidden, hidden))
        return cls(
            config,
            dtype,
            patch=load_patch(checkpoint, f"{root}embeddings.patch_embedding", config),
            positions=Embedding.load(
                checkpoint, f"{root}embeddings.position_embedding", dtype, shape=(c.side**2, c.hidden)
            ),
            layers=[VisionLayer.load(checkpoint, f"{root}encoder.layers.{i}", dtype, c) for i in range(c.layers)],
            norm=LayerNorm.load(checkpoint, f"{root}post_layernorm", dtype, eps=c.eps, width=c.hidden),
            token_norm=RMSNorm.load(
                checkpoint, f"{outer}mm_soft_emb_norm", dtype, eps=c.eps, width=c.hidden, centred=True
            ),
            project=Linear(Weight(project.T)),
        )

    def check(self, patches: ImagePatches) -> None:
        """InvalidRequest for patches that are not of this tower's form."""
        c = self.config
        check_patches(patches, CHANNELS * c.patch**2)
        tokens = (c.side // c.tile) ** 2
        if (patches.rows, patches.columns, patches.tokens) != (c.side, c.side, tokens):
            raise InvalidRequest(
                f"an image takes {c.side} × {c.side} patches and {tokens} placeholders, but {patches.rows} × "
                f"{patches.columns} and {patches.tokens} were given"
            )

    def encode(self, patches: ImagePatches) -> mx.array:
        """Embeddings `[tokens, hidden]`, by rows of tiles."""
        c = self.config
        x = self.patch(pixel_rows(patches, "channels first"))
        x = (x + self.positions(mx.arange(c.side**2)).astype(mx.float32)).astype(self.dtype)
        for layer in self.layers:
            x = settle(layer(x))
        across = c.side // c.tile
        tiles = self.norm(x).astype(mx.float32).reshape(across, c.tile, across, c.tile, c.hidden)
        return self.project(self.token_norm(tiles.mean(axis=(1, 3)).reshape(-1, c.hidden).astype(self.dtype)))

    def layout(self, length: int, images: Sequence[PlacedImage]) -> None:
        """Tokens of images stand where they stand."""
        return


def load_patch(checkpoint: Checkpoint, prefix: str, config: VisionConfig) -> Linear:
    """The kernel `[hidden, channels, p, p]` as a matrix; MLX's tools write `[hidden, p, p, channels]`."""
    c = config
    kernel = checkpoint.tensor(f"{prefix}.weight").astype(mx.float32)
    if tuple(kernel.shape) == (c.hidden, c.patch, c.patch, CHANNELS):
        kernel = kernel.transpose(0, 3, 1, 2)
    expect_shape(f"{prefix}.weight", tuple(kernel.shape), (c.hidden, CHANNELS, c.patch, c.patch))
    bias = checkpoint.tensor(f"{prefix}.bias").astype(mx.float32)
    expect_shape(f"{prefix}.bias", tuple(bias.shape), (c.hidden,))
    return Linear(Weight(kernel.reshape(c.hidden, -1)), bias)


def load_tower(checkpoint: Checkpoint, dtype: mx.Dtype, *, hidden: int) -> Tower | None:
    """The tower of a checkpoint that declares one and holds it; `hidden` is the text model's width."""
    if tower_of(checkpoint.config, checkpoint.names()) != "gemma3":
        return None
    return Tower.load(checkpoint, dtype, hidden=hidden)

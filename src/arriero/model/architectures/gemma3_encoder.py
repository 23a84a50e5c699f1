"""EmbeddingGemma: Gemma 3 whose tokens see those behind them too, and two matrices on the mean of a text's states.

Source: the model card of EmbeddingGemma, and Vera et al., 2025 (arXiv:2509.20354).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.kernels.rope import rope
from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import EncoderFacts
from arriero.model.layers.config import Fields, text_fields
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, DecoderShape, LayerType

_UNUSED = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    kinds: tuple[LayerType, ...]
    scale: float
    reach: int
    """Tokens that a windowed layer sees on either side."""
    ropes: Mapping[LayerType, RopeConfig]
    activation: Activation

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        fields = text_fields(values)
        if not fields.flag("use_bidirectional_attention", False):
            raise CheckpointError(
                f"{fields.where}: {architecture} without use_bidirectional_attention is a Gemma 3 without its head, "
                "which can neither write nor was it taught to make vectors"
            )
        layers = fields.integer("num_hidden_layers")
        shape = DecoderShape.read(
            fields, architecture, context_length=131072, tied=True, heads=(8, 4), head_dim=256, vocab=262208
        )
        for name in _UNUSED:
            if fields.optional_number(name, None) is not None:
                raise fields.wrong(name, "absent", fields.get(name))
        if fields.flag("attention_bias", False):
            raise fields.wrong("attention_bias", "false", True)
        pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
        types = fields.strings("layer_types", layers, LAYER_TYPES)
        types = types or [LAYER_TYPES[(i + 1) % pattern != 0] for i in range(layers)]
        config = cls(
            shape=shape,
            kinds=tuple(kind for name in types for kind in LAYER_TYPES if kind == name),
            scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            reach=fields.integer("sliding_window", 4096) // 2,
            ropes=_ropes(fields, shape.context_length),
            activation=activation(fields, "hidden_activation", default="gelu_tanh"),
        )
        fields.finish(architecture)
        return config


def _ropes(fields: Fields, context_length: int) -> dict[LayerType, RopeConfig]:
    """The rotary embedding of each kind of layer."""
    full = RopeConfig.read(fields, theta=1e6, context_length=context_length, layer_type="full_attention")
    local = fields.number("rope_local_base_freq", 10000.0)
    nested = (fields.section("rope_parameters") or {}).get("sliding_attention") or {}
    where = "rope_parameters.sliding_attention"
    sliding = RopeConfig.of(nested, where=where, theta=local, partial=1.0, context_length=context_length)
    return {"full_attention": full, "sliding_attention": sliding}


class Attention:
    """Grouped heads with norms on queries and keys, over whole texts or the tokens in reach."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, kind: LayerType) -> None:
        shape = config.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=False, shape=(out, width))

        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(
                checkpoint, f"{prefix}.{name}", dtype, eps=shape.eps, width=shape.head_dim, centred=True
            )

        widths = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv = FusedLinear([linear(name, width, shape.hidden) for name, width in widths.items()])
        self.out = linear("o_proj", shape.hidden, q)
        self.q_norm, self.k_norm = norm("q_norm"), norm("k_norm")
        self.head_dim = shape.head_dim
        self.scale = config.scale
        self.reach = config.reach if kind == "sliding_attention" else None

    def __call__(self, x: mx.array, lengths: Sequence[int], angles: mx.array) -> mx.array:
        """x `[T, hidden]` of texts of `lengths`, one behind another."""
        q, k, v = (part.reshape(x.shape[0], -1, self.head_dim) for part in self.qkv(x))
        q, k = rope(self.q_norm(q), angles), rope(self.k_norm(k), angles)
        seen, at = [], 0
        for length in lengths:
            text = slice(at, at + length)
            heads = [part[text].swapaxes(0, 1)[None] for part in (q, k, v)]
            mask = None
            if self.reach is not None and length > self.reach + 1:
                places = mx.arange(length)
                mask = mx.abs(places[:, None] - places[None]) <= self.reach
            found = mx.fast.scaled_dot_product_attention(*heads, scale=self.scale, mask=mask)
            seen.append(found[0].swapaxes(0, 1).reshape(length, -1))
            at += length
        return self.out(mx.concatenate(seen))


class Layer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, kind: LayerType) -> None:
        shape = config.shape
        self.kind = kind
        self.attention = Attention(checkpoint, f"{prefix}.self_attn", dtype, config, kind)
        self.mlp = GatedMLP.load(
            checkpoint,
            f"{prefix}.mlp",
            dtype,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            activation=config.activation,
            bias=False,
        )

        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(
                checkpoint, f"{prefix}.{name}_layernorm", dtype, eps=shape.eps, width=shape.hidden, centred=True
            )

        self.before, self.after = norm("input"), norm("post_attention")
        self.before_mlp, self.after_mlp = norm("pre_feedforward"), norm("post_feedforward")

    def __call__(self, x: mx.array, lengths: Sequence[int], angles: mx.array) -> mx.array:
        x = x + self.after(self.attention(self.before(x), lengths, angles))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Model:
    """The whole network, and the matrices behind its pooling where the file has them."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, config: Config) -> None:
        shape = config.shape
        stem = "model." if "model.embed_tokens.weight" in checkpoint else ""
        self.words = Embedding.load(checkpoint, f"{stem}embed_tokens", dtype, shape=(shape.vocab, shape.hidden))
        self.layers = [
            Layer(checkpoint, f"{stem}layers.{index}", dtype, config, kind) for index, kind in enumerate(config.kinds)
        ]
        self.norm = RMSNorm.load(checkpoint, f"{stem}norm", dtype, eps=shape.eps, width=shape.hidden, centred=True)
        self.ropes = {kind: Rope(rope, shape.head_dim) for kind, rope in config.ropes.items()}
        self.scale = shape.hidden**0.5
        # Beside a network without a head they have its prefix.
        matrices = [f"{prefix}dense.{index}" for index in range(2) for prefix in dict.fromkeys((stem, ""))]
        self.dense = [
            Linear.load(checkpoint, name, mx.float32, bias=False) for name in matrices if f"{name}.weight" in checkpoint
        ]
        self.facts = EncoderFacts(
            architecture=shape.architecture,
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            layers=shape.layers,
            context_length=shape.context_length,
            dtype=dtype,
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        return cls(checkpoint, dtype, Config.read(checkpoint.config))

    def encode(self, tokens: mx.array, lengths: Sequence[int]) -> mx.array:
        """Final states `[T, hidden]` of packed texts."""
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        angles = {kind: mx.array(turned.table(positions)) for kind, turned in self.ropes.items()}
        x = self.words(tokens) * self.scale
        for layer in self.layers:
            x = layer(x, lengths, angles[layer.kind])
        return self.norm(x)

    def finish(self, pooled: mx.array) -> mx.array:
        """Vectors of texts, float32 `[n, hidden]`, of the means of their states."""
        for matrix in self.dense:
            pooled = matrix(pooled)
        return pooled

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the model owns."""
        return arrays(self)

"""Qwen 3, dense and mixture of experts: norms on query and key heads, no biases, experts chosen by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.block import FeedForward, PreNormBlock
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.experts import Experts, Router, SparseConfig, SparseMLP
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape, windows


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: list[AttentionConfig]
    """Of each layer."""
    rope: RopeConfig
    activation: Activation
    sparse: SparseConfig | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        shape = DecoderShape.read(fields, check_config(values), context_length=32768)
        moe = shape.architecture == "Qwen3MoeForCausalLM"
        if moe and fields.flag("use_sliding_window", False):
            raise fields.wrong("use_sliding_window", f"false ({shape.architecture} has no windows here)", True)
        bias = fields.flag("attention_bias", False)
        config = cls(
            shape=shape,
            attention=[
                AttentionConfig(
                    hidden=shape.hidden,
                    heads=shape.heads,
                    kv_heads=shape.kv_heads,
                    head_dim=shape.head_dim,
                    scale=shape.head_dim**-0.5,
                    window=window,
                    qkv_bias=bias,
                    out_bias=bias,
                    norm_eps=shape.eps,
                )
                for window in windows(fields, shape.layers)
            ],
            rope=RopeConfig.read(fields, theta=10000.0 if moe else 1e6, context_length=shape.context_length),
            activation=activation(fields, "hidden_act", default="silu"),
            sparse=SparseConfig.read(fields, shape.layers, normalise=False) if moe else None,
        )
        fields.finish(shape.architecture)
        return config


class Layer(PreNormBlock):
    """Attention, and SwiGLU or a mixture of such experts."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        attention = GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention[index], rope)
        mlp = load_feed_forward(checkpoint, f"{prefix}.mlp", dtype, config, index)
        return cls.around(checkpoint, prefix, dtype, attention, mlp, eps=config.shape.eps, width=config.shape.hidden)


def load_feed_forward(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int) -> FeedForward:
    """The dense network or the experts of one layer."""
    hidden, sparse = config.shape.hidden, config.sparse
    if sparse is None or index not in sparse.layers:
        return GatedMLP.load(
            checkpoint,
            prefix,
            dtype,
            hidden=hidden,
            intermediate=config.shape.intermediate,
            activation=config.activation,
            bias=False,
        )
    gate = Linear.load(checkpoint, f"{prefix}.gate", dtype, bias=False, shape=(sparse.experts, hidden))
    experts = Experts.load(
        checkpoint,
        prefix,
        dtype,
        experts=sparse.experts,
        hidden=hidden,
        intermediate=sparse.intermediate,
        activation=config.activation,
    )
    return SparseMLP(Router(gate, sparse.top_k, sparse.normalise), experts)


class Model(Decoder):
    """The whole network."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        rope = Rope(config.rope, config.shape.head_dim)
        return cls.assemble(
            checkpoint,
            dtype,
            config.shape,
            config.shape.facts(dtype, config.attention, config.rope),
            lambda prefix, index: Layer.load(checkpoint, prefix, dtype, config, index, rope),
        )

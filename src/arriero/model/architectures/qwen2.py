"""Qwen 2 and 2.5: Llama's layers with biases on q, k and v, and windows on the layers where a configuration asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.block import PreNormBlock
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder
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

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        shape = DecoderShape.read(fields, check_config(values), context_length=32768)
        fields.get("attention_bias")  # q, k and v have biases whatever it says
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
                    qkv_bias=True,
                    out_bias=False,
                )
                for window in windows(fields, shape.layers)
            ],
            rope=RopeConfig.read(fields, theta=10000.0, context_length=shape.context_length),
            activation=activation(fields, "hidden_act", default="silu"),
        )
        fields.finish(shape.architecture)
        return config


class Layer(PreNormBlock):
    """Attention with biases, and SwiGLU."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        attention = GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention[index], rope)
        mlp = GatedMLP.load(
            checkpoint,
            f"{prefix}.mlp",
            dtype,
            hidden=config.shape.hidden,
            intermediate=config.shape.intermediate,
            activation=config.activation,
            bias=False,
        )
        return cls.around(checkpoint, prefix, dtype, attention, mlp, eps=config.shape.eps, width=config.shape.hidden)


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

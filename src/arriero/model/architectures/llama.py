"""Llama and Mistral: pre-norm layers of grouped-query attention and SwiGLU.

Honours explicit head sizes, biases, every rope scaling of `layers/rope.py` and Mistral's sliding window (a GGUF file
calls Mistral `llama` too, so a window counts under both names).
"""

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
from arriero.model.layers.shape import DecoderShape


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: AttentionConfig
    rope: RopeConfig
    activation: Activation
    mlp_bias: bool | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        architecture = check_config(values)
        mistral = architecture == "MistralForCausalLM"
        shape = DecoderShape.read(fields, architecture, context_length=131072 if mistral else 2048)
        bias = True if fields.flag("attention_bias", False) else None
        config = cls(
            shape=shape,
            attention=AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                window=fields.optional_integer("sliding_window", 4096 if mistral else None),
                qkv_bias=bias,
                out_bias=bias,
            ),
            rope=RopeConfig.read(fields, theta=10000.0, context_length=shape.context_length),
            activation=activation(fields, "hidden_act", default="silu"),
            mlp_bias=True if fields.flag("mlp_bias", False) else None,
        )
        fields.finish(shape.architecture)
        return config


class Layer(PreNormBlock):
    """Attention and SwiGLU."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        attention = GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention, rope)
        mlp = GatedMLP.load(
            checkpoint,
            f"{prefix}.mlp",
            dtype,
            hidden=config.shape.hidden,
            intermediate=config.shape.intermediate,
            activation=config.activation,
            bias=config.mlp_bias,
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
            config.shape.facts(dtype, [config.attention] * config.shape.layers, config.rope),
            lambda prefix, _: Layer.load(checkpoint, prefix, dtype, config, rope),
        )

"""Granite 3, dense: Llama's layers with a factor on token rows, branches, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: AttentionConfig
    rope: RopeConfig
    activation: Activation
    mlp_bias: bool
    embedding_factor: float
    branch_factor: float
    logit_divisor: float

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        shape = DecoderShape.read(fields, check_config(values))
        bias = fields.flag("attention_bias", False)
        config = cls(
            shape=shape,
            attention=AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=fields.number("attention_multiplier", 1.0),
                qkv_bias=bias,
                out_bias=bias,
            ),
            rope=RopeConfig.read(fields, theta=10000.0, context_length=shape.context_length),
            activation=activation(fields, "hidden_act", default="silu"),
            mlp_bias=fields.flag("mlp_bias", False),
            embedding_factor=fields.number("embedding_multiplier", 1.0),
            branch_factor=fields.number("residual_multiplier", 1.0),
            logit_divisor=fields.number("logits_scaling", 1.0),
        )
        fields.finish(shape.architecture)
        return config


class Layer:
    """`x += factor · attention(norm(x)); x += factor · mlp(norm(x))`."""

    def __init__(
        self, attention: GroupedAttention, mlp: GatedMLP, before: RMSNorm, between: RMSNorm, factor: float
    ) -> None:
        attention.surround(before)
        self.attention = attention
        self.mlp = mlp
        self.between = between
        self.factor = factor

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        shape = config.shape
        before, between = (
            RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=shape.eps, width=shape.hidden)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        mlp = GatedMLP.load(
            checkpoint,
            f"{prefix}.mlp",
            dtype,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            activation=config.activation,
            bias=config.mlp_bias,
        )
        attention = GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention, rope)
        return cls(attention, mlp, before, between, config.branch_factor)

    def new_cache(self) -> Cache:
        return self.attention.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        x, normed = self.between.of_sum(x, self.factor * self.attention(x, batch, slot))
        return x + self.factor * self.mlp(normed)


class Model(Decoder):
    """The whole network."""

    logit_divisor = 1.0

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        rope = Rope(config.rope, shape.head_dim)
        model = cls.assemble(
            checkpoint,
            dtype,
            shape,
            shape.facts(dtype, [config.attention] * shape.layers, config.rope),
            lambda prefix, _: Layer.load(checkpoint, prefix, dtype, config, rope),
            embedding_scale=config.embedding_factor,
        )
        model.logit_divisor = config.logit_divisor
        return model

    def logits(self, hidden: mx.array) -> mx.array:
        """`[n, hidden]` to `[n, vocab]`, divided by the configuration's `logits_scaling`."""
        return super().logits(hidden) / self.logit_divisor

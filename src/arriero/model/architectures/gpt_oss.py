"""gpt-oss: windows on every other layer, a sink in every head, and nothing but experts between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.architectures.gpt_oss_experts import ExpertsConfig, SparseMLP
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.block import PreNormBlock
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, DecoderShape

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What a configuration without rotary parameters means."""


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: list[AttentionConfig]
    """Of each layer."""
    rope: RopeConfig
    experts: ExpertsConfig

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        given = any(values.get(name) for name in ("rope_parameters", "rope_scaling"))
        fields = Fields(values if given else {**values, "rope_parameters": YARN})
        shape = DecoderShape.read(
            fields, check_config(values), eps=1e-5, context_length=131072, heads=(64, 8), head_dim=64
        )
        types = fields.strings("layer_types", shape.layers, LAYER_TYPES)
        types = types or [LAYER_TYPES[(index + 1) % 2] for index in range(shape.layers)]
        window = fields.integer("sliding_window", 128)
        if fields.get("hidden_act", "silu") != "silu":
            raise fields.wrong("hidden_act", "silu", fields.get("hidden_act"))
        bias = fields.flag("attention_bias", True)
        config = cls(
            shape=shape,
            attention=[
                AttentionConfig(
                    hidden=shape.hidden,
                    heads=shape.heads,
                    kv_heads=shape.kv_heads,
                    head_dim=shape.head_dim,
                    scale=shape.head_dim**-0.5,
                    window=window if kind == "sliding_attention" else None,
                    qkv_bias=bias,
                    out_bias=bias,
                )
                for kind in types
            ],
            rope=RopeConfig.read(fields, theta=150000.0, context_length=shape.context_length),
            experts=ExpertsConfig.read(fields, hidden=shape.hidden, intermediate=shape.intermediate),
        )
        fields.finish(shape.architecture)
        return config


class SinkAttention(GroupedAttention):
    """Grouped-query attention whose every head may look at nothing: one more logit in its softmax."""

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: AttentionConfig, rope: Rope | None
    ) -> Self:
        """`q_proj`, `k_proj`, `v_proj` (or `qkv_proj`, their rows one after the other), `o_proj` and `sinks` under
        `prefix`.
        """
        c = config
        sizes = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]

        def project(name: str, rows: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=c.qkv_bias, shape=(rows, c.hidden))

        if f"{prefix}.qkv_proj.weight" in checkpoint:
            whole = project("qkv_proj", sum(sizes))
            ends = [sum(sizes[: i + 1]) for i in range(3)]
            rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            parts = [Linear(whole.weight.rows(r), None if whole.bias is None else whole.bias[r]) for r in rows]
        else:
            parts = [project(f"{name}_proj", size) for name, size in zip("qkv", sizes, strict=True)]

        sinks = checkpoint.tensor(f"{prefix}.sinks")
        expect_shape(f"{prefix}.sinks", tuple(sinks.shape), (c.heads,))
        query, key, value = parts
        return cls(
            config,
            rope,
            dtype,
            query=query,
            key=key,
            value=value,
            out=Linear.load(
                checkpoint, f"{prefix}.o_proj", dtype, bias=c.out_bias, shape=(c.hidden, c.heads * c.head_dim)
            ),
            sinks=sinks.astype(dtype),
        )


class Layer(PreNormBlock):
    """Attention with sinks, and a mixture of experts."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        shape = config.shape
        attention = SinkAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention[index], rope)
        mlp = SparseMLP.load(checkpoint, f"{prefix}.mlp", dtype, config.experts)
        return cls.around(checkpoint, prefix, dtype, attention, mlp, eps=shape.eps, width=shape.hidden)


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

"""Gemma 2 and Gemma 3: norms on both sides of each part, windows on most layers, GeGLU.

Norm weights are stored around 0 (the gain is `1 + w`), token rows are scaled by √hidden, and the softmax scale has a
field of its own. Gemma 2 caps scores and logits; Gemma 3 has norms on query and key heads and a second rope base for
windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.config import Fields, text_fields
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, DecoderShape, LayerType
from arriero.model.layers.stack import Halves
from arriero.model.vision.gemma3 import load_tower

# Published Gemma 3 files leave out what equals the library's defaults for their size.
HEADS_BY_LAYERS = {34: (8, 4), 48: (16, 8), 62: (32, 16)}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json or its `text_config`."""

    shape: DecoderShape
    layer_types: list[str]
    attention: dict[LayerType, AttentionConfig]
    ropes: dict[LayerType, RopeConfig]
    activation: Activation
    logit_cap: float | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        fields = text_fields(values)
        second = architecture == "Gemma2ForCausalLM"
        shape = DecoderShape.read(
            fields,
            architecture,
            context_length=8192 if second else 131072,
            tied=True,
            heads=None if second else HEADS_BY_LAYERS.get(fields.integer("num_hidden_layers"), (8, 4)),
            head_dim=256,
            vocab=256000 if second else 262208,
        )
        pattern = fields.integer("sliding_window_pattern", 2 if second else 6)
        types = fields.strings("layer_types", shape.layers, LAYER_TYPES)
        bias = fields.flag("attention_bias", False)
        window = fields.integer("sliding_window", 4096)
        cap = fields.optional_number("attn_logit_softcapping", 50.0 if second else None)
        scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5

        def attention(window: int | None) -> AttentionConfig:
            return AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=scale,
                window=window,
                softcap=cap,
                qkv_bias=bias,
                out_bias=bias,
                norm_eps=None if second else shape.eps,
                centred_norms=True,
                mutual=not second,
            )

        config = cls(
            shape=shape,
            layer_types=types or [LAYER_TYPES[(i + 1) % pattern != 0] for i in range(shape.layers)],
            attention={"full_attention": attention(None), "sliding_attention": attention(window)},
            ropes=read_ropes(fields, shape.context_length, second=second),
            activation=activation(fields, "hidden_activation", default="gelu_tanh"),
            logit_cap=fields.optional_number("final_logit_softcapping", 30.0 if second else None),
        )
        fields.finish(architecture)
        return config


def read_ropes(fields: Fields, context_length: int, *, second: bool) -> dict[LayerType, RopeConfig]:
    """The rotary embedding of each type of layer; Gemma 2 has one for all."""
    full = RopeConfig.read(
        fields, theta=10000.0 if second else 1e6, context_length=context_length, layer_type="full_attention"
    )
    if second:
        return {"full_attention": full, "sliding_attention": full}
    local = fields.number("rope_local_base_freq", 10000.0)
    nested = (fields.section("rope_parameters") or {}).get("sliding_attention") or {}
    sliding = RopeConfig.of(
        nested, where="rope_parameters.sliding_attention", theta=local, partial=1.0, context_length=context_length
    )
    return {"full_attention": full, "sliding_attention": sliding}


class Layer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`."""

    def __init__(self, attention: GroupedAttention, mlp: GatedMLP, norms: list[RMSNorm]) -> None:
        self.attention = attention
        before, after, before_mlp, after_mlp = norms
        attention.surround(before, after)
        self.mlp = mlp.part(before_mlp, after_mlp)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, kind: LayerType, rope: Rope
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        names = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        shape = config.shape
        return cls(
            GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention[kind], rope),
            GatedMLP.load(
                checkpoint,
                f"{prefix}.mlp",
                dtype,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                activation=config.activation,
                bias=False,
            ),
            [
                RMSNorm.load(checkpoint, f"{prefix}.{n}", dtype, eps=shape.eps, width=shape.hidden, centred=True)
                for n in names
            ],
        )

    @property
    def halves(self) -> Halves:
        """Attention and the gated network, with the norms around them."""
        return self.attention, self.mlp

    def new_cache(self) -> Cache:
        return self.attention.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        return self.mlp(x, self.attention(x, batch, slot))


class Model(Decoder):
    """The whole network, with the tower for images where there is one."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        kinds: list[LayerType] = [t for name in config.layer_types for t in LAYER_TYPES if t == name]
        ropes = {kind: Rope(rope, shape.head_dim) for kind, rope in config.ropes.items()}
        vision = load_tower(checkpoint, dtype, hidden=shape.hidden)
        model = cls.assemble(
            checkpoint,
            dtype,
            shape,
            shape.facts(dtype, [config.attention[kind] for kind in kinds], config.ropes["full_attention"]),
            lambda prefix, i: Layer.load(checkpoint, prefix, dtype, config, kinds[i], ropes[kinds[i]]),
            centred_norm=True,
            embedding_scale=shape.hidden**0.5,
            logit_cap=config.logit_cap,
        )
        model.vision = vision
        return model

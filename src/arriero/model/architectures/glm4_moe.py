"""GLM-4 MoE: grouped queries with partial rotation, experts chosen by corrected sigmoid scores, shared experts."""

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
from arriero.model.layers.corrected_router import CorrectedRouter, CorrectedRouterConfig
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.left_out import draft_layers
from arriero.model.layers.mlp import activation
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape
from arriero.model.layers.summed_experts import SummedConfig, load_feed_forward


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: AttentionConfig
    rope: RopeConfig
    feed_forward: SummedConfig
    routing: CorrectedRouterConfig
    drafts: int
    """Layers behind the last that predict several tokens."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        shape = DecoderShape.read(fields, check_config(values), eps=1e-5, context_length=131072)
        for name, known in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
            if fields.get(name, known) != known:
                raise fields.wrong(name, known, fields.get(name))
        routing = CorrectedRouterConfig.read(fields)
        config = cls(
            shape=shape,
            attention=AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                qkv_bias=fields.flag("attention_bias", False),
                out_bias=False,
                norm_eps=shape.eps if fields.flag("use_qk_norm", False) else None,
            ),
            rope=RopeConfig.read(fields, theta=10000.0, context_length=shape.context_length, partial=0.5),
            feed_forward=SummedConfig.read(
                fields,
                hidden=shape.hidden,
                layers=shape.layers,
                dense=shape.intermediate,
                experts=routing.experts,
                activation=activation(fields, "hidden_act", default="silu"),
                first=1,
                shared=1,
            ),
            routing=routing,
            drafts=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        )
        fields.finish(shape.architecture)
        return config


class Layer(PreNormBlock):
    """Attention, and SwiGLU or a mixture of such experts."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        attention = GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention, rope)
        mlp = load_feed_forward(
            checkpoint,
            f"{prefix}.mlp",
            dtype,
            config.feed_forward,
            index,
            lambda name: CorrectedRouter.load(checkpoint, name, config.routing, hidden=config.shape.hidden),
        )
        return cls.around(checkpoint, prefix, dtype, attention, mlp, eps=config.shape.eps, width=config.shape.hidden)


class Model(Decoder):
    """The whole network; the layers that predict several tokens are left out."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        rope = Rope(config.rope, shape.head_dim)
        return cls.assemble(
            checkpoint,
            dtype,
            shape,
            shape.facts(dtype, [config.attention] * shape.layers, config.rope),
            lambda prefix, index: Layer.load(checkpoint, prefix, dtype, config, index, rope),
            left_out=draft_layers(checkpoint, shape.architecture, shape.layers, config.drafts),
        )

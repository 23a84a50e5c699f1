"""DeepSeek V2 and V3 and GLM-4 MoE lite: latent attention, experts chosen within groups, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.kernels.cuda.router import Choice
from arriero.kernels.topk import top_k
from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.block import PreNormBlock
from arriero.model.layers.config import Fields
from arriero.model.layers.corrected_router import CorrectedRouter, CorrectedRouterConfig
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.left_out import draft_layers
from arriero.model.layers.linear import Linear
from arriero.model.layers.mla import LatentAttention, LatentConfig
from arriero.model.layers.mlp import activation
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape
from arriero.model.layers.summed_experts import ChooseExperts, SummedConfig, load_feed_forward

V2, V3, LITE = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a configuration means that leaves a field out."""

    eps: float
    context_length: int
    first: int
    """Dense layers in front."""
    shared: int
    scale: float
    groups: tuple[int, int]


DEFAULTS = {
    V2: Defaults(eps=1e-6, context_length=2048, first=0, shared=2, scale=1.0, groups=(1, 1)),
    V3: Defaults(eps=1e-6, context_length=4096, first=3, shared=1, scale=2.5, groups=(8, 4)),
    LITE: Defaults(eps=1e-5, context_length=202752, first=1, shared=1, scale=1.8, groups=(1, 1)),
}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: LatentConfig
    rope: RopeConfig
    interleaved: bool
    """Whether rotary pairs are neighbours."""
    feed_forward: SummedConfig
    routing: CorrectedRouterConfig
    softmax: bool
    """Whether experts are scored by softmax, without a correction."""
    drafts: int
    """Layers behind the last that predict several tokens."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        architecture = check_config(values)
        default = DEFAULTS[architecture]
        rotated = fields.integer("qk_rope_head_dim")
        shape = DecoderShape.read(
            fields, architecture, eps=default.eps, context_length=default.context_length, head_dim=rotated
        )
        rope = RopeConfig.read(fields, theta=10000.0, context_length=shape.context_length)
        routing = read_routing(fields, default, softmax=architecture == V2)
        config = cls(
            shape=shape,
            attention=LatentConfig.read(fields, rope, hidden=shape.hidden, heads=shape.heads),
            rope=rope,
            interleaved=architecture == V2 or fields.flag("rope_interleave", True),
            feed_forward=SummedConfig.read(
                fields,
                hidden=shape.hidden,
                layers=shape.layers,
                dense=shape.intermediate,
                experts=routing.experts,
                activation=activation(fields, "hidden_act", default="silu"),
                first=default.first,
                shared=default.shared,
            ),
            routing=routing,
            softmax=architecture == V2,
            drafts=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        )
        fields.finish(architecture)
        return config


def read_routing(fields: Fields, default: Defaults, *, softmax: bool) -> CorrectedRouterConfig:
    """How experts are chosen; a method other than the family's own is a CheckpointError."""
    scoring, methods = ("softmax", ["greedy", "group_limited_greedy"]) if softmax else ("sigmoid", ["noaux_tc"])
    if fields.get("scoring_func", scoring) != scoring:
        raise fields.wrong("scoring_func", scoring, fields.get("scoring_func"))
    method = fields.get("topk_method", methods[0])
    if method not in methods:
        raise fields.wrong("topk_method", " or ".join(methods), method)
    if softmax and fields.flag("norm_topk_prob", False):
        raise fields.wrong("norm_topk_prob", "false (with softmax, weights keep their sum)", True)
    if method == "greedy":
        fields = Fields({**fields.values, "n_group": 1, "topk_group": 1}, fields.where)
    return CorrectedRouterConfig.read(fields, normalise=not softmax, scale=default.scale, groups=default.groups)


class SoftmaxRouter:
    """`top_k` experts by softmax, in float32; with groups, out of the groups with the best single experts.

    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """

    def __init__(self, config: CorrectedRouterConfig, gate: Linear) -> None:
        self.config = config
        self.gate = gate

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: CorrectedRouterConfig, *, hidden: int) -> Self:
        """`weight` `[experts, hidden]` under `prefix`."""
        return cls(config, Linear.load(checkpoint, prefix, mx.float32, bias=False, shape=(config.experts, hidden)))

    @property
    def choice(self) -> Choice | None:
        """As the CUDA kernels take it; None for what they don't."""
        c = self.config
        return Choice(c.top_k, False, c.scale) if c.top_groups == c.groups else None

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        c = self.config
        scores = mx.softmax(self.gate(x.astype(mx.float32)), axis=-1, precise=True)
        choice = scores
        if c.top_groups < c.groups:
            grouped = scores.reshape(-1, c.groups, c.experts // c.groups)
            kept = top_k(grouped.max(axis=-1), c.top_groups)
            taking_part = (kept[..., None] == mx.arange(c.groups, dtype=mx.int32)).any(axis=1)
            choice = mx.where(taking_part[..., None], grouped, -mx.inf).reshape(scores.shape)
        chosen = top_k(choice, c.top_k).astype(mx.uint32)
        return chosen, mx.take_along_axis(scores, chosen, axis=-1) * c.scale


class Layer(PreNormBlock):
    """Latent attention, and SwiGLU or a mixture of such experts."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        hidden, routing = config.shape.hidden, config.routing

        def router(name: str) -> ChooseExperts:
            kind = SoftmaxRouter if config.softmax else CorrectedRouter
            return kind.load(checkpoint, name, routing, hidden=hidden)

        attention = LatentAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention, rope)
        mlp = load_feed_forward(checkpoint, f"{prefix}.mlp", dtype, config.feed_forward, index, router)
        return cls.around(checkpoint, prefix, dtype, attention, mlp, eps=config.shape.eps, width=hidden)


class Model(Decoder):
    """The whole network; the layers that predict several tokens are left out."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        rope = Rope(config.rope, config.attention.rotated, interleaved=config.interleaved)
        return cls.assemble(
            checkpoint,
            dtype,
            shape,
            shape.facts(dtype, [config.attention] * shape.layers, config.rope),
            lambda prefix, index: Layer.load(checkpoint, prefix, dtype, config, index, rope),
            left_out=draft_layers(checkpoint, shape.architecture, shape.layers, config.drafts),
        )

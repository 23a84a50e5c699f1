"""Cohere 2 and its mixture of experts (Command A, Command A+, North): attention and feed-forward part side by side.

One norm feeds both parts of a layer and both are added to its input. Windowed layers rotate in interleaved pairs; full
ones have no positions, but for the dense layers in front of a mixture. Norms subtract the mean and have no bias.
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
from arriero.model.layers.block import FeedForward
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder, Norm
from arriero.model.layers.experts import Experts, best_experts
from arriero.model.layers.left_out import draft_layers
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.norm import LayerNorm, RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, DecoderShape

# What older configurations say about all models of the family, and nothing else runs here.
EXPECTED: dict[str, Any] = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "layer_norm_bias": False,
}
SCORES = ("softmax", "sigmoid")
COMBINATIONS = ("average", "sum")


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts of one layer."""

    experts: int
    top_k: int
    intermediate: int
    shared: int
    """Width of the expert that every token takes; 0 where there is none."""
    averaged: bool
    """Whether the shared expert and the others are averaged, not summed."""
    score: str
    normalise: bool

    @classmethod
    def read(cls, fields: Fields, intermediate: int) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        experts, top_k = fields.integer("num_experts", 8), fields.integer("num_experts_per_tok", 2)
        if top_k > experts:
            raise fields.wrong("num_experts_per_tok", f"at most the number of experts ({experts})", top_k)
        score = fields.get("expert_selection_fn", "softmax")
        if score not in SCORES:
            raise fields.wrong("expert_selection_fn", " or ".join(SCORES), score)
        combination = fields.get("shared_expert_combination_strategy", "average")
        if combination not in COMBINATIONS:
            raise fields.wrong("shared_expert_combination_strategy", " or ".join(COMBINATIONS), combination)
        return cls(
            experts=experts,
            top_k=top_k,
            intermediate=intermediate,
            shared=intermediate * fields.integer("num_shared_experts", 0, minimum=0),
            averaged=combination == "average",
            score=score,
            normalise=fields.flag("norm_topk_prob", True),
        )


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    attention: list[AttentionConfig]
    """Of each layer."""
    rotated: list[bool]
    """Whether each layer has positions."""
    rope: RopeConfig
    activation: Activation
    means: bool
    """Whether norms subtract the mean."""
    logit_scale: float
    dense: list[int]
    """Width of each layer's feed-forward part; 0 for a mixture of experts."""
    experts: ExpertsConfig | None
    drafts: int
    """Layers behind the last that predict several tokens."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        architecture = check_config(values)
        moe = architecture == "Cohere2MoeForCausalLM"
        for name, expected in EXPECTED.items():
            if fields.get(name, expected) != expected:
                raise fields.wrong(name, repr(expected), fields.get(name))
        means = not (moe and fields.has("rms_norm_eps"))
        eps = fields.number("layer_norm_eps", 1e-5) if means else fields.number("rms_norm_eps")
        inner = Fields({**values, "rms_norm_eps": eps})
        shape = DecoderShape.read(inner, architecture, context_length=8192, tied=True, head_dim=128 if moe else None)
        first_dense = fields.integer("first_k_dense_replace", 0, minimum=0) if moe else 0
        prefix = fields.integer("prefix_dense_sliding_window_pattern", 1) if moe else 1
        sparse = read_sparse(fields, shape.layers, first_dense) if moe else [False] * shape.layers
        types = read_layer_types(fields, shape.layers, first_dense, prefix)
        window = fields.optional_integer("sliding_window", 4096)
        bias = fields.flag("attention_bias", False)
        front = fields.integer("prefix_dense_intermediate_size", shape.intermediate) if moe else shape.intermediate
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
            rotated=[
                (kind == "sliding_attention" and window is not None) or (moe and not experts and prefix == 1)
                for kind, experts in zip(types, sparse, strict=True)
            ],
            rope=RopeConfig.read(fields, theta=10000.0, context_length=shape.context_length),
            activation=activation(fields, "hidden_act", default="silu"),
            means=means,
            logit_scale=fields.number("logit_scale", 0.0625),
            dense=[0 if experts else front for experts in sparse],
            experts=ExpertsConfig.read(fields, shape.intermediate) if moe else None,
            drafts=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        )
        fields.finish(architecture)
        return config


def read_layer_types(fields: Fields, layers: int, first_dense: int, prefix: int) -> list[str]:
    """What each layer attends to: by `layer_types`, else each `sliding_window_pattern`-th is full.

    The dense layers in front of a mixture have a pattern of their own, and the others are counted from behind them.
    """
    pattern = fields.integer("sliding_window_pattern", 4)
    types = fields.strings("layer_types", layers, LAYER_TYPES)
    if types is not None:
        return types
    front = min(first_dense, layers)
    numbers = [(i + 1) % prefix for i in range(front)] + [(i + 1) % pattern for i in range(layers - front)]
    return [LAYER_TYPES[number != 0] for number in numbers]


def read_sparse(fields: Fields, layers: int, first_dense: int) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`, else all but the first `first_dense`."""
    types = fields.strings("mlp_layer_types", layers, ("dense", "sparse"))
    return [kind == "sparse" for kind in types] if types else [index >= first_dense for index in range(layers)]


def load_norm(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config) -> Norm:
    """A norm of the kind that the configuration has."""
    kind = LayerNorm if config.means else RMSNorm
    return kind.load(checkpoint, prefix, dtype, eps=config.shape.eps, width=config.shape.hidden)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the `top_k` experts of the highest logits and weighs them by those logits alone."""

    gate: Linear
    config: ExpertsConfig

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        logits = self.gate(x).astype(mx.float32)
        chosen = best_experts(logits, self.config.top_k)
        found = mx.take_along_axis(logits, chosen, axis=-1)
        if self.config.score == "softmax":
            return chosen, mx.softmax(found, axis=-1, precise=True)
        weights = mx.sigmoid(found)
        if self.config.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights


class SparseMLP:
    """A mixture of experts, and perhaps one beside it that every token takes."""

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP | None) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, hidden: int, config: ExpertsConfig, how: Activation
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.1.mlp`."""
        shape = (config.experts, hidden)
        shared = None
        if config.shared:
            shared = GatedMLP.load(
                checkpoint,
                f"{prefix}.shared_experts",
                dtype,
                hidden=hidden,
                intermediate=config.shared,
                activation=how,
                bias=False,
            )
        return cls(
            Router(Linear.load(checkpoint, f"{prefix}.gate", dtype, bias=False, shape=shape), config),
            Experts.load(
                checkpoint,
                prefix,
                dtype,
                experts=config.experts,
                hidden=hidden,
                intermediate=config.intermediate,
                activation=how,
            ),
            shared,
        )

    def __call__(self, x: mx.array) -> mx.array:
        y = self.experts(x, *self.router(x))
        if self.shared is None:
            return y
        y = y + self.shared(x)
        return y * 0.5 if self.router.config.averaged else y


class Layer:
    """`n = norm(x); x + attention(n) + feed_forward(n)`."""

    def __init__(self, attention: GroupedAttention, feed_forward: FeedForward, norm: Norm) -> None:
        self.attention = attention
        self.feed_forward = feed_forward
        self.norm = norm

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        shape = config.shape
        mlp: FeedForward
        if config.experts is not None and not config.dense[index]:
            mlp = SparseMLP.load(checkpoint, f"{prefix}.mlp", dtype, shape.hidden, config.experts, config.activation)
        else:
            mlp = GatedMLP.load(
                checkpoint,
                f"{prefix}.mlp",
                dtype,
                hidden=shape.hidden,
                intermediate=config.dense[index],
                activation=config.activation,
                bias=False,
            )
        attention = GroupedAttention.load(
            checkpoint,
            f"{prefix}.self_attn",
            dtype,
            config.attention[index],
            rope if config.rotated[index] else None,
        )
        return cls(attention, mlp, load_norm(checkpoint, f"{prefix}.input_layernorm", dtype, config))

    def new_cache(self) -> Cache:
        return self.attention.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        normed = self.norm(x)
        return x + self.attention(normed, batch, slot) + self.feed_forward(normed)


class Model(Decoder):
    """The whole network."""

    logit_scale = 1.0

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        rope = Rope(config.rope, config.shape.head_dim, interleaved=True)
        model = cls.assemble(
            checkpoint,
            dtype,
            config.shape,
            config.shape.facts(dtype, config.attention, config.rope),
            lambda prefix, index: Layer.load(checkpoint, prefix, dtype, config, index, rope),
            load_norm=lambda prefix: load_norm(checkpoint, prefix, dtype, config),
            left_out=draft_layers(checkpoint, config.shape.architecture, config.shape.layers, config.drafts),
        )
        model.logit_scale = config.logit_scale
        return model

    def logits(self, hidden: mx.array) -> mx.array:
        """`[n, hidden]` to `[n, vocab]`, multiplied by the configuration's scale."""
        return super().logits(hidden) * self.logit_scale

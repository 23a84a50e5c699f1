"""Laguna: windowed and full attention with a number of heads per layer, a softplus gate on its output, and experts
chosen by sigmoid beside one that every token takes.

Full layers rotate a part of each head, usually by YaRN; windowed ones have a rotary embedding of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.device import fused
from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.attention import AttentionConfig, attend
from arriero.model.layers.block import FeedForward, PreNormBlock
from arriero.model.layers.config import Fields
from arriero.model.layers.corrected_router import CorrectedRouter, CorrectedRouterConfig
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.experts import Experts
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.mlp import GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, DecoderShape, LayerType
from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache

GATINGS: tuple[Any, ...] = (True, "per-head", "per-element")
MLP_TYPES = ("dense", "sparse")
ROPES: dict[LayerType, dict[str, float]] = {
    "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0},
}
"""Of each type of layer where the configuration says nothing."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts of one layer."""

    router: CorrectedRouterConfig
    intermediate: int
    shared_intermediate: int

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        experts, top_k = fields.integer("num_experts", 256), fields.integer("num_experts_per_tok", 8)
        if top_k > experts:
            raise fields.wrong("num_experts_per_tok", f"at most the number of experts ({experts})", top_k)
        if fields.get("moe_router_score_func", "sigmoid") != "sigmoid":
            raise fields.wrong("moe_router_score_func", "sigmoid", fields.get("moe_router_score_func"))
        if fields.flag("moe_apply_router_weight_on_input", False):
            raise fields.wrong("moe_apply_router_weight_on_input", "false", True)
        if not fields.flag("norm_topk_prob", True):
            raise fields.wrong("norm_topk_prob", "true", False)
        # 0 means no cap.
        cap = fields.number("moe_router_logit_softcapping") if fields.get("moe_router_logit_softcapping") else None
        return cls(
            CorrectedRouterConfig(
                experts=experts,
                top_k=top_k,
                groups=1,
                top_groups=1,
                normalise=True,
                scale=fields.number("moe_routed_scaling_factor", 1.0),
                cap=cap,
            ),
            intermediate=fields.integer("moe_intermediate_size", 512),
            shared_intermediate=fields.integer("shared_expert_intermediate_size", 512),
        )


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    layer_types: list[LayerType]
    attention: list[AttentionConfig]
    """Of each layer."""
    gating: list[bool | str]
    """Of each layer."""
    ropes: dict[LayerType, RopeConfig]
    sparse: list[bool]
    """Whether each layer has experts."""
    experts: ExpertsConfig

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        shape = DecoderShape.read(fields, check_config(values), context_length=131072, head_dim=128)
        if activation(fields, "hidden_act", default="silu") != "silu":
            raise fields.wrong("hidden_act", "silu", fields.get("hidden_act"))
        if fields.flag("swa_attention_sink_enabled", False):
            raise fields.wrong("swa_attention_sink_enabled", "false", True)
        out_bias = fields.flag("attention_bias", False)
        qkv_bias = fields.flag("qkv_bias", out_bias)
        names = fields.strings("layer_types", shape.layers, LAYER_TYPES) or ["full_attention"] * shape.layers
        types = [kind for name in names for kind in LAYER_TYPES if kind == name]
        window = fields.integer("sliding_window", 512, minimum=0)
        if "sliding_attention" in types and not window:
            raise fields.wrong("sliding_window", "at least 1, since some layers have windows", window)
        config = cls(
            shape=shape,
            layer_types=types,
            attention=[
                AttentionConfig(
                    hidden=shape.hidden,
                    heads=heads,
                    kv_heads=shape.kv_heads,
                    head_dim=shape.head_dim,
                    scale=shape.head_dim**-0.5,
                    window=window if kind == "sliding_attention" else None,
                    qkv_bias=qkv_bias,
                    out_bias=out_bias,
                    norm_eps=shape.eps,
                )
                for heads, kind in zip(read_heads(fields, shape), types, strict=True)
            ],
            gating=read_gating(fields, shape.layers),
            ropes={kind: read_rope(fields, kind, shape.context_length) for kind in LAYER_TYPES if kind in types},
            sparse=read_sparse(fields, shape.layers),
            experts=ExpertsConfig.read(fields),
        )
        fields.finish(shape.architecture)
        return config


def read_gating(fields: Fields, layers: int) -> list[bool | str]:
    """What each layer's gate multiplies: by `gating_types`, else `gating` of all."""
    gating = fields.get("gating", True)
    if gating not in GATINGS:
        raise fields.wrong("gating", "true, 'per-head' or 'per-element'", gating)
    types = fields.strings("gating_types", layers, ("per-head", "per_head", "per-element", "per_element"))
    return [kind.replace("_", "-") for kind in types] if types else [gating] * layers


def read_heads(fields: Fields, shape: DecoderShape) -> list[int]:
    """The query heads of each layer."""
    given = fields.get("num_attention_heads_per_layer", [shape.heads] * shape.layers)
    whole = isinstance(given, list) and all(type(heads) is int and heads > 0 for heads in given)
    if not whole or len(given) != shape.layers or any(heads % shape.kv_heads for heads in given):
        expected = f"{shape.layers} multiples of num_key_value_heads ({shape.kv_heads})"
        raise fields.wrong("num_attention_heads_per_layer", expected, given)
    heads: list[int] = given
    return heads


def read_sparse(fields: Fields, layers: int) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`, else all but those of `mlp_only_layers` (the first)."""
    dense = fields.get("mlp_only_layers", [0])
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers", dense)
    types = fields.strings("mlp_layer_types", layers, MLP_TYPES)
    return [kind == "sparse" for kind in types] if types else [index not in dense for index in range(layers)]


def read_rope(fields: Fields, kind: LayerType, context_length: int) -> RopeConfig:
    """The rotary embedding of one type of layer.

    `rope_parameters` is by type of layer, perhaps with single values beside that older readers take, or one for all;
    `swa_rope_parameters` is another place for that of windowed layers.
    """
    where, given = "rope_parameters", fields.section("rope_parameters") or {}
    windowed = fields.section("swa_rope_parameters")
    if not given and fields.has("rope_theta"):
        raise fields.wrong("rope_parameters", "given where rope_theta is", None)
    own: Any = given
    if not given or any(isinstance(value, dict) for value in given.values()):
        where = f"rope_parameters.{kind}"
        own = given.get(kind)
    if kind == "sliding_attention" and windowed is not None:
        where, own = "swa_rope_parameters", windowed
    if own is None:
        own = {} if given else ROPES[kind]
    if not isinstance(own, dict):
        raise fields.wrong(where, "an object", own)
    partial = fields.number("partial_rotary_factor", 1.0)
    return RopeConfig.of(own, where=where, theta=10000.0, partial=partial, context_length=context_length)


@fused
def softplus_gate(x: mx.array, gate: mx.array) -> mx.array:
    """`x · softplus(gate)`, the gate rounded to x's dtype first, as in training."""
    opened = mx.logaddexp(gate.astype(mx.float32), mx.array(0, mx.float32)).astype(x.dtype)
    return x * opened


class GatedAttention:
    """Attention with norms on query and key heads, its output multiplied by `softplus(g_proj(x))`.

    The gate has one value a head or one a channel, as its rows say.
    """

    def __init__(
        self,
        config: AttentionConfig,
        rope: Rope,
        dtype: mx.Dtype,
        *,
        query: Linear,
        key: Linear,
        value: Linear,
        gate: Linear,
        out: Linear,
        query_norm: RMSNorm,
        key_norm: RMSNorm,
    ) -> None:
        self.config = config
        self.rope = rope
        self.dtype = dtype
        together = FusedLinear([query, key, value, gate])
        # Where the gate is of another format, q, k and v are still one product.
        fits = len(together.parts) == 1
        self.project = together if fits else FusedLinear([query, key, value])
        self.gate = None if fits else gate
        self.gates = gate.weight.shape[0] // config.heads
        self.out = out
        self.query_norm = query_norm
        self.key_norm = key_norm

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: AttentionConfig,
        rope: Rope,
        *,
        eps: float,
        gating: bool | str,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0.self_attn`; CheckpointError names one that does not fit."""
        c = config

        def project(name: str, heads: int) -> Linear:
            shape = (heads * c.head_dim, c.hidden)
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=c.qkv_bias, shape=shape)

        return cls(
            config,
            rope,
            dtype,
            query=project("q_proj", c.heads),
            key=project("k_proj", c.kv_heads),
            value=project("v_proj", c.kv_heads),
            gate=load_gate(checkpoint, f"{prefix}.g_proj", dtype, config, gating),
            out=Linear.load(
                checkpoint, f"{prefix}.o_proj", dtype, bias=c.out_bias, shape=(c.hidden, c.heads * c.head_dim)
            ),
            query_norm=RMSNorm.load(checkpoint, f"{prefix}.q_norm", dtype, eps=eps, width=c.head_dim),
            key_norm=RMSNorm.load(checkpoint, f"{prefix}.k_norm", dtype, eps=eps, width=c.head_dim),
        )

    def new_cache(self) -> KVCache | SlidingCache:
        """Memory of one row: everything, or the window."""
        c = self.config
        if c.window is None:
            return KVCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype)
        return SlidingCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype, c.window)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        c = self.config
        parts = self.project(x)
        gate = parts.pop() if self.gate is None else self.gate(x)
        q, k, v = (part.reshape(x.shape[0], -1, c.head_dim) for part in parts)
        q, k = self.rope.normed(q, self.query_norm.pair, batch), self.rope.normed(k, self.key_norm.pair, batch)
        y = attend(q, k, v, batch, slot, scale=c.scale, window=c.window)
        y = softplus_gate(y, gate.reshape(-1, c.heads, self.gates))
        return self.out(y.reshape(-1, c.heads * c.head_dim))


def load_gate(
    checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: AttentionConfig, gating: bool | str
) -> Linear:
    """The projection that gates attention.

    `gating: true` has meant both kinds in published configurations, so there the tensor's rows decide.
    """
    gate = Linear.load(checkpoint, prefix, dtype, bias=False)
    rows = {"per-head": config.heads, "per-element": config.heads * config.head_dim}
    allowed = list(rows.values()) if gating is True else [rows[str(gating)]]
    if gate.weight.shape not in [(count, config.hidden) for count in allowed]:
        expected = " or ".join(str([count, config.hidden]) for count in allowed)
        raise CheckpointError(
            f"tensor {prefix}.weight has shape {list(gate.weight.shape)}, but the configuration (gating: {gating!r}) "
            f"says {expected}; the checkpoint and its config.json do not belong together"
        )
    return gate


class SparseMLP:
    """A mixture of experts beside one that every token takes."""

    def __init__(self, router: CorrectedRouter, experts: Experts, shared: GatedMLP) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, hidden: int, config: ExpertsConfig) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.1.mlp`; the shared expert is called so in singular or plural."""
        owners = (f"{prefix}.shared_expert", f"{prefix}.shared_experts")
        shared = next((n for n in owners if f"{n}.down_proj.weight" in checkpoint), owners[0])
        return cls(
            load_router(checkpoint, prefix, config.router, hidden),
            Experts.load(
                checkpoint,
                prefix,
                dtype,
                experts=config.router.experts,
                hidden=hidden,
                intermediate=config.intermediate,
            ),
            GatedMLP.load(
                checkpoint, shared, dtype, hidden=hidden, intermediate=config.shared_intermediate, bias=False
            ),
        )

    def __call__(self, x: mx.array) -> mx.array:
        return self.experts(x, *self.router(x)) + self.shared(x)


def load_router(checkpoint: Checkpoint, prefix: str, config: CorrectedRouterConfig, hidden: int) -> CorrectedRouter:
    """The router under `prefix`, wherever the published layouts have its two tensors."""
    gates = [f"{prefix}.gate", f"{prefix}.gate.proj"]
    corrections = [f"{prefix}.{owner}.e_score_correction_bias" for owner in ("experts", "gate")]
    gate = next((name for name in gates if f"{name}.weight" in checkpoint), gates[0])
    name = next((name for name in corrections if name in checkpoint), corrections[0])
    correction = checkpoint.tensor(name).astype(mx.float32)
    expect_shape(name, tuple(correction.shape), (config.experts,))
    linear = Linear.load(checkpoint, gate, mx.float32, bias=False, shape=(config.experts, hidden))
    return CorrectedRouter(config, linear, correction)


class Layer(PreNormBlock):
    """Gated attention, and SwiGLU or a mixture of such experts."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        shape = config.shape
        mlp: FeedForward
        if config.sparse[index]:
            mlp = SparseMLP.load(checkpoint, f"{prefix}.mlp", dtype, shape.hidden, config.experts)
        else:
            mlp = GatedMLP.load(
                checkpoint, f"{prefix}.mlp", dtype, hidden=shape.hidden, intermediate=shape.intermediate, bias=False
            )
        attention = GatedAttention.load(
            checkpoint,
            f"{prefix}.self_attn",
            dtype,
            config.attention[index],
            rope,
            eps=shape.eps,
            gating=config.gating[index],
        )
        return cls.around(checkpoint, prefix, dtype, attention, mlp, eps=shape.eps, width=shape.hidden)


class Model(Decoder):
    """The whole network."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        ropes = {kind: Rope(rope, shape.head_dim) for kind, rope in config.ropes.items()}
        widest = config.ropes.get("full_attention") or config.ropes["sliding_attention"]
        return cls.assemble(
            checkpoint,
            dtype,
            shape,
            shape.facts(dtype, config.attention, widest),
            lambda prefix, index: Layer.load(
                checkpoint, prefix, dtype, config, index, ropes[config.layer_types[index]]
            ),
        )

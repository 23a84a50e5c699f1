"""Qwen 3.5, 3.6 and 3.8, dense and mixture of experts, and Qwen3-Next.

Most layers are gated delta nets, every fourth is attention whose output is gated by its own query projection and which
rotates a part of each head. Norm weights are stored around 0, but for the delta net's own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.block import FeedForward, PreNormBlock
from arriero.model.layers.config import Fields, text_fields
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from arriero.model.layers.experts import Experts, Router, SharedSparseMLP, SparseConfig, SparseMLP
from arriero.model.layers.gated_attention import GatedAttention
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.mlp import GatedMLP, activation
from arriero.model.layers.qwen_files import DRAFTS, VISION, gains_are_baked, image_rope
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape
from arriero.model.vision.qwen import load_tower
from arriero.model.weight import Weight

log = logging.getLogger(__name__)

LayerType = Literal["linear_attention", "full_attention"]
LAYER_TYPES: tuple[LayerType, LayerType] = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json or its `text_config`."""

    shape: DecoderShape
    layer_types: list[LayerType]
    attention: AttentionConfig
    delta_net: DeltaNetConfig
    rope: RopeConfig
    sparse: SparseConfig | None
    shared_intermediate: int
    """Of the expert that every token takes; 0 without a mixture."""
    drafts: int
    """Layers of the head that predicts several tokens."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        fields = text_fields(values)
        experts = fields.integer("num_experts", 0, minimum=0)
        if experts and architecture.startswith("Qwen3_5For"):
            other = architecture.replace("3_5", "3_5Moe")
            raise fields.wrong("num_experts", f"0 (or the architecture {other})", experts)
        moe = experts > 0 or "Moe" in architecture
        mixed = bool(fields.get("mlp_only_layers")) or fields.integer("decoder_sparse_step", 1) > 1
        shape = DecoderShape.read(fields, architecture, context_length=32768, head_dim=256, dense=mixed or not moe)
        sparse = SparseConfig.read(fields, shape.layers, normalise=True) if moe else None
        if activation(fields, "hidden_act", default="silu") != "silu":
            raise fields.wrong("hidden_act", "silu", fields.get("hidden_act"))
        if not fields.flag("attn_output_gate", True):
            raise fields.wrong("attn_output_gate", "true", False)
        bias = fields.flag("attention_bias", False)
        config = cls(
            shape=shape,
            layer_types=read_layer_types(fields, shape.layers),
            attention=AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                qkv_bias=bias,
                out_bias=bias,
            ),
            delta_net=DeltaNetConfig.read(fields, hidden=shape.hidden, eps=shape.eps),
            rope=RopeConfig.read(
                fields,
                theta=10000.0,
                partial=0.25,
                context_length=shape.context_length,
                axes=architecture != "Qwen3NextForCausalLM",
            ),
            sparse=sparse,
            shared_intermediate=0 if sparse is None else fields.integer("shared_expert_intermediate_size"),
            drafts=fields.integer("mtp_num_hidden_layers", 0, minimum=0),
        )
        fields.finish(architecture)
        return config


def read_layer_types(fields: Fields, layers: int) -> list[LayerType]:
    """What each layer is, by `layer_types` or from the interval at which attention comes."""
    given = fields.get("layer_types")
    names = fields.strings("layer_types", layers, LAYER_TYPES)
    interval = fields.integer("full_attention_interval", 4)
    if names is None:
        return [LAYER_TYPES[(index + 1) % interval == 0] for index in range(layers)]
    if len(given) != layers:
        raise fields.wrong("layer_types", f"as long as num_hidden_layers says ({layers})", given)
    return [kind for name in names for kind in LAYER_TYPES if kind == name]


class Layer(PreNormBlock):
    """A delta net or attention, and SwiGLU or a mixture of such experts."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: Config,
        index: int,
        rope: Rope,
        *,
        baked: bool,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        shape = config.shape
        mixer: GatedDeltaNet | GatedAttention
        if config.layer_types[index] == "linear_attention":
            mixer = GatedDeltaNet.load(checkpoint, f"{prefix}.linear_attn", dtype, config.delta_net)
        else:
            mixer = GatedAttention.load(
                checkpoint, f"{prefix}.self_attn", dtype, config.attention, rope, eps=shape.eps, baked=baked
            )
        mlp = load_feed_forward(checkpoint, f"{prefix}.mlp", dtype, config, index)
        return cls.around(
            checkpoint, prefix, dtype, mixer, mlp, eps=shape.eps, width=shape.hidden, centred=True, baked=baked
        )


def load_feed_forward(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int) -> FeedForward:
    """The dense network or the experts of one layer."""
    hidden, sparse = config.shape.hidden, config.sparse

    def dense(prefix: str, intermediate: int) -> GatedMLP:
        return GatedMLP.load(checkpoint, prefix, dtype, hidden=hidden, intermediate=intermediate, bias=False)

    if sparse is None or index not in sparse.layers:
        return dense(prefix, config.shape.intermediate)
    gate = Linear.load(checkpoint, f"{prefix}.gate", dtype, bias=False, shape=(sparse.experts, hidden))
    experts = Experts.load(
        checkpoint, prefix, dtype, experts=sparse.experts, hidden=hidden, intermediate=sparse.intermediate
    )
    return SharedSparseMLP(
        SparseMLP(Router(gate, sparse.top_k, sparse.normalise), experts),
        dense(f"{prefix}.shared_expert", config.shared_intermediate),
        load_row(checkpoint, f"{prefix}.shared_expert_gate.weight", dtype, hidden),
    )


def load_row(checkpoint: Checkpoint, name: str, dtype: mx.Dtype, width: int) -> Linear:
    """A matrix of one row, which a GGUF file may hold as a vector."""
    weight = checkpoint.weight(name).astype(dtype)
    if weight.shape == (width,):
        weight = Weight(weight.data[None])
    expect_shape(name, weight.shape, (1, width))
    return Linear(weight)


def left_out(checkpoint: Checkpoint, config: Config, *, vision: bool) -> re.Pattern[str]:
    """Which tensors are known and not loaded; says what that means. `vision`: the tower is loaded.

    GGUF files hold the head for drafts as layers past the last.
    """
    drafts = [DRAFTS]
    said = "is left to its draft"
    if checkpoint.dialect == "gguf" and config.drafts:
        layers = range(config.shape.layers, config.shape.layers + config.drafts)
        said = "is not loaded: of GGUF files it is not in this version"
        drafts.append(rf"^(model\.layers|blk)\.({'|'.join(map(str, layers))})\.")
    parts = {} if vision else {VISION: "the vision tower is not loaded, and images are refused"}
    parts |= {"|".join(drafts): f"the head that predicts several tokens {said}"}
    names = checkpoint.names()
    for pattern, part in parts.items():
        count = sum(re.search(pattern, name) is not None for name in names)
        if count:
            log.info("%s (%d tensors)", part, count)
    return re.compile("|".join(parts))


class Model(Decoder):
    """The whole network, with the tower for images where there is one; a head for drafts is left out."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        vision = load_tower(checkpoint, dtype, hidden=shape.hidden)
        rope = Rope(image_rope(config.rope, vision=vision is not None), shape.head_dim)
        baked = gains_are_baked(checkpoint)
        full = config.layer_types.count("full_attention")
        facts = shape.facts(dtype, [config.attention] * full, config.rope)
        states = (shape.layers - full) * config.delta_net.cache_bytes(dtype)
        model = cls.assemble(
            checkpoint,
            dtype,
            shape,
            replace(facts, cache_bytes_fixed=facts.cache_bytes_fixed + states),
            lambda prefix, index: Layer.load(checkpoint, prefix, dtype, config, index, rope, baked=baked),
            centred_norm=True,
            baked_norm=baked,
            left_out=left_out(checkpoint, config, vision=vision is not None),
        )
        model.vision = vision
        return model

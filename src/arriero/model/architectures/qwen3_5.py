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

from arriero.errors import CheckpointError
from arriero.kernels.activation import sigmoid_gate
from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.attention import AttentionConfig, attend
from arriero.model.layers.block import FeedForward, PreNormBlock
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder
from arriero.model.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from arriero.model.layers.experts import Experts, Router, SharedSparseMLP, SparseConfig, SparseMLP
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.mlp import GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape
from arriero.model.vision.qwen import load_tower
from arriero.model.weight import Weight
from arriero.runner.caches.full import KVCache

log = logging.getLogger(__name__)

LayerType = Literal["linear_attention", "full_attention"]
LAYER_TYPES: tuple[LayerType, LayerType] = ("linear_attention", "full_attention")

SECTIONS = (11, 11, 10)
"""Frequencies of the axes of an image, where the configuration doesn't say."""

VISION = r"^((model\.)?(visual|vision_tower)|v)\."
DRAFTS = r"^((model|language_model)\.)?mtp\."


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


def text_fields(values: Mapping[str, Any]) -> Fields:
    """The fields of the text model; whether its head is tied is said outside of `text_config`, if there."""
    text = Fields(values).section("text_config")
    if text is None:
        return Fields(values)
    outer = values.get("tie_word_embeddings")
    return Fields(text if outer is None else {**text, "tie_word_embeddings": outer}, "config.json: text_config")


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


class GatedAttention:
    """Attention with norms on query and key heads, and `sigmoid(gate)` on its output.

    `q_proj` holds the rows of each head's query and then those of its gate.
    """

    def __init__(
        self,
        config: AttentionConfig,
        rope: Rope,
        dtype: mx.Dtype,
        *,
        query_gate: Linear,
        key: Linear,
        value: Linear,
        out: Linear,
        query_norm: RMSNorm,
        key_norm: RMSNorm,
    ) -> None:
        self.config = config
        self.rope = rope
        self.dtype = dtype
        self.qkv = FusedLinear([query_gate, key, value])
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
        baked: bool,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.3.self_attn`."""
        c = config

        def project(name: str, rows: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=c.qkv_bias, shape=(rows, c.hidden))

        return cls(
            config,
            rope,
            dtype,
            query_gate=project("q_proj", 2 * c.heads * c.head_dim),
            key=project("k_proj", c.kv_heads * c.head_dim),
            value=project("v_proj", c.kv_heads * c.head_dim),
            out=Linear.load(
                checkpoint, f"{prefix}.o_proj", dtype, bias=c.out_bias, shape=(c.hidden, c.heads * c.head_dim)
            ),
            query_norm=load_norm(checkpoint, f"{prefix}.q_norm", dtype, c.head_dim, eps, baked=baked),
            key_norm=load_norm(checkpoint, f"{prefix}.k_norm", dtype, c.head_dim, eps, baked=baked),
        )

    def new_cache(self) -> KVCache:
        """Keys and values of every position."""
        c = self.config
        return KVCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        c = self.config
        query_gate, k, v = self.qkv(x)
        q, gate = mx.split(query_gate.reshape(-1, c.heads, 2 * c.head_dim), 2, axis=-1)
        k = k.reshape(-1, c.kv_heads, c.head_dim)
        v = v.reshape(-1, c.kv_heads, c.head_dim)
        q, k = self.rope(self.query_norm(q), batch), self.rope(self.key_norm(k), batch)
        y = sigmoid_gate(attend(q, k, v, batch, slot, scale=c.scale), gate)
        return self.out(y.reshape(-1, c.heads * c.head_dim))


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


def load_norm(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, width: int, eps: float, *, baked: bool) -> RMSNorm:
    """A norm whose weight is stored around 0, or as the whole gain where the file is `baked`."""
    return RMSNorm.load(checkpoint, prefix, dtype, eps=eps, width=width, centred=True, baked=baked)


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


def gains_are_baked(checkpoint: Checkpoint) -> bool:
    """Whether the file holds `1 + w` where the original holds w; decided once, by the layout of a convolution.

    MLX's tools turn kernels `[channels, 1, K]` into `[channels, K, 1]` and add the 1 in the same step. CheckpointError
    when there is no convolution to tell by.
    """
    if checkpoint.dialect == "gguf":
        return True
    kernels = [name for name in checkpoint.names() if name.endswith(".conv1d.weight")]
    name = next((name for name in kernels if name.endswith(".linear_attn.conv1d.weight")), None)
    if name is None:
        raise CheckpointError(
            "the checkpoint has no linear_attn.conv1d.weight, whose layout tells how the gains of norms are stored"
        )
    baked = checkpoint.info(name).shape[-1] == 1
    other = next((n for n in kernels if (checkpoint.info(n).shape[-1] == 1) != baked), None)
    if other is not None:
        raise CheckpointError(
            f"tensor {name} has shape {list(checkpoint.info(name).shape)}, but {other} "
            f"{list(checkpoint.info(other).shape)}: one is laid out as in the original, one as by MLX's tools, so that "
            "nothing tells how the gains of norms are stored; convert the model again"
        )
    log.info("norm weights are stored %s (by the layout of %s)", "as gains" if baked else "around 0", name)
    return baked


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


def image_rope(rope: RopeConfig, *, vision: bool) -> RopeConfig:
    """The rotary embedding, which frequency follows which axis of an image included."""
    return replace(rope, sections=rope.sections or SECTIONS) if vision else rope


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

"""Gemma 4: layers that share keys and values, an input of each layer's own, experts beside the MLP.

Norm gains are stored as they are. The softmax scale is 1, since queries and keys are normed; values are normed without
a gain. In full layers heads are wider, keys may be values, and only a part of the frequencies turns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import mlx.core as mx

from arriero.kernels.attention_part import NotReplayable
from arriero.kernels.cuda.attention import REPLAYED, Shape
from arriero.kernels.cuda.heads import Form
from arriero.kernels.prepared_attention import PreparedAttention
from arriero.kernels.rms_norm import rms_norm
from arriero.model.architectures import check_config
from arriero.model.architectures.gemma4_experts import ExpertsConfig, ParallelExperts
from arriero.model.architectures.gemma4_inputs import InputsConfig, LayerInput, LayerInputs, given
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Vision
from arriero.model.layers.attention import AttentionConfig, attend, attend_to, spans
from arriero.model.layers.config import Fields, text_fields
from arriero.model.layers.decoder import Decoder, find_root
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, DecoderShape, LayerType
from arriero.model.vision.gemma4 import load_tower
from arriero.model.vision.gemma4_unified import load_embedder
from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache

log = logging.getLogger(__name__)

ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
"""What the configuration means where it says nothing."""

IMAGES = r"(vision_tower|vision_embedder|embed_vision)"
SOUND = r"(audio_tower|embed_audio)"
"""Parts of tensors' names."""


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json or its `text_config`."""

    shape: DecoderShape
    kinds: list[LayerType]
    sources: list[int]
    """The layer whose keys and values each layer reads: itself, or an earlier one of its kind."""
    attention: list[AttentionConfig]
    keys_are_values: bool
    """In full layers."""
    ropes: dict[LayerType, RopeConfig]
    activation: Activation
    wide_readers: bool
    """Whether layers without keys and values have a feed-forward network of twice the width."""
    inputs: InputsConfig | None
    experts: ExpertsConfig | None
    logit_cap: float | None
    mutual: LayerType | Literal["none", "all"]
    """The layers in which the tokens of an image see each other."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        unified = architecture.startswith("Gemma4Unified")
        fields = text_fields(values)
        shape = DecoderShape.read(
            fields,
            architecture,
            context_length=262144 if unified else 131072,
            tied=True,
            heads=(8, 4),
            head_dim=256,
            vocab=262144,
        )
        mutual = fields.get("use_bidirectional_attention", "vision" if unified else None)
        if mutual not in (None, False, "vision"):
            raise fields.wrong("use_bidirectional_attention", "null or 'vision'", mutual)
        kinds = read_kinds(fields, shape.layers)
        config = cls(
            shape=shape,
            kinds=kinds,
            sources=read_sources(fields, kinds),
            attention=read_attention(fields, shape, kinds, fields.integer("sliding_window", 1024 if unified else 512)),
            keys_are_values=fields.flag("attention_k_eq_v", False),
            ropes=read_ropes(fields, shape.context_length),
            activation=activation(fields, "hidden_activation", default="gelu_tanh"),
            wide_readers=fields.flag("use_double_wide_mlp", False),
            inputs=InputsConfig.read(fields, shape, default=0 if unified else 256),
            experts=ExpertsConfig.read(fields),
            logit_cap=fields.optional_number("final_logit_softcapping"),
            mutual="none" if not mutual else "all" if unified else "sliding_attention",
        )
        fields.finish(architecture)
        return config

    def owns(self, index: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return self.sources[index] == index

    @property
    def readers(self) -> list[int]:
        """The layers that have none."""
        return [index for index in range(self.shape.layers) if not self.owns(index)]


def read_kinds(fields: Fields, layers: int) -> list[LayerType]:
    """The type of each layer; where they are not listed, every sixth and the last are full."""
    pattern = fields.integer("sliding_window_pattern", 6)
    names = fields.strings("layer_types", layers, LAYER_TYPES)
    if names is None:
        full = {*range(pattern - 1, layers, pattern), layers - 1}
        names = [LAYER_TYPES[index not in full] for index in range(layers)]
    if names[-1] != "full_attention":
        raise fields.wrong("layer_types", "a list that ends in full_attention", names)
    return [kind for name in names for kind in LAYER_TYPES if kind == name]


def read_sources(fields: Fields, kinds: Sequence[LayerType]) -> list[int]:
    """Whose keys and values each layer reads: the last `num_kv_shared_layers` read the last owner's of their type."""
    count = fields.integer("num_kv_shared_layers", 0, minimum=0)
    first = len(kinds) - count
    owners = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    missing = [kind for kind in kinds[max(first, 0) :] if kind not in owners]
    if missing:
        expected = f"a number that leaves a layer of type {missing[0]} before the sharing ones"
        raise fields.wrong("num_kv_shared_layers", expected, count)
    return [index if index < first else owners[kind] for index, kind in enumerate(kinds)]


def read_attention(
    fields: Fields, shape: DecoderShape, kinds: Sequence[LayerType], window: int
) -> list[AttentionConfig]:
    """The shape of each layer's attention, by `global_head_dim` and its companion or by `per_layer_config`."""
    by_layer = fields.section("per_layer_config")
    wide = {"head_dim": fields.integer("global_head_dim", 512)}
    few = fields.optional_integer("num_global_key_value_heads")
    if few is not None and fields.flag("attention_k_eq_v", False):
        wide["num_key_value_heads"] = few
    bias = fields.flag("attention_bias", False)
    found = []
    for index, kind in enumerate(kinds):
        full = kind == "full_attention"
        own = (wide if full else {}) if by_layer is None else by_layer.get(str(index), {})
        if not isinstance(own, dict) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise fields.wrong("per_layer_config", "head_dim and num_key_value_heads of some layers", by_layer)
        layer = Fields(own, f"{fields.where}: per_layer_config.{index}")
        kv_heads = layer.integer("num_key_value_heads", shape.kv_heads)
        if shape.heads % kv_heads:
            name = "num_key_value_heads" if by_layer is not None else "num_global_key_value_heads"
            raise fields.wrong(name, f"a divisor of num_attention_heads ({shape.heads})", kv_heads)
        found.append(
            AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=kv_heads,
                head_dim=layer.integer("head_dim", shape.head_dim),
                scale=1.0,
                window=None if full else window,
                qkv_bias=bias,
                out_bias=bias,
                norm_eps=shape.eps,
            )
        )
    return found


def read_ropes(fields: Fields, context_length: int) -> dict[LayerType, RopeConfig]:
    """The rotary embedding of each type of layer."""
    nested = fields.section("rope_parameters") or ROPES
    found = {}
    for kind in LAYER_TYPES:
        values = nested.get(kind)
        if not isinstance(values, dict):
            raise fields.wrong("rope_parameters", f"an object for each type of layer, {kind} among them", nested)
        where = f"rope_parameters.{kind}"
        default = ROPES[kind]
        values = {"rope_type": default["rope_type"]} | values
        theta = default["rope_theta"]
        rope = RopeConfig.of(values, where=where, theta=theta, partial=1.0, context_length=context_length)
        if rope.partial < 1 and rope.kind != "proportional":
            # The reference ignores the share there, and others take the first dimensions of a head.
            raise fields.wrong(where, "proportional where only a part of a head turns", values)
        found[kind] = rope
    return found


class Attention:
    """Normed queries over the layer's own keys and values, or over those of `source`."""

    def __init__(
        self,
        config: AttentionConfig,
        rope: Rope,
        dtype: mx.Dtype,
        *,
        projections: Sequence[Linear],
        query_norm: RMSNorm,
        key_norm: RMSNorm | None,
        out: Linear,
        source: int,
        mutual: bool,
    ) -> None:
        self.config = config
        self.rope = rope
        self.dtype = dtype
        self.project = FusedLinear(projections)
        """Queries alone; queries and keys, which are the values too; or queries, keys and values."""
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.out = out
        self.source = source
        self.mutual = mutual
        self.part: PreparedAttention | None = None

    def surround(self, before: RMSNorm, after: RMSNorm) -> None:
        """Take in the norms around it: from now on calls include them."""
        c = self.config
        self.before, self.after = before, after
        if self.key_norm is not None:
            self.part = PreparedAttention(
                self.project.matrices,
                self.out.matrix,
                Shape(c.heads, c.kv_heads, c.head_dim, c.scale, c.window),
                Form(keys_are_values=len(self.project.sizes) == 2, normed_values=True),
                self.query_norm.pair,
                self.key_norm.pair,
                before=before.pair,
                after=after.pair,
            )

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """`q_proj`, `q_norm`, `o_proj`, and in a layer that owns them `k_proj`, `k_norm`, `v_proj`, under `prefix`."""
        c = config.attention[index]
        heads = {"q_proj": c.heads}
        if config.owns(index):
            heads["k_proj"] = c.kv_heads
            if c.window is not None or not config.keys_are_values:
                heads["v_proj"] = c.kv_heads

        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=config.shape.eps, width=c.head_dim)

        return cls(
            c,
            rope,
            dtype,
            projections=[
                Linear.load(
                    checkpoint, f"{prefix}.{name}", dtype, bias=c.qkv_bias, shape=(count * c.head_dim, c.hidden)
                )
                for name, count in heads.items()
            ],
            query_norm=norm("q_norm"),
            key_norm=norm("k_norm") if config.owns(index) else None,
            out=Linear.load(
                checkpoint, f"{prefix}.o_proj", dtype, bias=c.out_bias, shape=(c.hidden, c.heads * c.head_dim)
            ),
            source=config.sources[index],
            mutual=config.mutual in ("all", config.kinds[index]),
        )

    def new_cache(self) -> KVCache | SlidingCache | None:
        """Memory of one row; None where another layer's is read."""
        c = self.config
        if self.key_norm is None:
            return None
        if c.window is None:
            return KVCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype)
        return SlidingCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype, c.window)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        lengths, positions = spans(batch)
        angles = self.rope.angles(batch)
        if self.part is None or batch.features or not self.part.fits(x.dtype, lengths, angles):
            if REPLAYED in batch.memo:
                raise NotReplayable("attention of plain operations has its positions in its shapes")
            return self.after(self._by_operations(self.before(x), batch, slot))
        caches = batch.caches(slot)
        held = [cache.reserve(length) for cache, length in zip(caches, lengths, strict=True)]
        y, filled = self.part(
            x,
            angles,
            [buffer for keys, values, _ in held for buffer in (keys, values)],
            lengths=lengths,
            positions=positions,
            bases=[base for _, _, base in held],
            memo=batch.memo,
        )
        for i, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
            cache.commit(filled[2 * i], filled[2 * i + 1], length)
        return y

    def _by_operations(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """The same between its norms, one operation after another."""
        c = self.config
        q, *new = self.project(x)
        q = self.rope(self.query_norm(q.reshape(-1, c.heads, c.head_dim)), batch)
        if self.key_norm is None:
            y = attend_to(q, batch, self.source, scale=c.scale, window=c.window, mutual=self.mutual)
        else:
            k, v = (part.reshape(-1, c.kv_heads, c.head_dim) for part in (new[0], new[-1]))
            k = self.rope(self.key_norm(k), batch)
            v = rms_norm(v, None, self.key_norm.eps)
            y = attend(q, k, v, batch, slot, scale=c.scale, window=c.window, mutual=self.mutual)
        return self.out(y.reshape(-1, c.heads * c.head_dim))


class Layer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`, with experts and an own input where it has any."""

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP,
        norms: Sequence[RMSNorm],
        *,
        experts: ParallelExperts | None,
        own_input: LayerInput | None,
        scalar: mx.array | None,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        before, after, self.before_mlp, self.after_mlp = norms
        attention.surround(before, after)
        self.gated = mlp.part(self.before_mlp, self.after_mlp)
        self.experts = experts
        self.own_input = own_input
        self.scalar = scalar

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`; a `layer_scalar` may be missing."""
        shape = config.shape
        names = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        twice = config.wide_readers and not config.owns(index)
        scalar = None
        if f"{prefix}.layer_scalar" in checkpoint:
            scalar = checkpoint.tensor(f"{prefix}.layer_scalar").astype(dtype)
            expect_shape(f"{prefix}.layer_scalar", tuple(scalar.shape), (1,))
        return cls(
            Attention.load(checkpoint, f"{prefix}.self_attn", dtype, config, index, rope),
            GatedMLP.load(
                checkpoint,
                f"{prefix}.mlp",
                dtype,
                hidden=shape.hidden,
                intermediate=shape.intermediate * (2 if twice else 1),
                activation=config.activation,
                bias=False,
            ),
            [RMSNorm.load(checkpoint, f"{prefix}.{n}", dtype, eps=shape.eps, width=shape.hidden) for n in names],
            experts=None
            if config.experts is None
            else ParallelExperts.load(checkpoint, prefix, dtype, config.experts, shape, config.activation),
            own_input=None
            if config.inputs is None
            else LayerInput.load(checkpoint, prefix, dtype, config.inputs, shape, config.activation),
            scalar=scalar,
        )

    def new_cache(self) -> Cache | None:
        return self.attention.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        attended = self.attention(x, batch, slot)
        if self.experts is None:
            x = self.gated(x, attended)
        else:
            x, normed = self.before_mlp.of_sum(x, attended)
            x = x + self.after_mlp(self.experts(x, self.mlp(normed)))
        if self.own_input is not None:
            x = x + self.own_input(x, given(batch, slot))
        return x if self.scalar is None else x * self.scalar


class Model(Decoder):
    """The whole network, with the tower for images where there is one; that for sound is not loaded."""

    layer_inputs: LayerInputs | None = None
    suppressed: mx.array | None = None
    """True at the tokens that are never to be sampled, bool `[vocab]`."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        vision = load_vision(checkpoint, dtype, config)
        left_out = SOUND if vision is not None else f"{SOUND}|{IMAGES}"
        layer_inputs = None
        if config.inputs is not None:
            layer_inputs = LayerInputs.load(checkpoint, find_root(checkpoint), dtype, config.inputs, shape)
        turns = [(kind, attention.head_dim) for kind, attention in zip(config.kinds, config.attention, strict=True)]
        ropes = {turn: Rope(config.ropes[turn[0]], turn[1]) for turn in set(turns)}
        owned = [config.attention[index] for index in range(shape.layers) if config.owns(index)]
        readers = "|".join(map(str, config.readers)) or "none"
        model = cls.assemble(
            checkpoint,
            dtype,
            shape,
            shape.facts(dtype, owned, config.ropes["full_attention"]),
            lambda prefix, i: Layer.load(checkpoint, prefix, dtype, config, i, ropes[turns[i]]),
            embedding_scale=shape.hidden**0.5,
            logit_cap=config.logit_cap,
            left_out=re.compile(rf"(^|\.)({left_out})\.|\.layers\.({readers})\.self_attn\.[kv]_(proj|norm)\."),
        )
        model.vision = vision
        model.layer_inputs = layer_inputs
        model.suppressed = read_suppressed(checkpoint.generation_config, shape.vocab)
        report_towers(checkpoint, shape.architecture)
        return model

    def inputs(self, batch: Batch) -> mx.array:
        """The scaled rows of the tokens; what each layer gets besides is kept for it."""
        x = super().inputs(batch)
        if self.layer_inputs is not None:
            self.layer_inputs(batch, x)
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        """`[n, hidden]` to `[n, vocab]`, soft cap and suppressed tokens included."""
        logits = super().logits(hidden)
        return logits if self.suppressed is None else mx.where(self.suppressed, -mx.inf, logits)


def load_vision(checkpoint: Checkpoint, dtype: mx.Dtype, config: Config) -> Vision | None:
    """The tower, or what does without one; None where the checkpoint has neither."""
    hidden, atomic = config.shape.hidden, config.mutual != "none"
    windows = [attention.window for attention in config.attention if attention.window is not None]
    longest = min(windows, default=config.shape.context_length)
    return load_tower(checkpoint, dtype, hidden=hidden, atomic=atomic) or load_embedder(
        checkpoint, dtype, hidden=hidden, atomic=atomic, longest=longest
    )


def report_towers(checkpoint: Checkpoint, architecture: str) -> None:
    """Say which towers are not loaded."""
    for pattern, what in ((IMAGES, "images"), (SOUND, "sound")):
        count = sum(re.search(rf"(^|\.){pattern}\.", name) is not None for name in checkpoint.unused())
        if count:
            log.info(
                "%s: the tower for %s is not loaded (%d tensors); such input is refused", architecture, what, count
            )


def read_suppressed(generation: Mapping[str, Any], vocab: int) -> mx.array | None:
    """`suppress_tokens` of generation_config.json as a mask `[vocab]`; CheckpointError when they are no token ids."""
    fields = Fields(generation, "generation_config.json")
    ids = fields.get("suppress_tokens")
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise fields.wrong("suppress_tokens", f"a list of token ids below {vocab}", ids)
    mask = [False] * vocab
    for token in ids:
        mask[token] = True
    return mx.array(mask)

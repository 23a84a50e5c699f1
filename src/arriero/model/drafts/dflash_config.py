"""The configuration of block drafts (DFlash), in each of the layouts that are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from arriero.errors import CheckpointError
from arriero.model.architectures.laguna import read_rope as read_laguna_rope
from arriero.model.drafts import check_config
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.config import Fields
from arriero.model.layers.mlp import Activation, activation
from arriero.model.layers.rope import AXES, RopeConfig
from arriero.model.layers.shape import LAYER_TYPES, MAX_LAYERS, LayerType

REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "confidence_head": (None, False),
    "markov_rank": (None, 0),
    "projector_type": (None, "dflash"),
    "sample_from_anchor": (None, False),
}
"""What relatives of DFlash have, with the values that change nothing. As plain DFlash they'd run, and guess badly."""


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """Convolutions around attention and feed-forward: `taps` rows, one dynamic factor for each `group` channels."""

    taps: int
    group: int


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """Each token is chosen among `top_k` by `rank` numbers of it, of the one before it and of the hidden state."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json; what `dflash_config` says goes before the top level."""

    architecture: str
    hidden: int
    intermediate: int
    vocab: int | None
    eps: float
    activation: Activation
    attention: list[AttentionConfig]
    """Of each layer."""
    causal: list[bool]
    """Whether a row of a block sees only the rows before it, by layer."""
    rope: RopeConfig
    interleaved: bool
    """Whether neighbours form a rotated pair, and not the halves of a head."""
    block: int
    """Rows of a block: the anchor and the tokens guessed."""
    mask: int
    """The token that stands for those."""
    taps: tuple[int, ...]
    target_layers: int | None
    embedding_scale: float | None
    """None: as the target's own embeddings."""
    output_multiplier: float
    logit_cap: float | None
    own_table: bool | None
    """None: if there is one."""
    own_head: bool | None
    tied: bool
    laguna: bool
    conv: ConvConfig | None
    selector: SelectorConfig | None

    @property
    def layers(self) -> int:
        return len(self.attention)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        top = Fields(values)
        nested = Fields(top.section("dflash_config") or {}, "config.json: dflash_config")

        def where(name: str) -> Fields:
            return nested if nested.has(name) else top

        for name, neutral in REFUSED.items():
            if where(name).get(name) not in neutral:
                raise where(name).wrong(name, repr(neutral[-1]), where(name).get(name))
        vocab = top.optional_integer("vocab_size")
        own = top.optional_integer("draft_vocab_size")
        if own is not None and own != vocab:
            raise top.wrong("draft_vocab_size", f"vocab_size ({vocab}): a vocabulary of its own is not supported", own)
        layers = top.integer("num_hidden_layers", maximum=MAX_LAYERS)
        attention = read_attention(top, layers)
        target_layers = where("num_target_layers").optional_integer("num_target_layers")
        hidden = top.integer("hidden_size")
        block = where("block_size").integer("block_size", 16, minimum=2)
        causal = read_causal(top, nested, attention)
        for layer, sees_less in zip(attention, causal, strict=True):
            if layer.window is not None and not sees_less and block > layer.window:
                raise where("block_size").wrong("block_size", f"at most sliding_window ({layer.window})", block)
        laguna = architecture == "DFlashLagunaForCausalLM"
        kinds: set[LayerType] = {LAYER_TYPES[layer.window is not None] for layer in attention}
        if laguna and top.get("gating", "per-head") not in ("per-head", True):
            raise top.wrong("gating", "per-head", top.get("gating"))
        if laguna and len(kinds) > 1:
            raise top.wrong("layer_types", "layers of one type, as all of Laguna's drafts have", top.get("layer_types"))
        cap = where("final_logit_softcapping").get("final_logit_softcapping")
        two = architecture == "DFlash2DraftModel"
        return cls(
            architecture=architecture,
            hidden=hidden,
            intermediate=top.integer("intermediate_size"),
            vocab=vocab,
            eps=top.number("rms_norm_eps", 1e-6),
            activation=activation(top, "hidden_act", default="silu"),
            attention=attention,
            causal=causal,
            rope=read_rope(top, kinds, laguna=laguna),
            interleaved=top.flag("rope_interleaved", not top.flag("rope_is_neox_style", True)),
            block=block,
            mask=where("mask_token_id").integer("mask_token_id", minimum=0),
            taps=read_taps(where("target_layer_ids"), target_layers, layers),
            target_layers=target_layers,
            embedding_scale=where("input_embedding_scale").optional_number("input_embedding_scale"),
            output_multiplier=where("output_multiplier").number("output_multiplier", 1.0),
            logit_cap=where("final_logit_softcapping").number("final_logit_softcapping") if cap else None,
            own_table=top.flag("has_embed_tokens", False) if top.has("has_embed_tokens") else None,
            own_head=top.flag("has_lm_head", False) if top.has("has_lm_head") else None,
            tied=top.flag("tie_word_embeddings", True),
            laguna=laguna,
            conv=read_conv(where, hidden) if two else None,
            selector=SelectorConfig(
                where("selector_rank").integer("selector_rank"), where("selector_top_k").integer("selector_top_k")
            )
            if two
            else None,
        )


def read_attention(fields: Fields, layers: int) -> list[AttentionConfig]:
    """The shape of each layer's attention; a layer without a listed type is full."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    head_dim = fields.integer("head_dim", max(1, hidden // heads))
    types = fields.strings("layer_types", layers, LAYER_TYPES)
    if types is not None and len(fields.get("layer_types")) != layers:
        raise fields.wrong("layer_types", f"as long as num_hidden_layers says ({layers})", fields.get("layer_types"))
    slides = [kind == "sliding_attention" for kind in types or ["full_attention"] * layers]
    window = fields.integer("sliding_window") if any(slides) else None
    bias = fields.flag("attention_bias", False)
    return [
        AttentionConfig(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=window if sliding else None,
            qkv_bias=bias,
            out_bias=bias,
        )
        for sliding in slides
    ]


def read_causal(top: Fields, nested: Fields, attention: list[AttentionConfig]) -> list[bool]:
    """Whether each layer's blocks are causal. Where nothing says so, sliding layers are and full ones are not."""
    said: bool | None = None
    for fields, name, opposite in (
        (nested, "causal", False),
        (nested, "is_causal", False),
        (top, "is_causal", False),
        (nested, "dflash_query_causal", False),
        (top, "dflash_query_causal", False),
        (nested, "sliding_window_non_causal", True),
        (top, "sliding_window_non_causal", True),
    ):
        if fields.has(name):
            value = fields.flag(name, False) is not opposite
            if said not in (None, value):
                raise fields.wrong(name, f"{value is opposite}, as the other fields say", fields.get(name))
            said = value
    return [layer.window is not None if said is None else said for layer in attention]


def read_rope(fields: Fields, kinds: set[LayerType], *, laguna: bool) -> RopeConfig:
    """The rotation of all layers.

    Plain drafts turn whole heads by positions of one axis, whatever was copied from a target that does otherwise;
    Laguna's turn what they say, by type of layer where they say it so.
    """
    context = fields.integer("max_position_embeddings", 32768)
    if laguna and any(fields.section(name) for name in ("rope_parameters", "swa_rope_parameters")):
        return read_laguna_rope(fields, next(iter(kinds)), context)
    if laguna:
        return RopeConfig.read(fields, theta=10000.0, context_length=context, layer_type=next(iter(kinds)))
    copied = {"partial_rotary_factor", *AXES}
    values = {name: value for name, value in fields.values.items() if name not in copied}
    for name in ("rope_parameters", "rope_scaling"):
        section = fields.section(name)
        if section is not None:
            values[name] = {key: value for key, value in section.items() if key not in copied}
    return RopeConfig.read(Fields(values, fields.where), theta=10000.0, context_length=context)


def read_taps(fields: Fields, target_layers: int | None, layers: int) -> tuple[int, ...]:
    """Layers of the target whose outputs are taken; by default spread from the second to the third last."""
    found = fields.get("target_layer_ids")
    if found is None:
        if target_layers is None:
            raise CheckpointError(
                "config.json: `target_layer_ids` and `num_target_layers` are missing, one must be there"
            )
        if layers == 1:
            return (target_layers // 2,)
        return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))
    if not isinstance(found, list) or not all(type(tap) is int and tap >= 0 for tap in found) or not found:
        raise fields.wrong("target_layer_ids", "a list of layer numbers", found)
    return tuple(found)


def read_conv(where: Any, hidden: int) -> ConvConfig:
    """The convolutions of DFlash2."""
    taps = where("conv_kernel_size").integer("conv_kernel_size")
    group = where("conv_group_size").integer("conv_group_size")
    if hidden % group:
        raise where("conv_group_size").wrong("conv_group_size", f"a divisor of hidden_size ({hidden})", group)
    return ConvConfig(taps, group)

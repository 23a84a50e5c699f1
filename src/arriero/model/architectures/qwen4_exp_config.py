"""The configuration of Qwen3.8 Flash Next, read strictly: what is not said is no default of its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.model.architectures import check_config
from arriero.model.architectures.qwen4_exp_attention import IndexConfig
from arriero.model.architectures.qwen4_exp_hash import NGramsConfig
from arriero.model.architectures.qwen4_exp_streams import StreamsConfig
from arriero.model.contract import ModelFacts
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.config import Fields, text_fields
from arriero.model.layers.delta_net import DeltaNetConfig
from arriero.model.layers.experts import SparseConfig
from arriero.model.layers.mlp import activation
from arriero.model.layers.rope import RopeConfig
from arriero.model.layers.shape import DecoderShape

LINEAR, INDEXED = "linear_attention", "indexed_attention"
SPELLINGS = (LINEAR, INDEXED, "full_attention")
"""Published files say `full_attention` where the layer has an indexer."""

REQUIRED = (
    "hc_count hc_lowrank head_dim indexer_budget indexer_compress_ratio indexer_head_dim indexer_kv_heads "
    "indexer_n_heads linear_conv_kernel_dim max_position_embeddings num_key_value_heads rms_norm_eps"
).split()
"""Fields that other Qwen models have defaults for, which would be wrong here."""
REQUIRED_WITH_NGRAMS = (
    "heads_per_ngram make_ngram_vocab_size_divisible_by ngram_size ngram_vocab_size_base ple_conv_kernel_size "
    "split_ngram_parts"
).split()


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json or its `text_config`."""

    shape: DecoderShape
    indexed: list[bool]
    """Which layers are attention."""
    streams: StreamsConfig
    attention: AttentionConfig
    index: IndexConfig
    delta_net: DeltaNetConfig
    rope: RopeConfig
    sparse: SparseConfig
    shared_intermediate: int
    ngrams: NGramsConfig | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured; relatives' defaults don't count."""
        architecture = check_config(values)
        fields = text_fields(values)
        tables = bool(fields.get("ple_layer_ids"))
        for name in [*REQUIRED, *(REQUIRED_WITH_NGRAMS if tables else ())]:
            if not fields.has(name):
                raise CheckpointError(f"{fields.where}: `{name}` is missing")
        shape = DecoderShape.read(fields, architecture, dense=False)
        indexed = read_layer_types(fields, shape.layers)
        if activation(fields, "hidden_act", default="silu") != "silu":
            raise fields.wrong("hidden_act", "silu", fields.get("hidden_act"))
        for name, neutral in (("attention_bias", False), ("mamba_ssm_dtype", "float32")):
            if fields.get(name, neutral) != neutral:
                raise fields.wrong(name, repr(neutral), fields.get(name))
        sparse = SparseConfig.read(fields, shape.layers, normalise=True)
        if len(sparse.layers) != shape.layers:
            raise fields.wrong("mlp_only_layers", "empty: every layer has experts", fields.get("mlp_only_layers"))
        rope = RopeConfig.read(fields, theta=10000.0, partial=1.0, context_length=shape.context_length, axes=True)
        rotated = int(shape.head_dim * rope.partial)
        check_axes(fields, rotated)
        hidden = shape.hidden
        config = cls(
            shape=shape,
            indexed=indexed,
            streams=StreamsConfig(
                count=fields.integer("hc_count", minimum=2),
                hidden=hidden,
                rank=fields.integer("hc_lowrank"),
                eps=shape.eps,
            ),
            attention=AttentionConfig(
                hidden=hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                qkv_bias=False,
                out_bias=False,
            ),
            index=IndexConfig.read(fields, rotated=rotated),
            delta_net=DeltaNetConfig.read(fields, hidden=hidden, eps=shape.eps, gate=read_gate(fields)),
            rope=rope,
            sparse=sparse,
            shared_intermediate=fields.integer("shared_expert_intermediate_size"),
            ngrams=NGramsConfig.read(
                fields,
                hidden=hidden,
                vocab=shape.vocab,
                linear=[not attends for attends in indexed],
                boundary=read_boundary(fields, values),
            )
            if tables
            else None,
        )
        fields.finish(architecture)
        return config

    def facts(self, dtype: mx.Dtype) -> ModelFacts:
        """With the memory of all kinds of layers."""
        attends = sum(self.indexed)
        facts = self.shape.facts(dtype, [self.attention] * attends, self.rope)
        fixed = (self.shape.layers - attends) * self.delta_net.cache_bytes(dtype)
        if self.ngrams is not None:
            fixed += len(self.ngrams.layers) * self.ngrams.cache_bytes(self.streams.width, dtype)
        return ModelFacts(
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            hidden_size=facts.hidden_size,
            layers=facts.layers,
            context_length=facts.context_length,
            dtype=dtype,
            cache_bytes_per_token=facts.cache_bytes_per_token + attends * self.index.width * dtype.size,
            cache_bytes_fixed=fixed,
        )


def read_layer_types(fields: Fields, layers: int) -> list[bool]:
    """Which layers are attention, by `layer_types` or from the interval at which it comes."""
    given = fields.get("layer_types")
    names = fields.strings("layer_types", layers, SPELLINGS)
    if names is None:
        interval = fields.integer("full_attention_interval")
        return [(index + 1) % interval == 0 for index in range(layers)]
    if len(given) != layers:
        raise fields.wrong("layer_types", f"as long as num_hidden_layers says ({layers})", given)
    return [name != LINEAR for name in names]


def read_gate(fields: Fields) -> Literal["silu", "sigmoid"]:
    """What gates the output of delta nets: `output_gate_type`, else the activation."""
    name = fields.get("output_gate_type", "silu")
    if name == "sigmoid":
        return "sigmoid"
    if name in ("silu", "swish"):
        return "silu"
    raise fields.wrong("output_gate_type", "sigmoid or silu", name)


def read_boundary(fields: Fields, values: Mapping[str, Any]) -> int | None:
    """The token at which n-grams end: the first end token of the text model, else the only one of the whole.

    Several of the whole model are those that end a reply, in an order that means nothing here.
    """
    found = fields.get("eos_token_id")
    if found is None:
        found = values.get("eos_token_id")
        if isinstance(found, list) and len(found) != 1:
            return None
    if isinstance(found, list) and found:
        found = found[0]
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
        raise fields.wrong("eos_token_id", "a token id or a list of them", found)
    return found


def check_axes(fields: Fields, rotated: int) -> None:
    """Refuse positions of several axes that text does not make equal to one: the axes must share all rotated pairs."""
    rope = fields.section("rope_parameters") or {}
    sections = rope.get("mrope_section")
    if sections is not None and (not isinstance(sections, list) or sum(sections) != rotated // 2):
        raise fields.wrong("rope_parameters.mrope_section", f"a list that sums to {rotated // 2}", sections)
    if sections is not None and rope.get("mrope_interleaved") is not True:
        raise fields.wrong("rope_parameters.mrope_interleaved", "true", rope.get("mrope_interleaved"))

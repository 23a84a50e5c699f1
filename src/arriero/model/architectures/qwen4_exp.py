"""The text of Qwen3.8 Flash Next (`qwen4_exp`): residual streams, delta nets, indexed attention, hashed n-grams.

Each layer reads a mix of the streams, and writes back to each with a weight of its own; there are no other norms
between layers. Every fourth layer is attention over chosen blocks of keys, the others are gated delta nets; all have a
mixture of experts. Some layers first add rows of a large table, chosen by the last tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import mlx.core as mx

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.architectures import check_config
from arriero.model.architectures.qwen3_5 import DRAFTS, VISION, gains_are_baked, text_fields
from arriero.model.architectures.qwen4_exp_attention import IndexConfig, IndexedAttention
from arriero.model.architectures.qwen4_exp_ngrams import NGramEmbedding, NGramsConfig
from arriero.model.architectures.qwen4_exp_streams import StreamReader, StreamsConfig, write
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Hidden, ModelFacts, RowCaches
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import HARMLESS, arrays, find_root
from arriero.model.layers.delta_net import DeltaNetConfig, GatedDeltaNet
from arriero.model.layers.embedding import Embedding, load_head
from arriero.model.layers.experts import Experts, Router, SharedSparseMLP, SparseConfig, SparseMLP
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import GatedMLP, activation
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape
from arriero.settings import raw

log = logging.getLogger(__name__)

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

LEFT_OUT = {
    VISION: "the vision tower is not loaded, and images are refused",
    DRAFTS: "the head that predicts several tokens is not loaded: drafts are not in this version",
}
IGNORED = re.compile(r"\.(hashstats_\w+|token_lookup\w*)$|\.[kv]_scale$")
"""Statistics and activation scales that some files carry."""


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
    """The token at which n-grams end: the first end token of the text model, else of the whole."""
    found = fields.get("eos_token_id", values.get("eos_token_id"))
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


class Layer:
    """N-grams where there are some, then a delta net or attention, then experts, each between a read and a write."""

    def __init__(
        self,
        mixer: GatedDeltaNet | IndexedAttention,
        experts: SharedSparseMLP,
        before: StreamReader,
        between: StreamReader,
        ngrams: NGramEmbedding | None,
        slots: Slots,
    ) -> None:
        self.mixer = mixer
        self.experts = experts
        self.before = before
        self.between = between
        self.ngrams = ngrams
        self.slots = slots

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
        resident: bool,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        eps = config.shape.eps
        mixer: GatedDeltaNet | IndexedAttention
        if config.indexed[index]:
            mixer = IndexedAttention.load(
                checkpoint,
                f"{prefix}.self_attn",
                dtype,
                config.attention,
                config.index,
                rope,
                eps=eps,
                baked=baked,
            )
        else:
            mixer = GatedDeltaNet.load(checkpoint, f"{prefix}.linear_attn", dtype, config.delta_net)
        before, between = (
            StreamReader.load(checkpoint, f"{prefix}.{name}", dtype, config.streams, baked=baked, writes=True)
            for name in ("attn_hyper_connection", "mlp_hyper_connection")
        )
        ngrams = None
        if config.ngrams is not None and index in config.ngrams.layers:
            ngrams = NGramEmbedding.load(
                checkpoint,
                f"{prefix}.ple",
                dtype,
                config.ngrams,
                config.streams,
                layer=index,
                baked=baked,
                resident=resident,
            )
        experts = load_experts(checkpoint, f"{prefix}.mlp", dtype, config)
        return cls(mixer, experts, before, between, ngrams, Slots.of(config, index))

    def new_caches(self) -> dict[int, Cache]:
        """What the layer remembers, by slot."""
        caches: dict[int, Cache] = {}
        if isinstance(self.mixer, GatedDeltaNet):
            caches[self.slots.mixer] = self.mixer.new_cache()
        else:
            caches[self.slots.mixer] = self.mixer.main.new_cache()
            caches[self.slots.index] = self.mixer.indexer.new_cache()
        if self.ngrams is not None:
            caches[self.slots.ngrams] = self.ngrams.new_cache()
        return caches

    def __call__(self, streams: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """Streams `[T, streams, hidden]` to the same, and what the mixer took, `[T, hidden]`."""
        if self.ngrams is not None:
            streams = self.ngrams(streams, batch, self.slots.ngrams)
        taken, weights = self.before.read(streams)
        if isinstance(self.mixer, GatedDeltaNet):
            y = self.mixer(taken, batch, self.slots.mixer)
        else:
            y = self.mixer(taken, batch, self.slots.mixer, self.slots.index)
        streams = write(streams, y, weights)
        mixed, weights = self.between.read(streams)
        return write(streams, self.experts(mixed), weights), taken


@dataclass(frozen=True, slots=True)
class Slots:
    """Where a layer's caches are in a row: first those of all mixers, then the index keys, then the n-grams.

    A slot that the layer does not use is −1.
    """

    mixer: int
    index: int
    ngrams: int

    @classmethod
    def of(cls, config: Config, layer: int) -> Self:
        layers, attends = config.shape.layers, [i for i, attends in enumerate(config.indexed) if attends]
        tables = config.ngrams.layers if config.ngrams is not None else ()
        return cls(
            layer,
            layers + attends.index(layer) if layer in attends else -1,
            layers + len(attends) + tables.index(layer) if layer in tables else -1,
        )


def load_experts(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config) -> SharedSparseMLP:
    """The mixture of one layer, and the expert that every token takes."""
    hidden, sparse = config.shape.hidden, config.sparse
    router = Linear.load(checkpoint, f"{prefix}.gate", dtype, bias=False, shape=(sparse.experts, hidden))
    experts = Experts.load(
        checkpoint, prefix, dtype, experts=sparse.experts, hidden=hidden, intermediate=sparse.intermediate
    )
    shared = GatedMLP.load(
        checkpoint,
        f"{prefix}.shared_expert",
        dtype,
        hidden=hidden,
        intermediate=config.shared_intermediate,
        bias=False,
    )
    gate = Linear.load(checkpoint, f"{prefix}.shared_expert_gate", dtype, bias=False, shape=(1, hidden))
    return SharedSparseMLP(SparseMLP(Router(router, sparse.top_k, sparse.normalise), experts), shared, gate)


def check_taken(checkpoint: Checkpoint, architecture: str) -> None:
    """Say which known parts are left out; CheckpointError for a tensor that nobody has taken and nobody knows.

    A tensor too many means other semantics than those of this file.
    """
    left = [name for name in checkpoint.unused() if not HARMLESS.search(name) and not IGNORED.search(name)]
    for pattern, part in LEFT_OUT.items():
        known = [name for name in left if re.search(pattern, name)]
        left = [name for name in left if not re.search(pattern, name)]
        if known:
            log.info("%s (%d tensors)", part, len(known))
    if left:
        raise CheckpointError(
            f"the checkpoint holds {len(left)} tensors that {architecture} does not have, the first is {left[0]}: "
            "its configuration does not describe it, or it is of a newer kind"
        )


class Model:
    """The whole network; a vision tower and a head for drafts are left out."""

    def __init__(
        self,
        facts: ModelFacts,
        config: Config,
        *,
        embedding: Embedding,
        layers: list[Layer],
        reader: StreamReader,
        head: Linear,
    ) -> None:
        self.facts = facts
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.reader = reader
        self.head = head

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`.

        Tables of n-grams stay in their files, unless `ARRIERO_RESIDENT_TABLES` asks for them in memory.
        """
        config = Config.read(checkpoint.config)
        shape = config.shape
        rope = Rope(config.rope, shape.head_dim)
        baked = gains_are_baked(checkpoint)
        resident = raw("RESIDENT_TABLES").lower() not in ("", "0", "f", "false")
        root = find_root(checkpoint)
        embedding = Embedding.load(checkpoint, f"{root}embed_tokens", dtype, shape=(shape.vocab, shape.hidden))
        heads = list(dict.fromkeys([f"{root}lm_head", f"{root.removesuffix('model.')}lm_head", "lm_head"]))
        model = cls(
            config.facts(dtype),
            config,
            embedding=embedding,
            layers=[
                Layer.load(checkpoint, f"{root}layers.{i}", dtype, config, i, rope, baked=baked, resident=resident)
                for i in range(shape.layers)
            ],
            reader=StreamReader.load(
                checkpoint, f"{root}hyper_connection_mixer", dtype, config.streams, baked=baked, writes=False
            ),
            head=load_head(checkpoint, embedding, heads, dtype, tied=shape.tied),
        )
        check_taken(checkpoint, shape.architecture)
        return model

    def new_caches(self) -> RowCaches:
        """Fresh caches for a row, in the order of `Slots`."""
        found: dict[int, Cache] = {}
        for layer in self.layers:
            found |= layer.new_caches()
        return [found[slot] for slot in range(len(found))]

    def forward(self, batch: Batch) -> Hidden:
        """Packed tokens `[T]` to final states `[T, hidden]`.

        The tap of a layer is what the next one's mixer takes, or the final states behind the last.
        """
        if batch.features:
            raise UnsupportedFeature(f"{self.facts.architecture} does not take images")
        x = self.embedding(batch.tokens)
        c = self.config.streams
        streams = mx.broadcast_to(x[:, None], (x.shape[0], c.count, c.hidden))
        taps: dict[int, mx.array] = {}
        for index, layer in enumerate(self.layers):
            streams, taken = layer(streams, batch)
            if index - 1 in batch.taps:
                taps[index - 1] = taken
        final = self.reader.mixed(streams)
        taps[len(self.layers) - 1] = final
        tapped = mx.concatenate([taps[index] for index in batch.taps], axis=-1) if batch.taps else None
        return Hidden(final, tapped)

    def logits(self, hidden: mx.array) -> mx.array:
        """`[n, hidden]` to `[n, vocab]` in the activations' dtype."""
        return self.head(hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the token table."""
        return self.embedding(tokens)

    def raw_logits(self, hidden: mx.array) -> mx.array:
        """The same as `logits`."""
        return self.head(hidden)

    def parameters(self) -> Iterable[mx.array]:
        """Every array of the model, each once; tables that stay in their files are none."""
        return list({id(array): array for array in arrays(self)}.values())

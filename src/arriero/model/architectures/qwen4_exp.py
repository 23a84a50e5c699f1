"""The text of Qwen3.8 Flash Next (`qwen4_exp`): residual streams, delta nets, indexed attention, hashed n-grams.

Each layer reads a mix of the streams, and writes back to each with a weight of its own; there are no other norms
between layers. Every fourth layer is attention over chosen blocks of keys, the others are gated delta nets; all have a
mixture of experts. Some layers first add rows of a large table, chosen by the last tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.kernels import device
from arriero.kernels.cuda.attention import REPLAYED
from arriero.model.architectures import resident_tables
from arriero.model.architectures.qwen4_exp_attention import IndexedAttention
from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.architectures.qwen4_exp_ngrams import NGramEmbedding
from arriero.model.architectures.qwen4_exp_streams import StreamReader, Streams, settled, write
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Hidden, ModelFacts, RowCaches, Vision
from arriero.model.layers.decoder import HARMLESS, arrays, find_root
from arriero.model.layers.delta_net import GatedDeltaNet
from arriero.model.layers.embedding import Embedding, load_head, put_features
from arriero.model.layers.experts import Experts, Router, SharedSparseMLP, SparseMLP
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.qwen_files import DRAFTS, VISION, gains_are_baked, image_rope
from arriero.model.layers.replay import Replay
from arriero.model.layers.rope import Rope
from arriero.model.vision.qwen import load_tower

log = logging.getLogger(__name__)

LEFT_OUT = {
    VISION: "the vision tower is not loaded, and images are refused",
    DRAFTS: "the head that predicts several tokens is left to its draft",
}
LONG, TOGETHER = 256, 4
"""Tokens from which a GPU's memory is kept low, and the layers after which: two such groups are under way at most.

Without it a chunk of 2,048 tokens held 17 GB beside the weights of 48 layers (H200).
"""
IGNORED = re.compile(r"\.(hashstats_\w+|token_lookup\w*)$|\.[kv]_scale$")
"""Statistics and activation scales that some files carry."""


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

    def __call__(self, streams: Streams, batch: Batch) -> tuple[Streams, mx.array]:
        """Streams `[T, streams, hidden]` to the same, and what the mixer took, `[T, hidden]`."""
        if self.ngrams is not None:
            streams = self.ngrams(settled(streams), batch, self.slots.ngrams)
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


def check_taken(checkpoint: Checkpoint, architecture: str, *, vision: bool) -> None:
    """Say which known parts are left out; CheckpointError for a tensor that nobody has taken and nobody knows.

    A tensor too many means other semantics than those of this file. With `vision` the tower is loaded, and whole.
    """
    left = [name for name in checkpoint.unused() if not HARMLESS.search(name) and not IGNORED.search(name)]
    for pattern, part in LEFT_OUT.items():
        if vision and pattern == VISION:
            continue
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
        self.vision: Vision | None = None
        self._replay = Replay(self._by_layers)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`.

        Tables of n-grams stay in their files, unless `ARRIERO_RESIDENT_TABLES` asks for them in memory.
        """
        config = Config.read(checkpoint.config)
        shape = config.shape
        vision = load_tower(checkpoint, dtype, hidden=shape.hidden)
        rope = Rope(image_rope(config.rope, vision=vision is not None), shape.head_dim)
        baked = gains_are_baked(checkpoint)
        resident = resident_tables()
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
        check_taken(checkpoint, shape.architecture, vision=vision is not None)
        model.vision = vision
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
        if batch.features and self.vision is None:
            raise UnsupportedFeature(f"{self.facts.architecture} does not take images")
        tables = {layer.slots.ngrams: layer.ngrams for layer in self.layers if layer.ngrams is not None}
        return self._replay(batch, lambda: {slot: ngrams.coming(batch, slot) for slot, ngrams in tables.items()})

    def _by_layers(self, batch: Batch) -> Hidden:
        """The forward, one layer after another."""
        for layer in self.layers:
            if layer.ngrams is not None and REPLAYED not in batch.memo:
                layer.ngrams.begin(batch, layer.slots.ngrams)
        x = put_features(self.embedding(batch.tokens), batch.features)
        c = self.config.streams
        streams: Streams = mx.broadcast_to(x[:, None], (x.shape[0], c.count, c.hidden))
        taps: dict[int, mx.array] = {}
        before: mx.array | None = None
        for index, layer in enumerate(self.layers):
            streams, taken = layer(streams, batch)
            if (index + 1) % TOGETHER == 0 and x.shape[0] >= LONG and not device.on_cpu():
                # What layers use on the way is freed once they are computed, and the host is ahead by a whole chunk.
                after = settled(streams)
                mx.async_eval(after)  # type: ignore[no-untyped-call]
                if before is not None:
                    mx.eval(before)
                before = after
            if index - 1 in batch.taps:
                taps[index - 1] = taken
        final = self.reader.mixed(streams)
        taps[len(self.layers) - 1] = final
        tapped = mx.concatenate([taps[index] for index in batch.taps], axis=-1) if batch.taps else None
        return Hidden(final, tapped, settled(streams).reshape(-1, c.width))

    def read_ahead(self, coming: Sequence[tuple[np.ndarray, int]]) -> None:
        """Start to fetch rows of the tables for prompt tokens that come next."""
        for layer in self.layers:
            if layer.ngrams is not None:
                layer.ngrams.read_ahead(coming)

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

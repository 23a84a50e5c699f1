"""Hashed n-gram embeddings: rows of a large table, chosen by the last tokens, that a layer adds to its streams.

The hash and the choice of rows are done on the host, once per forward, since they need 64-bit integers and the table
may be in a file. What must be ready for that are the token ids: see `Batch.ids`. For a decoded token and tables of the
published size the host then takes 0.2 ms (hash 0.03, rows 0.15; with rows that nobody looked at before 0.4), during
which the device computes the layers before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.kernels import device
from arriero.kernels.depthwise_conv import depthwise_conv
from arriero.model.architectures.qwen4_exp_hash import NGramHash, NGramsConfig
from arriero.model.architectures.qwen4_exp_streams import StreamNorm, StreamsConfig
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.delta_net import load_taps
from arriero.model.layers.host_table import ShardedTable
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.replay import Coming, Contexts, Hosted, hosted_key
from arriero.runner.caches.state import NGramCache


class NGramEmbedding:
    """Adds to each stream what the rows of a token's n-grams say to it, and a convolution of that over tokens.

    Per stream: `z = norm(key(e))·norm(stream) / √hidden`, `G = σ(sign(z)·√max(|z|, 1e-6)) · value(e)`, and the result
    `G + silu(conv(norm(G)))`, the taps n tokens apart.
    """

    def __init__(
        self,
        config: NGramsConfig,
        streams: StreamsConfig,
        dtype: mx.Dtype,
        *,
        hash_: NGramHash,
        table: ShardedTable,
        key: Linear,
        value: Linear,
        norms: tuple[StreamNorm, StreamNorm, StreamNorm],
        taps: mx.array,
    ) -> None:
        """`norms` are those of the keys, of the queries and before the convolution."""
        self.config = config
        self.streams = streams
        self.dtype = dtype
        self.hash = hash_
        self.table = table
        self.key_value = FusedLinear([key, value])
        self.key_norm, self.query_norm, self.conv_norm = norms
        self.taps = taps

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: NGramsConfig,
        streams: StreamsConfig,
        *,
        layer: int,
        baked: bool,
        resident: bool,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.1.ple`; the table is loaded only if `resident`."""

        def project(name: str, rows: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=False, shape=(rows, config.width))

        hash_ = NGramHash.of(config, config.layers.index(layer))
        stored = {
            "layer_multipliers": hash_.multipliers,
            "ngram_heads_vocab_sizes": hash_.sizes,
            "ngram_heads_offsets": hash_.offsets,
        }
        for name, expected in stored.items():
            _expect_numbers(checkpoint, f"{prefix}.ple_embedding.{name}", expected)
        key_norm, query_norm, conv_norm = (
            StreamNorm.load(checkpoint, f"{prefix}.{name}", streams, baked=baked)
            for name in ("norm_key", "norm_query", "norm_conv")
        )
        return cls(
            config,
            streams,
            dtype,
            hash_=hash_,
            table=ShardedTable.load(
                checkpoint,
                f"{prefix}.ple_embedding.ngram_embedding",
                dtype,
                shards=config.shards,
                rows=-(-hash_.rows // config.divisor) * config.divisor,
                width=config.width // config.rows_per_token,
                resident=resident,
            ),
            key=project("key_proj", streams.width),
            value=project("value_proj", streams.hidden),
            norms=(key_norm, query_norm, conv_norm),
            taps=load_taps(checkpoint, f"{prefix}.conv1d.weight", dtype, streams.width, config.taps),
        )

    def new_cache(self) -> NGramCache:
        """The last tokens, and the last inputs of the convolution."""
        c = self.config
        return NGramCache(c.size - 1, c.boundary, c.history, self.streams.width, self.dtype)

    def read_ahead(self, coming: Sequence[tuple[np.ndarray, int]]) -> None:
        """Start to fetch the rows of the next forward; see `ReadsAhead`."""
        before = np.full(self.config.size - 1, self.config.boundary, np.int32)
        parts = [self.hash(np.concatenate([before, ids])[-(count + len(before)) :]) for ids, count in coming]
        if parts:
            self.table.expect(np.concatenate(parts).reshape(-1))

    def begin(self, batch: Batch, slot: int) -> None:
        """Start to fetch the rows of this forward, where its ids are known before anything is computed."""
        if "ids" in batch.memo:
            self.table.expect(self._rows(batch, slot).reshape(-1))

    def _tokens(self, batch: Batch, slot: int) -> list[np.ndarray]:
        """Per span the ids before it that its n-grams reach, and its own."""
        return [
            np.concatenate([cache.context(), batch.ids[span.start : span.start + span.length]])
            for cache, span in zip(batch.caches(slot), batch.spans, strict=True)
        ]

    def _rows(self, batch: Batch, slot: int) -> np.ndarray:
        """Row numbers int64 `[T, heads]`, made once a forward."""
        key = ("n-gram rows", slot)
        if key not in batch.memo:
            batch.memo[key] = np.concatenate([self.hash(part) for part in self._tokens(batch, slot)])
        rows: np.ndarray = batch.memo[key]
        return rows

    def lookup(self, batch: Batch, slot: int) -> Hosted:
        """The rows of the batch's n-grams, and what the caches remember of its ids; waits for the ids."""
        contexts = self._contexts(batch, slot)
        return Hosted(self.table(self._rows(batch, slot).reshape(-1)).reshape(-1, self.config.width), contexts)

    def _contexts(self, batch: Batch, slot: int) -> Contexts:
        size = self.config.size - 1
        return [
            [ids[end : end + size] for end in [*cache.splits(span.length), span.length]]
            for ids, cache, span in zip(self._tokens(batch, slot), batch.caches(slot), batch.spans, strict=True)
        ]

    def coming(self, batch: Batch, slot: int) -> Coming:
        """The same for a forward that is built before its ids are known, where the table can do that."""
        c, count = self.config, batch.tokens.shape[0] * self.config.rows_per_token
        place = self.table.place(count)
        if place is None:
            hosted = self.lookup(batch, slot)
            return Coming(hosted.rows, lambda rows: rows, lambda: hosted.contexts)

        def fill() -> Contexts:
            self.table.put(place, self._rows(batch, slot).reshape(-1))
            return self._contexts(batch, slot)

        return Coming(place, lambda held: self.table.put_rows(held, count).reshape(-1, c.width), fill)

    def __call__(self, streams: mx.array, batch: Batch, slot: int) -> mx.array:
        """Streams `[T, streams, hidden]` to the same."""
        c = self.config
        caches: list[NGramCache] = batch.caches(slot)
        tails = [cache.get()[1].squeeze(0) for cache in caches]
        lengths = [span.length for span in batch.spans]
        stops = [cache.splits(length) for cache, length in zip(caches, lengths, strict=True)]
        hosted: Hosted | None = batch.memo.get(hosted_key(slot))
        if hosted is None:
            # The device computes the layers before this one while the host waits for the ids and collects the rows.
            mx.async_eval(streams)  # type: ignore[no-untyped-call]
            hosted = self.lookup(batch, slot)
        key, value = self.key_value(hosted.rows)
        found = _gated(self.key_norm(key.reshape(streams.shape)), self.query_norm(streams), value)
        normed = self.conv_norm(found).reshape(-1, self.streams.width)
        convolved = depthwise_conv(
            normed,
            self.taps,
            tails=tails,
            lengths=lengths,
            stops=stops,
            dilation=c.size,
            silu=True,
        )
        for i, cache in enumerate(caches):
            ends = [*convolved.interior[i], convolved.ends[i]]
            cache.put_ids(hosted.contexts[i], [tail[None] for tail in ends], lengths[i])
        return _added(streams, found, convolved.y.reshape(streams.shape))


def _gated(key: mx.array, query: mx.array, value: mx.array) -> mx.array:
    """`[T, streams, hidden]` in value's dtype, from value `[T, hidden]`."""
    z = (key.astype(mx.float32) * query.astype(mx.float32)).sum(axis=-1, keepdims=True) / math.sqrt(key.shape[-1])
    return _weighed(z, value[:, None])


@device.fused
def _weighed(z: mx.array, value: mx.array) -> mx.array:
    root = mx.sign(z) * mx.sqrt(mx.maximum(mx.abs(z), 1e-6))
    return (mx.sigmoid(root) * value.astype(mx.float32)).astype(value.dtype)


@device.fused
def _added(streams: mx.array, found: mx.array, convolved: mx.array) -> mx.array:
    total = streams.astype(mx.float32) + (found.astype(mx.float32) + convolved.astype(mx.float32))
    return total.astype(streams.dtype)


def _expect_numbers(checkpoint: Checkpoint, name: str, expected: np.ndarray) -> None:
    """CheckpointError unless the stored whole numbers are those that the configuration gives."""
    stored = checkpoint.host(name)
    expect_shape(name, tuple(stored.shape), tuple(expected.shape))
    if not np.array_equal(stored.astype(np.int64), expected):
        raise CheckpointError(
            f"tensor {name} holds {stored[:3].tolist()} …, but the configuration gives {expected[:3].tolist()} …; "
            "n-grams would be looked up in the wrong rows"
        )

"""A small random transformer that keeps the model contract, with full and sliding layers, for tests of the engine.

Its logits are spread wide enough that float32 rounding between batch shapes never decides an argmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.model.contract import Batch, Hidden, ModelFacts, RowCaches
from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache

VOCAB, HIDDEN, HEADS, HEAD_DIM = 97, 32, 2, 16


class TinyModel:
    """`layers` is one letter a layer: `f` full attention, `s` a sliding window of `window` positions."""

    def __init__(
        self, layers: str = "fs", window: int = 24, context: int = 2048, seed: int = 0, vocab: int = VOCAB
    ) -> None:
        rng = np.random.default_rng(seed)

        def weight(*shape: int) -> mx.array:
            return mx.array(rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32))

        self.layers, self.window = layers, window
        self.table = mx.array(rng.normal(0, 1, (vocab, HIDDEN)).astype(np.float32))
        self.place = mx.array(rng.normal(0, 1, (64, HIDDEN)).astype(np.float32))
        self.blocks = [(weight(HIDDEN, 3 * HEADS * HEAD_DIM), weight(HEADS * HEAD_DIM, HIDDEN)) for _ in layers]
        self.head = weight(HIDDEN, vocab) * 4
        self.forwards = 0
        per_token = len(layers) * 2 * HEADS * HEAD_DIM * 4
        self.facts = ModelFacts("tiny", vocab, HIDDEN, len(layers), context, mx.float32, per_token)

    @classmethod
    def load(cls, checkpoint: Any, dtype: mx.Dtype) -> Self:
        return cls(**checkpoint.config)

    def new_caches(self) -> RowCaches:
        return [
            KVCache(HEADS, HEAD_DIM, HEAD_DIM, mx.float32)
            if kind == "f"
            else SlidingCache(HEADS, HEAD_DIM, HEAD_DIM, mx.float32, self.window)
            for kind in self.layers
        ]

    def forward(self, batch: Batch) -> Hidden:
        self.forwards += 1
        positions = mx.array(batch.positions % len(self.place))
        x = self.table[batch.tokens] + self.place[positions]
        for slot, (inward, outward) in enumerate(self.blocks):
            qkv = (x @ inward).reshape(-1, 3, HEADS, HEAD_DIM)
            seen = [self._attend(slot, qkv[s.start : s.start + s.length], s) for s in batch.spans]
            x = x + (mx.concatenate(seen) if len(seen) > 1 else seen[0]) @ outward
            x = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        return Hidden(x)

    def _attend(self, slot: int, qkv: mx.array, span: Any) -> mx.array:
        cache = span.caches[slot]
        assert cache.offset == span.position
        q, k, v = (part.transpose(1, 0, 2)[None] for part in (qkv[:, 0], qkv[:, 1], qkv[:, 2]))
        keys, values, first = cache.append(k, v)
        here = np.arange(span.position, span.position + span.length)[:, None]
        there = np.arange(first, first + keys.shape[2])[None]
        visible = there <= here
        if self.layers[slot] == "s":
            visible &= there > here - self.window
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=HEAD_DIM**-0.5, mask=mx.array(visible))
        return out[0].transpose(1, 0, 2).reshape(span.length, -1)

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden @ self.head

    def embed(self, tokens: mx.array) -> mx.array:
        return self.table[tokens]

    def raw_logits(self, hidden: mx.array) -> mx.array:
        return self.logits(hidden)

    def parameters(self) -> Iterable[mx.array]:
        yield from (self.table, self.place, self.head)
        for block in self.blocks:
            yield from block

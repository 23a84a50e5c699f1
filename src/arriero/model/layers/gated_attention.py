"""Attention whose output is gated by its own query projection, as in Qwen 3.5 and its relatives."""

from __future__ import annotations

from typing import Self

import mlx.core as mx

from arriero.kernels.activation import sigmoid_gate
from arriero.kernels.attention_part import NotReplayable
from arriero.kernels.cuda.attention import REPLAYED, Shape
from arriero.kernels.cuda.heads import Form
from arriero.kernels.prepared_attention import PreparedAttention
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.attention import AttentionConfig, attend, spans
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.qwen_files import load_norm
from arriero.model.layers.rope import Rope
from arriero.runner.caches.full import KVCache


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
        self.surround()

    def surround(self, before: RMSNorm | None = None) -> None:
        """Take in the norm that stands before it: from now on calls include it."""
        c = self.config
        self.before = before
        self.part = PreparedAttention(
            self.qkv.matrices,
            self.out.matrix,
            Shape(c.heads, c.kv_heads, c.head_dim, c.scale),
            Form(gated=True),
            self.query_norm.pair,
            self.key_norm.pair,
            before=None if before is None else before.pair,
        )

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
        lengths, positions = spans(batch)
        angles = self.rope.angles(batch)
        if self.rope.interleaved or not self.part.fits(x.dtype, lengths, angles):
            if REPLAYED in batch.memo:
                raise NotReplayable("gated attention of plain operations has its positions in its shapes")
            return self._by_operations(x if self.before is None else self.before(x), batch, slot)
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
        """The same behind its norm, one operation after another."""
        c = self.config
        query_gate, k, v = self.qkv(x)
        q, gate = mx.split(query_gate.reshape(-1, c.heads, 2 * c.head_dim), 2, axis=-1)
        k = k.reshape(-1, c.kv_heads, c.head_dim)
        v = v.reshape(-1, c.kv_heads, c.head_dim)
        q, k = self.rope.normed(q, self.query_norm.pair, batch), self.rope.normed(k, self.key_norm.pair, batch)
        y = sigmoid_gate(attend(q, k, v, batch, slot, scale=c.scale), gate)
        return self.out(y.reshape(-1, c.heads * c.head_dim))

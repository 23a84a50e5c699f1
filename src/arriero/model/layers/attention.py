"""Attention over the rows' caches, and the grouped-query component that most decoders share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import mlx.core as mx

from arriero.kernels.attention import attention
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.rms_norm import rms_norm
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope
from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache

Held = tuple[mx.array, mx.array, int]
"""What a cache gives its queries: keys and values `[1, kv_heads, K, D]`, and the position of the first."""


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    batch: Batch,
    slot: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    mutual: bool = False,
) -> mx.array:
    """Append each span's keys and values to its cache of `slot`, then causal attention over what it holds.

    q `[T, q_heads, D]`, k `[T, kv_heads, D]`, v `[T, kv_heads, Dv]`; returns `[T, q_heads, Dv]` in q's dtype. Where
    `mutual` is set, the tokens of one image see each other, too.
    """
    held: list[Held] = []
    # One transposition for all rows; a row that is alone needs no slice.
    new_k, new_v = k[None].swapaxes(1, 2), v[None].swapaxes(1, 2)
    for span, cache in zip(batch.spans, batch.caches(slot), strict=True):
        part = slice(span.start, span.start + span.length)
        alone = span.length == q.shape[0]
        held.append(cache.append(new_k if alone else new_k[:, :, part], new_v if alone else new_v[:, :, part]))
    over = _over_images if mutual and batch.features else _over
    return over(q, held, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


def attend_to(
    q: mx.array,
    batch: Batch,
    slot: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    mutual: bool = False,
) -> mx.array:
    """Causal attention over the caches of `slot`, which another layer has appended to in this forward.

    For layers that own no cache. They see the very keys and values that the owner's queries saw. Shapes as `attend`'s;
    ValueError when the owner has not run yet.
    """
    held: list[Held] = []
    for span, cache in zip(batch.spans, batch.caches(slot), strict=True):
        if cache.offset != span.position + span.length:
            raise ValueError(
                f"slot {slot} holds {cache.offset} positions, but its readers need {span.position + span.length}"
            )
        held.append(cache.view(span.position))
    over = _over_images if mutual and batch.features else _over
    return over(q, held, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


def _over(
    q: mx.array,
    held: list[Held],
    batch: Batch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    return attention(
        q,
        [keys for keys, _, _ in held],
        [values for _, values, _ in held],
        scale=scale,
        lengths=[span.length for span in batch.spans],
        positions=[span.position for span in batch.spans],
        bases=[base for _, _, base in held],
        window=window,
        softcap=softcap,
        sinks=sinks,
        memo=batch.memo,
    )


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens of one span that are either all of one image or all text."""

    span: int
    start: int
    """On the packed axis."""
    length: int
    position: int
    image: bool


def _segments(batch: Batch) -> list[_Segment]:
    """The spans of a batch, cut at the edges of images; found once a forward."""
    found: list[_Segment] | None = batch.memo.get("segments")
    if found is None:
        found = batch.memo["segments"] = []
        ranges = [(feature.start, feature.start + feature.rows.shape[0]) for feature in batch.features]
        for index, span in enumerate(batch.spans):
            end = span.start + span.length
            inside = [(low, high) for low, high in ranges if span.start <= low < end]
            edges = sorted({span.start, end, *(edge for pair in inside for edge in pair)})
            for low, high in pairwise(edges):
                position = span.position + low - span.start
                found.append(_Segment(index, low, high - low, position, (low, high) in inside))
    return found


def _over_images(
    q: mx.array,
    held: list[Held],
    batch: Batch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention in which the queries of an image see all keys up to its end, and those of text see what came before."""
    outputs: dict[int, mx.array] = {}
    for image in (False, True):
        chosen = [segment for segment in _segments(batch) if segment.image == image]
        if not chosen:
            continue
        seen: list[Held] = []
        for segment in chosen:
            keys, values, base = held[segment.span]
            end = segment.position + segment.length - base
            seen.append((keys[:, :, :end], values[:, :, :end], base) if image else (keys, values, base))
        y = attention(
            mx.concatenate([q[segment.start : segment.start + segment.length] for segment in chosen]),
            [keys for keys, _, _ in seen],
            [values for _, values, _ in seen],
            scale=scale,
            lengths=[segment.length for segment in chosen],
            positions=[segment.position for segment in chosen],
            bases=[base for _, _, base in seen],
            window=window,
            softcap=softcap,
            sinks=sinks,
            causal=not image,
            memo=batch.memo,
        )
        done = 0
        for segment in chosen:
            outputs[segment.start] = y[done : done + segment.length]
            done += segment.length
    return mx.concatenate([outputs[start] for start in sorted(outputs)])


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shape and options of one grouped-query attention layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool | None = None
    """True: biases must exist; None: they may."""
    out_bias: bool | None = None
    norm_eps: float | None = None
    """Of the norms of each query and key head, applied before the rotation; None where there are none."""
    centred_norms: bool = False
    mutual: bool = False
    """Whether the tokens of an image see each other."""

    def cache_bytes(self, dtype: mx.Dtype, context_length: int) -> tuple[int, int]:
        """Bytes for each token of a row, and bytes that a row takes however long it is."""
        token = 2 * self.kv_heads * self.head_dim * dtype.size
        if self.window is None or self.window >= context_length:
            return token, 0
        return 0, token * (self.window + 512)


class GroupedAttention:
    """q, k and v projections, optional norms of heads, rotation (None: no positions), attention, output projection."""

    def __init__(
        self,
        config: AttentionConfig,
        rope: Rope | None,
        dtype: mx.Dtype,
        *,
        query: Linear,
        key: Linear,
        value: Linear,
        out: Linear,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
        sinks: mx.array | None = None,
    ) -> None:
        """`sinks` `[heads]` are one more logit in each head's softmax."""
        self.config = config
        self.rope = rope
        self.dtype = dtype
        self.qkv = FusedLinear([query, key, value])
        self.out = out
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.sinks = sinks
        self.surround()

    def surround(self, before: RMSNorm | None = None, after: RMSNorm | None = None) -> None:
        """Take in the norms that stand before and after it: from now on calls include them."""
        c = self.config

        def pair(norm: RMSNorm | None) -> tuple[mx.array, float] | None:
            return None if norm is None else norm.pair

        self.part = AttentionPart(
            self.qkv.matrices,
            self.out.matrix,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.scale,
            window=c.window,
            softcap=c.softcap,
            interleaved=self.rope is not None and self.rope.interleaved,
            before=pair(before),
            query_norm=pair(self.query_norm),
            key_norm=pair(self.key_norm),
            after=pair(after),
            sinks=self.sinks,
        )

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: AttentionConfig, rope: Rope | None
    ) -> Self:
        """`q_proj`, `k_proj`, `v_proj`, `o_proj`, and with `norm_eps` also `q_norm`, `k_norm`, under `prefix`."""
        c = config

        def project(name: str, heads: int) -> Linear:
            shape = (heads * c.head_dim, c.hidden)
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=c.qkv_bias, shape=shape)

        def norm(name: str) -> RMSNorm | None:
            if c.norm_eps is None:
                return None
            return RMSNorm.load(
                checkpoint, f"{prefix}.{name}", dtype, eps=c.norm_eps, width=c.head_dim, centred=c.centred_norms
            )

        return cls(
            config,
            rope,
            dtype,
            query=project("q_proj", c.heads),
            key=project("k_proj", c.kv_heads),
            value=project("v_proj", c.kv_heads),
            out=Linear.load(
                checkpoint, f"{prefix}.o_proj", dtype, bias=c.out_bias, shape=(c.hidden, c.heads * c.head_dim)
            ),
            query_norm=norm("q_norm"),
            key_norm=norm("k_norm"),
        )

    def new_cache(self) -> KVCache | SlidingCache:
        """Memory of one row: everything, or the window."""
        c = self.config
        if c.window is None:
            return KVCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype)
        return SlidingCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype, c.window)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """`[T, hidden]` to `[T, hidden]`; appends to the spans' caches of `slot`."""
        if self.config.mutual and batch.features:
            return self._with_images(x, batch, slot)
        lengths, positions = spans(batch)
        caches = batch.caches(slot)
        buffers: list[mx.array] = []
        bases: list[int] = []
        for length, cache in zip(lengths, caches, strict=True):
            keys, values, base = cache.reserve(length)
            buffers += (keys, values)
            bases.append(base)
        y, filled = self.part(
            x,
            None if self.rope is None else self.rope.angles(batch),
            buffers,
            lengths=lengths,
            positions=positions,
            bases=bases,
            memo=batch.memo,
        )
        for i, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
            cache.commit(filled[2 * i], filled[2 * i + 1], length)
        return y

    def _with_images(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """The same, step by step, with attention that shows an image's tokens to each other."""
        c, part = self.config, self.part
        normed = x if part.before is None else rms_norm(x, *part.before)
        q, k, v = (heads.reshape(-1, heads.shape[-1] // c.head_dim, c.head_dim) for heads in self.qkv(normed))
        q = q if self.query_norm is None else self.query_norm(q)
        k = k if self.key_norm is None else self.key_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, batch), self.rope(k, batch)
        y = attend(
            q, k, v, batch, slot, scale=c.scale, window=c.window, softcap=c.softcap, sinks=self.sinks, mutual=True
        )
        y = self.out(y.reshape(-1, c.heads * c.head_dim))
        return y if part.after is None else rms_norm(y, *part.after)


def spans(batch: Batch) -> tuple[list[int], list[int]]:
    """The spans' lengths and first positions, collected once a forward."""
    found: tuple[list[int], list[int]] | None = batch.memo.get("spans")
    if found is None:
        found = [span.length for span in batch.spans], [span.position for span in batch.spans]
        batch.memo["spans"] = found
    return found

"""Attention that reads chosen blocks of keys: an indexer scores them, and each query reads the best.

A query that sees no more blocks than the budget reads all of them, which is plain causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.kernels import device
from arriero.kernels.activation import sigmoid_gate
from arriero.kernels.attention import attention
from arriero.kernels.attention_part import NotReplayable
from arriero.kernels.block_select import block_select, dense_until
from arriero.kernels.cuda import indexed_few as cuda
from arriero.kernels.cuda.attention import LONGEST, REPLAYED
from arriero.kernels.cuda.source import argument
from arriero.kernels.indexed_attention import indexed_attention
from arriero.kernels.rope import rope
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.config import Fields
from arriero.model.layers.gated_attention import GatedAttention
from arriero.model.layers.linear import Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.qwen_files import load_norm
from arriero.model.layers.rope import Rope
from arriero.runner.caches.full import KVCache


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """`heads` index queries and one index key of `width` numbers; `budget` blocks of `block` tokens are read."""

    heads: int
    width: int
    block: int
    budget: int

    @classmethod
    def read(cls, fields: Fields, *, rotated: int) -> Self:
        """From the `indexer_*` fields; `rotated` elements of each head turn with the position."""
        if fields.integer("indexer_kv_heads") != 1:
            raise fields.wrong("indexer_kv_heads", "1", fields.get("indexer_kv_heads"))
        block, tokens = fields.integer("indexer_compress_ratio"), fields.integer("indexer_budget")
        if tokens % block:
            raise fields.wrong("indexer_budget", f"a multiple of indexer_compress_ratio ({block})", tokens)
        width = fields.integer("indexer_head_dim")
        if rotated > width:
            raise fields.wrong("indexer_head_dim", f"at least the {rotated} elements that rotate", width)
        return cls(heads=fields.integer("indexer_n_heads"), width=width, block=block, budget=tokens // block)

    @property
    def dense_until(self) -> int:
        """The position from which a query may miss a block."""
        return dense_until(self.block, self.budget)


class Indexer:
    """Index queries of each token, and the key of each block of tokens.

    A block's key is the mean of its tokens' raw keys, normed, and rotated by the position of the block's first token.
    The cache holds one row a token: its raw key, but for the token that completes a block, whose row is the block's
    key. No raw key is missed by that: going back before the end of a block drops the row that holds its key.
    """

    def __init__(
        self,
        config: IndexConfig,
        rope: Rope,
        dtype: mx.Dtype,
        *,
        project: Linear,
        query_norm: RMSNorm,
        key_norm: RMSNorm,
    ) -> None:
        self.config = config
        self.rope = rope
        self.dtype = dtype
        self.project = project
        self.query_norm = query_norm
        self.key_norm = key_norm

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: IndexConfig,
        rope: Rope,
        *,
        hidden: int,
        eps: float,
        baked: bool,
    ) -> Self:
        """`index_qk_proj` (the queries' rows, then the key's), `q_layernorm` and `k_layernorm` under `prefix`."""
        rows = (config.heads + 1) * config.width
        return cls(
            config,
            rope,
            dtype,
            project=Linear.load(checkpoint, f"{prefix}.index_qk_proj", dtype, bias=False, shape=(rows, hidden)),
            query_norm=load_norm(checkpoint, f"{prefix}.q_layernorm", dtype, config.width, eps, baked=baked),
            key_norm=load_norm(checkpoint, f"{prefix}.k_layernorm", dtype, config.width, eps, baked=baked),
        )

    def new_cache(self) -> KVCache:
        """One row a token, no values."""
        return KVCache(1, self.config.width, 0, self.dtype)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> tuple[mx.array, list[mx.array]]:
        """Index queries `[T, heads, width]`, and per span the keys `[blocks, width]` of its complete blocks.

        Appends the tokens' rows to the caches of `slot`.
        """
        c = self.config
        q, raw = mx.split(self.project(x), [c.heads * c.width], axis=-1)
        q = self.rope.normed(q.reshape(-1, c.heads, c.width), self.query_norm.pair, batch)
        keys: list[mx.array] = []
        rows = self._rows(raw, batch, slot)
        for span, cache, new in zip(batch.spans, batch.caches(slot), rows, strict=True):
            held, _, _ = cache.append(new[None, None], mx.zeros((1, 1, span.length, 0), self.dtype))
            keys.append(held[0, 0, c.block - 1 :: c.block])
        return q, keys

    def _rows(self, raw: mx.array, batch: Batch, slot: int) -> list[mx.array]:
        """What each span's cache gets: raw keys, and block keys where a block ends."""
        c = self.config
        rows = [raw[span.start : span.start + span.length] for span in batch.spans]
        counts = [(span.position % c.block + span.length) // c.block for span in batch.spans]
        completing = [i for i, count in enumerate(counts) if count]
        if not completing:
            return rows
        blocks: list[mx.array] = []
        for i in completing:
            start = batch.spans[i].position
            opened = start % c.block
            if opened:
                held, _ = batch.caches(slot)[i].range(start - opened, start)
                rows[i] = mx.concatenate([held[0, 0], rows[i]])
            blocks.append(rows[i][: counts[i] * c.block].reshape(counts[i], c.block, c.width))
        wide = mx.concatenate(blocks).astype(mx.float32)
        # A sum of its own for each block, in the order of its tokens, however many blocks there are.
        total = wide[:, 0]
        for token in range(1, c.block):
            total = total + wide[:, token]
        pooled = self.key_norm((total / c.block).astype(self.dtype))
        finished = rope(pooled[:, None], self._angles(counts, batch))
        done = 0
        for i, block in zip(completing, blocks, strict=True):
            keys = finished[done : done + counts[i]]
            whole = mx.concatenate([block[:, :-1], keys], axis=1).reshape(-1, c.width)
            rows[i] = mx.concatenate([whole, rows[i][whole.shape[0] :]])[batch.spans[i].position % c.block :]
            done += counts[i]
        return rows

    def _angles(self, counts: list[int], batch: Batch) -> mx.array:
        """The rope table of the first token of each block that a forward completes; all layers share it."""
        key = ("block starts", id(self.rope), self.config.block)
        if key not in batch.memo:
            block = self.config.block
            tables = []
            for span, count in zip(batch.spans, counts, strict=True):
                starts = span.position // block * block + np.arange(count, dtype=np.int32) * block
                # A block that begins in an image, perhaps in an earlier forward, has the place of that token.
                layout = span.layout
                tables.append(self.rope.table(starts) if layout is None else self.rope.axes_table(layout.at(starts)))
            batch.memo[key] = mx.array(np.concatenate(tables))
        table: mx.array = batch.memo[key]
        return table


class IndexedAttention:
    """Gated attention over the blocks that its indexer chooses, one choice for all heads of a query."""

    def __init__(self, main: GatedAttention, indexer: Indexer) -> None:
        self.main = main
        self.indexer = indexer
        self._few: cuda.Indexed | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: AttentionConfig,
        index: IndexConfig,
        rope: Rope,
        *,
        eps: float,
        baked: bool,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.3.self_attn`, and under `prefix.indexer`."""
        return cls(
            GatedAttention.load(checkpoint, prefix, dtype, config, rope, eps=eps, baked=baked),
            Indexer.load(
                checkpoint, f"{prefix}.indexer", dtype, index, rope, hidden=config.hidden, eps=eps, baked=baked
            ),
        )

    def __call__(self, x: mx.array, batch: Batch, slot: int, index_slot: int) -> mx.array:
        """x `[T, hidden]` to the same; keys and values go to `slot`, index keys to `index_slot`."""
        few = self._on_cuda(x, batch, slot, index_slot)
        if few is not None:
            return few
        if REPLAYED in batch.memo:
            raise NotReplayable("indexed attention of plain operations has its positions in its shapes")
        main, c = self.main, self.main.config
        query_gate, k, v = main.qkv(x)
        q, gate = mx.split(query_gate.reshape(-1, c.heads, 2 * c.head_dim), 2, axis=-1)
        k = k.reshape(-1, c.kv_heads, c.head_dim)
        v = v.reshape(-1, c.kv_heads, c.head_dim)
        q = main.rope.normed(q, main.query_norm.pair, batch)
        k = main.rope.normed(k, main.key_norm.pair, batch)
        index_q, block_keys = self.indexer(x, batch, index_slot)
        y = self._attend(q, k, v, index_q, block_keys, batch, slot)
        # Where everything is read nobody looks at the block keys, and what is appended would pile up uncomputed.
        y = mx.depends(y, block_keys)
        y = sigmoid_gate(y, gate)
        return main.out(y.reshape(-1, c.heads * c.head_dim))

    def _on_cuda(self, x: mx.array, batch: Batch, slot: int, index_slot: int) -> mx.array | None:
        """The same for few tokens in four launches and three products; None where there is no kernel for that."""
        gpu = device.cuda()
        if gpu is None or not gpu.in_place or batch.coordinates is not None:
            return None
        lengths = [span.length for span in batch.spans]
        if max(lengths) > LONGEST:
            return None
        what, angles = self._shape, self.main.rope.angles(batch)
        caches = list(zip(batch.caches(slot), batch.caches(index_slot), strict=True))
        held = [
            (cache.reserve(length), index.reserve(length))
            for (cache, index), length in zip(caches, lengths, strict=True)
        ]
        buffers = [part for (k, v, _), (i, _, _) in held for part in (k, v, i)]
        if self.main.rope.interleaved or not cuda.takes(what, lengths, buffers, angles, x.dtype):
            return None
        parts = [part(x) for part in self.main.qkv.parts]
        y, filled = cuda.attend(
            gpu,
            what,
            parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1),
            self.indexer.project(x),
            angles,
            buffers,
            lengths=lengths,
            positions=[span.position for span in batch.spans],
            memo=batch.memo,
        )
        for row, (length, (cache, index)) in enumerate(zip(lengths, caches, strict=True)):
            cache.commit(*filled[3 * row : 3 * row + 2], length)
            index.commit(filled[3 * row + 2], held[row][1][1], length)
        return self.main.out(y)

    @property
    def _shape(self) -> cuda.Indexed:
        """What the kernels have to know of this layer, made once."""
        if self._few is None:
            c, index, main = self.main.config, self.indexer.config, self.main
            turned = (index.block - 1) * main.rope.inverse
            self._few = cuda.Indexed(
                heads=c.heads,
                kv_heads=c.kv_heads,
                head_dim=c.head_dim,
                scale=c.scale,
                index_heads=index.heads,
                index_dim=index.width,
                block=index.block,
                budget=index.budget,
                query_gain=main.query_norm.gain.astype(mx.float32),
                key_gain=main.key_norm.gain.astype(mx.float32),
                eps=main.query_norm.eps,
                index_query_gain=self.indexer.query_norm.gain.astype(mx.float32),
                index_key_gain=self.indexer.key_norm.gain.astype(mx.float32),
                index_eps=self.indexer.query_norm.eps,
                back=argument(mx.array(np.stack([np.cos(turned), np.sin(turned)], -1).astype(np.float32))),
            )
        return self._few

    def _attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        index_q: mx.array,
        block_keys: list[mx.array],
        batch: Batch,
        slot: int,
    ) -> mx.array:
        """Queries before the position where a block can be missed read everything, the others what is chosen.

        Which of the two a query takes depends on its position alone, so that no chunk changes its bits.
        """
        scale, index = self.main.config.scale, self.indexer.config
        held = []
        for span, cache in zip(batch.spans, batch.caches(slot), strict=True):
            part = slice(span.start, span.start + span.length)
            held.append(cache.append(k[part].swapaxes(0, 1)[None], v[part].swapaxes(0, 1)[None])[:2])
        dense, chosen = _Part(), _Part()
        for i, span in enumerate(batch.spans):
            count = min(span.length, max(0, index.dense_until - span.position))
            dense.add(i, span.start, count, span.position)
            chosen.add(i, span.start + count, span.length - count, span.position + count)
        outputs: list[mx.array] = []
        if dense.spans:
            ends = [p + n for p, n in zip(dense.positions, dense.lengths, strict=True)]
            outputs.append(
                attention(
                    dense.rows(q),
                    [held[i][0][:, :, :end] for i, end in zip(dense.spans, ends, strict=True)],
                    [held[i][1][:, :, :end] for i, end in zip(dense.spans, ends, strict=True)],
                    scale=scale,
                    lengths=dense.lengths,
                    positions=dense.positions,
                    memo=batch.memo,
                )
            )
        if chosen.spans:
            where: dict[str, Any] = {"lengths": chosen.lengths, "positions": chosen.positions, "memo": batch.memo}
            blocks = block_select(
                chosen.rows(index_q),
                [block_keys[i] for i in chosen.spans],
                scale=index.width**-0.5,
                block=index.block,
                budget=index.budget,
                **where,
            )
            outputs.append(
                indexed_attention(
                    chosen.rows(q),
                    [held[i][0] for i in chosen.spans],
                    [held[i][1] for i in chosen.spans],
                    blocks,
                    scale=scale,
                    block=index.block,
                    **where,
                )
            )
        if len(outputs) == 1:
            return outputs[0]
        order = np.argsort(np.concatenate([dense.indices(), chosen.indices()]))
        return mx.concatenate(outputs)[mx.array(order.astype(np.int32))]


class _Part:
    """Some rows of a packed batch: a range of each of some spans."""

    def __init__(self) -> None:
        self.spans: list[int] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.positions: list[int] = []

    def add(self, span: int, start: int, length: int, position: int) -> None:
        if length:
            self.spans.append(span)
            self.starts.append(start)
            self.lengths.append(length)
            self.positions.append(position)

    def indices(self) -> np.ndarray:
        return np.concatenate([np.arange(s, s + n) for s, n in zip(self.starts, self.lengths, strict=True)])

    def rows(self, x: mx.array) -> mx.array:
        if sum(self.lengths) == x.shape[0]:
            return x
        parts = [x[s : s + n] for s, n in zip(self.starts, self.lengths, strict=True)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

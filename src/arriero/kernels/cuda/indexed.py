"""Attention of queries over listed blocks of their rows' caches, for prompts and for few tokens, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.attention import HEAD_DIMS, LINES, ROWS, Launch
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel, argument

SPLITS = 16
"""The most parts that a query's keys are divided into."""
COUNTERS = 1024
"""Queries times key heads up to which they are."""


def takes(q: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], width: int) -> bool:
    """Whether `attend` computes this: bfloat16, heads of 64, 128 or 256, up to 32 query heads to a key head."""
    return (
        q.size > 0
        and q.shape[2] in HEAD_DIMS
        and q.shape[1] % keys[0].shape[1] == 0
        and q.shape[1] // keys[0].shape[1] <= LINES
        and 0 < width <= 4096
        and all(x.dtype == mx.bfloat16 for x in (q, *keys, *values))
        and all(x.shape[3] == q.shape[2] for x in (*keys, *values))
    )


def launches(lengths: Sequence[int], positions: Sequence[int], memo: dict[Any, Any]) -> list[Launch]:
    """The launches of a prompt's forward, one query a group, made once for all its layers. No buffer is written."""
    key = ("cuda listed", tuple(lengths), tuple(positions))
    found: list[Launch] | None = memo.get(key)
    if found is None:
        found = []
        start = 0
        for first in range(0, len(lengths), ROWS):
            part = slice(first, first + ROWS)
            count = sum(lengths[part])
            groups = np.zeros((count, 8), np.int32)
            groups[:, 0], groups[:, 1], groups[:, 7] = np.arange(start, start + count), 1, np.arange(count)
            at = 0
            for row, (length, position) in enumerate(zip(lengths[part], positions[part], strict=True)):
                groups[at : at + length, 2] = np.arange(position, position + length)
                groups[at : at + length, 6] = row
                at += length
            if count:
                rows = len(lengths[part])
                found.append(Launch(argument(mx.array(groups)), count, rows, first, count))
            start += count
        memo[key] = found
    return found


def splits(gpu: Gpu, parts: int, reads: int) -> int:
    """Parts of each query's keys, for so many queries and key heads: enough for all multiprocessors, a power of two."""
    most = min(SPLITS, max(1, 2 * gpu.multiprocessors // parts), -(-reads // 64))
    return 1 << (most.bit_length() - 1) if parts <= COUNTERS else 1


def shared_bytes(per_head: int, dim: int, width: int) -> int:
    """Shared memory of a block."""
    padded = -(-per_head // 16) * 16
    return padded * dim * 2 + 4 * padded * (dim + 4) * 4 + 4 * padded * 8 + width * 4


@cache
def _counters() -> mx.array:
    """Zeros that each launch leaves zero."""
    made = argument(mx.zeros((COUNTERS,), mx.uint32))
    mx.eval(made)
    return made


@cache
def kernel(rows: int, threads: int, shared: int, few: bool = False) -> Kernel:
    """The kernel for the buffers of 1 or `ROWS` rows; `few`: whole ones, and results are gated."""
    return Kernel(
        name="indexed",
        inputs=(
            *("q", "blocks", "queries", "arrived"),
            *(("gates",) if few else ()),
            *(name for i in range(rows) for name in (f"k{i}", f"v{i}")),
        ),
        outputs=("out", "parts"),
        headers=("numbers", "strided", "indexed"),
        body="indexed_few_body" if few else "indexed_body",
        threads=threads,
        shared=shared,
        defines=(("BUFFERED_ROWS", str(rows)),),
        resident=2 if threads <= 128 else 1,
        # Caches are read where they are.
        contiguous=False,
    )


def padded(arrays: Sequence[mx.array]) -> list[mx.array]:
    """As many as a kernel for `ROWS` rows takes, of which nobody names those that are not there."""
    rows = 1 if len(arrays) == 1 else ROWS
    return [*arrays, *[arrays[0]] * (rows - len(arrays))]


def attend(
    gpu: Gpu,
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    blocks: mx.array,
    *,
    scale: float,
    lengths: Sequence[int],
    positions: Sequence[int],
    block: int,
    memo: dict[Any, Any],
) -> mx.array:
    """`kernels/indexed_attention.py` for what `takes` accepted: q `[T, q_heads, D]` to the same in bfloat16."""
    q, blocks = mx.contiguous(q), mx.contiguous(blocks)
    outputs: list[mx.array] = []
    start = 0
    for launch in launches(lengths, positions, memo):
        spans = slice(launch.first, launch.first + launch.rows)
        listed = blocks[start : start + launch.tokens]
        outputs.append(read(gpu, launch, q, listed, keys[spans], values[spans], scale=scale, block=block))
        start += launch.tokens
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def read(
    gpu: Gpu,
    launch: Launch,
    q: mx.array,
    blocks: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    *,
    scale: float,
    block: int,
    gates: mx.array | None = None,
) -> mx.array:
    """One launch: queries of all of `q` with the launch's own lists, keys and values; `[tokens, q_heads, D]`.

    `gates` are rows in which each head's query and gate stand side by side, by whose sigma results are multiplied; keys
    and values are then whole buffers of caches.
    """
    heads, dim = q.shape[1:]
    kv_heads, width = keys[0].shape[1], blocks.shape[1]
    per_head = heads // kv_heads
    k, v = padded(keys), padded(values)
    parts = splits(gpu, launch.count * kv_heads, (width + 1) * block)
    made = kernel(len(k), -(-per_head // 16) * 128, shared_bytes(per_head, dim, width), gates is not None)(
        [
            *(q, blocks, launch.groups, _counters()),
            *(() if gates is None else (gates,)),
            *(x for pair in zip(k, v, strict=True) for x in pair),
        ],
        {
            "D_": dim,
            "HEADS": kv_heads,
            "PER_HEAD": per_head,
            "SPLITS": parts,
            "BLOCK_": block,
            "WIDTH": width,
            "SCALE_BITS": bits_of(scale),
            **({} if gates is None else {"GATES_": gates.shape[1]}),
        },
        blocks=(parts, kv_heads, launch.count),
        shapes=[
            (launch.tokens, heads, dim),
            (launch.tokens * heads * parts * (dim + 4) if parts > 1 else 1,),
        ],
        dtypes=[mx.bfloat16, mx.float32],
    )
    return made[0]

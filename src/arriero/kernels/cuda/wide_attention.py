"""Attention of few new tokens over rows' own caches, for heads wider than `attention` takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from arriero.kernels.cuda.attention import COUNTERS, LONGEST, Launch, Shape, _counters, launches
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel
from arriero.kernels.cuda.spans import ROWS, filled, named

LINES = 16
"""Query heads of all tokens of one group, for one key head, at most."""
HEAD_DIMS = (256, 512)
SPLITS = 16


def takes(shape: Shape, lengths: Sequence[int]) -> bool:
    """Whether `attend` computes this: short spans, all keys seen, no cap, bfloat16."""
    groups = sum(-(-length // tokens_of(shape, max(lengths))) for length in lengths) if shape.per_head <= LINES else 0
    return (
        shape.head_dim in HEAD_DIMS
        and shape.window is None
        and shape.softcap is None
        and shape.heads % shape.kv_heads == 0
        and 0 < max(lengths) <= LONGEST
        and 0 < groups * shape.kv_heads <= COUNTERS
    )


def tokens_of(shape: Shape, longest: int) -> int:
    """Tokens of a group: one when every span has one, else as many as the lines hold, a power of two."""
    return 1 if longest == 1 else 1 << ((LINES // shape.per_head).bit_length() - 1)


@cache
def _kernel(rows: int, shared: int) -> Kernel:
    return Kernel(
        name="wide_attention",
        inputs=("qkv", "groups", "arrived", *named("k", rows), *named("v", rows)),
        outputs=("out", "parts"),
        headers=("numbers", "spans", "attention", "wide_attention"),
        body="wide_attention_body",
        threads=128,
        shared=shared,
        defines=(("SPANS", str(rows)),),
        # A copy of a buffer would take the new tokens in its place. Caches make them contiguous.
        contiguous=False,
    )


def attend(
    gpu: Gpu,
    shape: Shape,
    qkv: mx.array,
    buffers: Sequence[mx.array],
    *,
    lengths: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int],
    memo: dict[Any, Any],
) -> tuple[mx.array, list[mx.array]]:
    """As `attention.attend`, of heads that are normed and rotated already."""
    tokens = tokens_of(shape, max(lengths))
    capacities = [buffer.shape[2] for buffer in buffers[0::2]]
    outputs = [
        _launch(gpu, shape, launch, qkv, buffers, tokens)
        for launch in launches(lengths, positions, bases, capacities, tokens, memo)
    ]
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return y, mx.depends(list(buffers), [y])


def _launch(
    gpu: Gpu, shape: Shape, launch: Launch, qkv: mx.array, buffers: Sequence[mx.array], tokens: int
) -> mx.array:
    rows = 1 if launch.rows == 1 else ROWS
    mine = buffers[2 * launch.first : 2 * (launch.first + launch.rows)]
    lines = tokens * shape.per_head
    splits = SPLITS if launch.count == 1 else SPLITS // 4
    made = _kernel(rows, LINES * shape.head_dim * 2 + LINES * (64 + 4) * 4)(
        [qkv, launch.groups, _counters(), *filled(mine[0::2], rows), *filled(mine[1::2], rows)],
        {
            "D_": shape.head_dim,
            "HEADS": shape.kv_heads,
            "PER_HEAD": shape.per_head,
            "TOKENS": tokens,
            "SPLITS": splits,
            "SCALE_BITS": bits_of(shape.scale),
        },
        blocks=(splits, shape.kv_heads, launch.count),
        shapes=[
            (launch.tokens, shape.heads * shape.head_dim),
            (launch.count * shape.kv_heads * splits * lines * (shape.head_dim + 4),),
        ],
        dtypes=[mx.bfloat16, mx.float32],
    )
    return made[0]

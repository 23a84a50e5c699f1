"""Indexed attention of few new tokens over rows' own caches, which it appends to: four launches behind the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from arriero.kernels.cuda import attention
from arriero.kernels.cuda.attention import LONGEST, Launch
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.indexed import padded, read
from arriero.kernels.cuda.indexed_choice import HEADS, choose_few
from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel

WARPS = 4
"""Heads of a block of threads."""


@dataclass(frozen=True, eq=False, slots=True)
class Indexed:
    """What is fixed for a layer. Gains are float32, one for each number of a head."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    index_heads: int
    index_dim: int
    block: int
    budget: int
    query_gain: mx.array
    key_gain: mx.array
    eps: float
    index_query_gain: mx.array
    index_key_gain: mx.array
    index_eps: float
    back: mx.array
    """Cosines and sines float32 `[pairs, 2]` of what the last token of a block is turned further than the first."""


def takes(
    what: Indexed, lengths: Sequence[int], buffers: Sequence[mx.array], angles: mx.array, dtype: mx.Dtype
) -> bool:
    """Whether `attend` computes this: bfloat16, short spans, rotation by halves of 32 pairs or a multiple."""
    dims = what.head_dim, what.index_dim
    pairs = angles.shape[1]
    return (
        dtype == mx.bfloat16
        and 0 < max(lengths) <= LONGEST
        and sum(lengths) * what.kv_heads <= 256
        and what.head_dim in attention.HEAD_DIMS
        and what.heads % what.kv_heads == 0
        and what.heads // what.kv_heads <= attention.LINES
        and what.index_heads in HEADS
        and what.index_dim % 32 == 0
        and what.index_dim <= 256
        and what.budget <= 2048
        and pairs % 32 == 0
        and 2 * pairs <= min(dims)
        and all(buffer.dtype == mx.bfloat16 for buffer in buffers)
        and all(k.shape[2] == index.shape[2] for k, index in zip(buffers[0::3], buffers[2::3], strict=True))
    )


@cache
def prepare_kernel(rows: int) -> Kernel:
    """Norms, rotation and appends, for the buffers of 1 or 8 rows."""
    return Kernel(
        name="indexed_prepare",
        inputs=(
            *("qkv", "index", "queries", "angles", "back", "q_gain", "k_gain", "index_q_gain", "index_k_gain"),
            *(f"{kind}{row}" for row in range(rows) for kind in "kvi"),
        ),
        outputs=("q", "index_q"),
        headers=("numbers", "strided"),
        body="indexed_prepare_body",
        threads=32 * WARPS,
        defines=(("BUFFERED_ROWS", str(rows)),),
        # A copy of a buffer would take the new tokens in its place. Caches make them contiguous.
        contiguous=False,
    )


def attend(
    gpu: Gpu,
    what: Indexed,
    qkv: mx.array,
    index: mx.array,
    angles: mx.array,
    buffers: Sequence[mx.array],
    *,
    lengths: Sequence[int],
    positions: Sequence[int],
    memo: dict[Any, Any],
) -> tuple[mx.array, list[mx.array]]:
    """Gated attention over chosen blocks, `[T, heads · head_dim]`, and the filled buffers.

    `qkv` are rows of query and gate of each head, then k and v; `index` rows of the index queries, then the raw index
    key. `buffers` holds keys, values and index keys `[1, ·, capacity, ·]` of each row, which begin at position 0 and
    are written in place: only what was made of the returned ones sees the new tokens, and the given ones must not be
    used again. `takes` has accepted all of this.
    """
    qkv, index = mx.contiguous(qkv), mx.contiguous(index)
    turns = attention.angles_on_device(angles, memo)
    capacities = [buffer.shape[2] for buffer in buffers[0::3]]
    outputs = []
    for launch in attention.launches(lengths, positions, [0] * len(lengths), capacities, 1, memo):
        part = slice(3 * launch.first, 3 * (launch.first + launch.rows))
        outputs.append(_launch(gpu, what, launch, qkv, index, turns, buffers[part]))
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return y.reshape(y.shape[0], -1), mx.depends(list(buffers), [y])


def _launch(
    gpu: Gpu,
    what: Indexed,
    launch: Launch,
    qkv: mx.array,
    index: mx.array,
    angles: mx.array,
    buffers: Sequence[mx.array],
) -> mx.array:
    columns = [padded(buffers[kind::3]) for kind in range(3)]
    tasks = what.heads + 2 * what.kv_heads + what.index_heads + 1
    # Rows of other launches stay unwritten, and nobody reads them.
    q, index_q = prepare_kernel(len(columns[0]))(
        [
            *(qkv, index, launch.groups, angles, what.back),
            *(what.query_gain, what.key_gain, what.index_query_gain, what.index_key_gain),
            *(x for row in zip(*columns, strict=True) for x in row),
        ],
        {
            "D_": what.head_dim,
            "W_": what.index_dim,
            "QUERIES": what.heads,
            "KEYS": what.kv_heads,
            "INDEX": what.index_heads,
            "HALF": what.back.size // 2,
            "BLOCK_": what.block,
            "EPS_BITS": bits_of(what.eps),
            "INDEX_EPS_BITS": bits_of(what.index_eps),
        },
        blocks=(-(-tasks // WARPS), launch.count, 1),
        shapes=[
            (qkv.shape[0], what.heads, what.head_dim),
            (qkv.shape[0], what.index_heads, what.index_dim),
        ],
        dtypes=[mx.bfloat16, mx.bfloat16],
    )
    blocks = choose_few(
        gpu,
        launch,
        index_q,
        buffers[2::3],
        scale=what.index_dim**-0.5,
        block=what.block,
        budget=what.budget,
    )
    # Their queries come from the kernel that has written the buffers, so these are launched behind it.
    return read(gpu, launch, q, blocks, buffers[0::3], buffers[1::3], scale=what.scale, block=what.block, gates=qkv)

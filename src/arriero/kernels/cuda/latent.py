"""Latent attention of few new tokens over rows' own caches: norm, rotation, append in place and softmax at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from arriero.kernels.cuda.attention import LONGEST, Launch, angles_on_device, launches
from arriero.kernels.cuda.gathering import gathered, wanted
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel
from arriero.kernels.cuda.spans import ROWS, filled, named

LINES = 16
"""Heads of tokens that a block takes."""
TOKENS = 8
"""The most tokens of a group."""
MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed for a layer; widths are numbers of elements."""

    heads: int
    rank: int
    """Of the latent, which is the value too."""
    rotated: int
    nope: int
    """Of a head's query, what is absorbed."""
    scale: float
    interleaved: bool
    """Whether rotary pairs are neighbours."""

    @property
    def width(self) -> int:
        """Of what is cached of a token."""
        return self.rank + self.rotated


def takes(gpu: Gpu, shape: Shape, lengths: Sequence[int], angles: mx.array, norm: Norm) -> bool:
    """Whether `attend` computes this, for bfloat16: short spans, latents of multiples of 256."""
    return (
        shape.rank % 256 == 0
        and shape.rotated % 32 == 0
        and angles.shape[1] * 2 == shape.rotated
        and norm[0].dtype in (mx.bfloat16, mx.float32)
        and 0 < max(lengths) <= LONGEST
        and buffers_for(gpu, shape) > 0
    )


def tokens_of(longest: int) -> int:
    """Tokens of a group."""
    return min(TOKENS, longest)


def _blocks(shape: Shape, tokens: int) -> int:
    """Of lines of a group."""
    return -(-tokens * shape.heads // LINES)


def splits(gpu: Gpu, shape: Shape, blocks: int) -> int:
    """Parts that a row's keys are divided into, where without that there would be so many blocks: all fit at once."""
    most = max(1, min(MOST_SPLITS, shape.rank // 4, gpu.multiprocessors // blocks)) if wanted() else 1
    power: int = 1 << (most.bit_length() - 1)
    return power


def shared_bytes(shape: Shape, buffers: int) -> int:
    """Shared memory of a block: queries, as many times 64 keys, and scores; then a weight for each split."""
    line = shape.width + (20 + 32 - shape.width // 2 % 32) % 32 * 2
    return max((LINES + 64 * buffers) * line * 2 + LINES * (64 + 4) * 4, LINES * MOST_SPLITS * 4)


def buffers_for(gpu: Gpu, shape: Shape) -> int:
    """How many times 64 keys shared memory has room for: those in use, and the next on their way; 0 for none."""
    return next((count for count in (2, 1) if shared_bytes(shape, count) + 1024 <= gpu.shared_memory), 0)


@cache
def kernel(rows: int, shared: int, together: bool) -> Kernel:
    """The kernel for the buffers of 1 or `ROWS` rows; `together`: queries and what is new are rows of one array."""
    return Kernel(
        name="latent",
        inputs=(
            *("absorbed", "queries", *(() if together else ("fresh",)), "angles", "gain", "groups", "gathered"),
            *named("k", rows),
        ),
        outputs=("out", "parts"),
        headers=("numbers", "spans", "attention", "copies", "latent"),
        body="latent_body",
        threads=128,
        shared=shared,
        defines=(("SPANS", str(rows)), ("FRESH", "queries" if together else "fresh")),
        phases=2,
        # A copy of a buffer would take the new tokens in its place. Caches make them contiguous.
        contiguous=False,
    )


def attend(
    gpu: Gpu,
    shape: Shape,
    absorbed: mx.array,
    queries: mx.array,
    fresh: mx.array,
    angles: mx.array,
    norm: Norm,
    buffers: Sequence[mx.array],
    *,
    begin: int = 0,
    lengths: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int],
    memo: dict[Any, Any],
) -> tuple[mx.array, list[mx.array]]:
    """The heads' sums of latents `[T, heads, rank]`, and the filled buffers.

    `absorbed` `[heads, T, rank]`, `queries` `[T, heads · (nope + rotated)]` of which the parts behind `nope` are read,
    and `fresh` `[T, begin + rank + rotated]` before its norm and rotation, which may be the same array. All are
    bfloat16 and contiguous. `buffers` `[1, 1, capacity, rank + rotated]` are written in place, as `attention.attend`
    says.
    """
    tokens = tokens_of(max(lengths))
    capacities = [buffer.shape[2] for buffer in buffers]
    turns = angles_on_device(angles, memo)
    outputs = [
        _launch(gpu, shape, launch, absorbed, queries, fresh, turns, norm, buffers, tokens, begin)
        for launch in launches(lengths, positions, bases, capacities, tokens, memo)
    ]
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return y, mx.depends(list(buffers), [y])


def _launch(
    gpu: Gpu,
    shape: Shape,
    launch: Launch,
    absorbed: mx.array,
    queries: mx.array,
    fresh: mx.array,
    angles: mx.array,
    norm: Norm,
    buffers: Sequence[mx.array],
    tokens: int,
    begin: int,
) -> mx.array:
    rows = 1 if launch.rows == 1 else ROWS
    mine = buffers[launch.first : launch.first + launch.rows]
    blocks = _blocks(shape, tokens)
    parts = splits(gpu, shape, blocks * launch.count)
    together = fresh is queries
    counts = gathered(parts * blocks * launch.count)
    buffers_of = buffers_for(gpu, shape)
    made = kernel(rows, shared_bytes(shape, buffers_of), together)(
        [
            *(absorbed, queries, *([] if together else [fresh]), angles, norm[0], launch.groups, counts),
            *filled(mine, rows),
        ],
        {
            "HEADS": shape.heads,
            "RANK": shape.rank,
            "ROTATED": shape.rotated,
            "NOPE": shape.nope,
            "QUERY_WIDTH": queries.shape[1],
            "FRESH_WIDTH": fresh.shape[1],
            "FRESH_FROM": begin,
            "SPLITS": parts,
            "BLOCKS": blocks,
            "BUFFERS": buffers_of,
            "INTERLEAVED": shape.interleaved,
            "WIDE_GAIN": norm[0].dtype == mx.float32,
            "EPS_BITS": bits_of(norm[1]),
            "SCALE_BITS": bits_of(shape.scale),
        },
        blocks=(parts * blocks * launch.count, 1, 1),
        shapes=[
            (launch.tokens, shape.heads, shape.rank),
            (launch.count * blocks * parts * LINES * (shape.rank + 4),),
        ],
        dtypes=[mx.bfloat16, mx.float32],
    )
    return made[0]

"""Attention of few new tokens over rows' own caches: norms of heads, rotation, append in place and softmax at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel, argument

LINES = 32
"""Query heads of all tokens of one group, for one key head, at most: what fits the registers."""
ROWS = 8
"""The most rows whose buffers one launch takes."""
LONGEST = 32
"""The most new tokens of a row; longer spans are prompts."""
HEAD_DIMS = (64, 128, 256)
COUNTERS = 8192
GROUPS, ANGLES = "cuda groups", "cuda angles"
"""What the keys of a forward's memo begin with: `(GROUPS, tokens, bases, capacities)` for its launches, `(ANGLES, id)`
for a table of angles on the device."""
REPLAYED = "replayed"
"""A key of the memo of a forward that is recorded: nothing in it may depend on positions but by those two."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed for a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    all_new: bool = False
    """Whether a token sees the new tokens behind it as well; only where all of a row's are one group."""

    @property
    def per_head(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Of the rows that hold q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def takes(
    shape: Shape,
    lengths: Sequence[int],
    buffers: Sequence[mx.array],
    angles: mx.array | None,
    norms: Sequence[Norm | None],
) -> bool:
    """Whether `attend` computes this: short spans, whole rotations by halves, bfloat16."""
    gains = [norm[0].dtype for norm in norms if norm is not None]
    return (
        shape.head_dim in HEAD_DIMS
        and shape.heads % shape.kv_heads == 0
        and shape.per_head <= LINES
        and 0 < max(lengths) <= LONGEST
        and all(buffer.dtype == mx.bfloat16 for buffer in buffers)
        and (angles is None or angles.shape[1] == shape.head_dim // 2)
        and all(gain in (mx.bfloat16, mx.float32) for gain in gains)
        and len(set(gains)) <= 1
        and sum(-(-length // tokens_of(shape, max(lengths))) for length in lengths) * shape.kv_heads <= COUNTERS
    )


def tokens_of(shape: Shape, longest: int) -> int:
    """Tokens of a group: one when every span has one, else as many as the lines hold, a power of two."""
    most = LINES // shape.per_head
    return 1 if longest == 1 else 1 << (most.bit_length() - 1)


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """The rows of one launch."""

    groups: mx.array
    """int32 `[groups, 8]`, as attention.cu names them."""
    count: int
    rows: int
    """How many rows' buffers, from `first` on."""
    first: int
    tokens: int
    """New tokens of these rows."""


def table(
    lengths: Sequence[int], places: Sequence[int], capacities: Sequence[int], tokens: int, first: int
) -> np.ndarray:
    """Groups int32 `[groups, 8]` of up to `ROWS` rows: `lengths[i]` new tokens each, the first at `places[i]`.

    `first` is the first token on the packed axis; results are numbered from there.
    """
    lines: list[tuple[int, ...]] = []
    start = first
    for row, (length, place, capacity) in enumerate(zip(lengths, places, capacities, strict=True)):
        for begin in range(0, length, tokens):
            count = min(tokens, length - begin)
            query = start + begin
            lines.append((query, count, place + begin, start, place, capacity, row, query - first))
        start += length
    return np.array(lines, np.int32)


def tables(
    lengths: Sequence[int], positions: Sequence[int], bases: Sequence[int], capacities: Sequence[int], tokens: int
) -> list[np.ndarray]:
    """The groups of each launch of a forward, `ROWS` rows each."""
    places = [position - base for position, base in zip(positions, bases, strict=True)]
    made: list[np.ndarray] = []
    start = 0
    for first in range(0, len(lengths), ROWS):
        part = slice(first, first + ROWS)
        made.append(table(lengths[part], places[part], capacities[part], tokens, start))
        start += sum(lengths[part])
    return made


def launches(
    lengths: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int],
    capacities: Sequence[int],
    tokens: int,
    memo: dict[Any, Any],
) -> list[Launch]:
    """The launches of a forward, made once for all layers whose buffers are alike."""
    key = (GROUPS, tokens, tuple(bases), tuple(capacities))
    found: list[Launch] | None = memo.get(key)
    if found is None:
        made = tables(lengths, positions, bases, capacities, tokens)
        found = memo[key] = launched(lengths, [argument(mx.array(t)) for t in made], [len(t) for t in made])
    return found


def launched(lengths: Sequence[int], groups: Sequence[mx.array], counts: Sequence[int]) -> list[Launch]:
    """Launches of tables that are on the device, with so many groups each."""
    made: list[Launch] = []
    for i, (of, count) in enumerate(zip(groups, counts, strict=True)):
        part = lengths[i * ROWS : (i + 1) * ROWS]
        made.append(Launch(of, count, len(part), i * ROWS, sum(part)))
    return made


def give_angles(memo: dict[Any, Any], angles: mx.array) -> None:
    """Say that a forward's angles are in the device's own memory already."""
    memo[ANGLES, id(angles)] = (angles, angles)


def splits(gpu: Gpu, kv_heads: int, groups: int) -> int:
    """Parts that a row's keys are divided into: as many blocks as multiprocessors, for one group and for several."""
    alone = max(1, min(16, gpu.multiprocessors // kv_heads))
    power: int = 1 << (alone.bit_length() - 1)
    return power if groups == 1 else max(1, power // 4)


def shared_bytes(shape: Shape, tokens: int) -> int:
    """Shared memory of a block."""
    padded = -(-tokens * shape.per_head // 16) * 16
    return padded * shape.head_dim * 2 + 4 * padded * (shape.head_dim + 4) * 4 + 4 * padded * 8


@cache
def _counters() -> mx.array:
    """Zeros that each launch leaves zero."""
    made = argument(mx.zeros((COUNTERS,), mx.uint32))
    mx.eval(made)
    return made


@cache
def kernel(
    rows: int, threads: int, shared: int, angles: bool, q_gain: bool, k_gain: bool, sinks: bool = False
) -> Kernel:
    """The kernel for the buffers of 1 or `ROWS` rows."""
    optional = {"angles": angles, "q_gain": q_gain, "k_gain": k_gain, "sinks": sinks}
    buffers = [name for i in range(rows) for name in (f"k{i}", f"v{i}")]
    return Kernel(
        name="attention",
        inputs=("qkv", "groups", "arrived", *(name for name, given in optional.items() if given), *buffers),
        outputs=("out", "parts"),
        headers=("numbers", "attention"),
        body="attention_body",
        threads=threads,
        shared=shared,
        defines=(
            ("BUFFERED_ROWS", str(rows)),
            *((name.upper(), name if given else "nullptr") for name, given in optional.items()),
        ),
        # A copy of a buffer would take the new tokens in its place. Caches make them contiguous.
        contiguous=False,
    )


def attend(
    gpu: Gpu,
    shape: Shape,
    qkv: mx.array,
    angles: mx.array | None,
    buffers: Sequence[mx.array],
    *,
    lengths: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int],
    query_norm: Norm | None,
    key_norm: Norm | None,
    memo: dict[Any, Any],
    sinks: mx.array | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Attention of the new tokens' rows `[T, width]` of q, k and v: `[T, heads · head_dim]`, and the filled buffers.

    The arguments are those of `AttentionPart`, and `takes` has accepted them; `sinks` are bfloat16 `[heads]`. The
    buffers are written in place: only what was made of the returned ones sees the new tokens, and the given ones must
    not be used again.
    """
    longest = max(lengths)
    tokens = tokens_of(shape, longest)
    capacities = [buffer.shape[2] for buffer in buffers[0::2]]
    turns = None if angles is None else angles_on_device(angles, memo)
    outputs = [
        _launch(gpu, shape, launch, qkv, turns, buffers, query_norm, key_norm, tokens, sinks)
        for launch in launches(lengths, positions, bases, capacities, tokens, memo)
    ]
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return y, mx.depends(list(buffers), [y])


def behind(
    gpu: Gpu,
    shape: Shape,
    qkv: mx.array,
    angles: mx.array | None,
    buffers: Sequence[mx.array],
    group: mx.array,
    *,
    tokens: int,
    query_norm: Norm | None,
    key_norm: Norm | None,
) -> mx.array:
    """Attention of one group, `[tokens, heads · head_dim]`, whose row's other new tokens ask nothing.

    `group` is int32 `[8]` as attention.cu names its numbers, in the device's own memory, as `angles` are. The buffers
    are written in place; whoever reads them next must depend on the result.
    """
    launch = Launch(group, 1, 1, 0, tokens)
    return _launch(gpu, shape, launch, qkv, angles, buffers, query_norm, key_norm, tokens_of(shape, tokens))


def angles_on_device(angles: mx.array, memo: dict[Any, Any]) -> mx.array:
    """The table of angles in the device's own memory, copied once a forward."""
    key = (ANGLES, id(angles))
    found: tuple[mx.array, mx.array] | None = memo.get(key)
    if found is None:
        found = memo[key] = (angles, argument(angles))
    return found[1]


def _launch(
    gpu: Gpu,
    shape: Shape,
    launch: Launch,
    qkv: mx.array,
    angles: mx.array | None,
    buffers: Sequence[mx.array],
    query_norm: Norm | None,
    key_norm: Norm | None,
    tokens: int,
    sinks: mx.array | None = None,
) -> mx.array:
    rows = 1 if launch.rows == 1 else ROWS
    mine = list(buffers[2 * launch.first : 2 * (launch.first + launch.rows)])
    # A kernel for 8 rows takes the first row's buffers for those that are not there; no group names them.
    mine += mine[:2] * (rows - launch.rows)
    lines = tokens * shape.per_head
    parts = splits(gpu, shape.kv_heads, launch.count)
    gains = [norm[0] for norm in (query_norm, key_norm) if norm is not None]
    given = [array for array in (angles, *gains, sinks) if array is not None]
    inputs = [qkv, launch.groups, _counters(), *given, *mine]
    made = kernel(
        rows,
        -(-lines // 16) * 128,
        shared_bytes(shape, tokens),
        angles is not None,
        query_norm is not None,
        key_norm is not None,
        sinks is not None,
    )(
        inputs,
        {
            "D_": shape.head_dim,
            "HEADS": shape.kv_heads,
            "PER_HEAD": shape.per_head,
            "TOKENS": tokens,
            "SPLITS": parts,
            "WINDOW": shape.window or 0,
            "CAPPED": shape.softcap is not None,
            "NORM_Q": query_norm is not None,
            "NORM_K": key_norm is not None,
            "WIDE_GAIN": any(gain.dtype == mx.float32 for gain in gains),
            "ROTATE": angles is not None,
            "ALL_NEW": shape.all_new,
            "SCALE_BITS": bits_of(shape.scale),
            "CAP_BITS": bits_of(shape.softcap or 0.0),
            "Q_EPS_BITS": bits_of(query_norm[1] if query_norm is not None else 0.0),
            "K_EPS_BITS": bits_of(key_norm[1] if key_norm is not None else 0.0),
        },
        blocks=(parts, shape.kv_heads, launch.count),
        shapes=[
            (launch.tokens, shape.heads * shape.head_dim),
            (launch.count * shape.kv_heads * parts * lines * (shape.head_dim + 4),),
        ],
        dtypes=[mx.bfloat16, mx.float32],
    )
    return made[0]

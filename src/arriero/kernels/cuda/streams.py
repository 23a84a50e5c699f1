"""Hyper-connections in few launches: a write and the norm behind it, and the mix that a part of a layer takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.formats import FORMATS
from arriero.kernels.cuda.product import bits_of
from arriero.kernels.cuda.source import Kernel

MXFP8 = FORMATS["mxfp8", 8, 32].code
DENSE = 15
"""What stands for bfloat16 among the numbers of formats. MLX makes names of them: they must not be negative."""
FEW = 32
"""Tokens up to which the gates are made by the kernel that mixes."""
TOGETHER = 8
"""Tokens that share each reading of a row."""
MIXING = 256
"""Threads of a block that mixes."""


def takes(streams: mx.array) -> bool:
    """Whether the kernels have streams `[T, count, hidden]` of this form."""
    _, count, hidden = streams.shape
    return streams.dtype == mx.bfloat16 and streams.size > 0 and count <= 8 and hidden % 8 == 0


@dataclass(frozen=True, eq=False, slots=True)
class Up:
    """A matrix in bfloat16, or in MXFP8 with its scales: that of gates `[count · hidden, rank]`, or the one before."""

    w: mx.array
    scales: mx.array | None
    rank: int
    """Its columns."""

    @classmethod
    def of(cls, w: mx.array, scales: mx.array | None, mode: str, bits: int) -> Up | None:
        """None for what the kernels do not take."""
        if scales is None:
            rank = w.shape[1]
            return cls(w, None, rank) if w.dtype == mx.bfloat16 and rank % 2 == 0 else None
        return cls(w, scales, w.shape[1] * 32 // bits) if (mode, bits) == ("mxfp8", 8) else None


@dataclass(frozen=True, eq=False, slots=True)
class Normed:
    """Streams with what was written to them, their norms, and each stream's shares of the injected weights."""

    streams: mx.array
    normed: mx.array
    shares: mx.array | None


@cache
def norm_kernel(threads: int, writes: bool, injects: bool) -> Kernel:
    """The kernel that writes and norms."""
    written, injected = ("branch", "weights"), ("inject",)
    return Kernel(
        name="streams_norm",
        inputs=("streams", "gain", *(written if writes else ()), *(injected if injects else ())),
        outputs=("normed", *(("sums",) if writes else ()), *(("shares",) if injects else ())),
        headers=("numbers",),
        body="streams_norm_body",
        threads=threads,
        defines=(
            *((name.upper(), name if writes else "nullptr") for name in (*written, "sums")),
            *((name.upper(), name if injects else "nullptr") for name in (*injected, "shares")),
        ),
    )


def norm(
    streams: mx.array,
    gain: mx.array,
    eps: float,
    *,
    written: tuple[mx.array, mx.array] | None = None,
    inject: mx.array | None = None,
) -> Normed:
    """Norms of bfloat16 streams `[T, count, hidden]`, gain float32 `[count, hidden]`, in one launch.

    `written` are a result y `[T, hidden]` and the float32 weights `[T, count]` with which it is added first. `inject`
    `[count, count · hidden]` is the matrix of the next weights.
    """
    tokens, count, hidden = streams.shape
    threads = min(512, -(-hidden // 256) * 32)
    shapes: list[tuple[int, ...]] = [streams.shape]
    dtypes = [mx.bfloat16]
    if written is not None:
        shapes.append(streams.shape)
        dtypes.append(mx.bfloat16)
    if inject is not None:
        shapes.append((tokens, count, count))
        dtypes.append(mx.float32)
    made = norm_kernel(threads, written is not None, inject is not None)(
        [streams, gain, *(written or ()), *(() if inject is None else (inject,))],
        {
            "COUNT": count,
            "HIDDEN": hidden,
            "WRITES": written is not None,
            "INJECTS": inject is not None,
            "EPS_BITS": bits_of(eps),
        },
        blocks=(count, tokens, 1),
        shapes=shapes,
        dtypes=dtypes,
    )
    return Normed(streams if written is None else made[1], made[0], None if inject is None else made[-1])


@cache
def low_kernel() -> Kernel:
    """The kernel of the product that everything else of a read waits for."""
    return Kernel(
        name="streams_low",
        inputs=("normed", "down", "scales"),
        outputs=("low_rank",),
        headers=("numbers", "formats"),
        body="streams_low_body",
        threads=256,
    )


def fits_low(tokens: int, down: Up | None, columns: int) -> bool:
    """Whether `low_rank` computes this; it divides a matrix of few rows among all multiprocessors."""
    return down is not None and down.scales is not None and tokens <= TOGETHER and columns <= 1 << 14


def low_rank(normed: mx.array, down: Up) -> mx.array:
    """`normed [T, columns]` times a transposed matrix `[rank, columns]` that `fits_low` has accepted: `[T, rank]`."""
    tokens, columns = normed.shape
    rank = down.w.shape[0]
    rows = 2 if rank % 2 == 0 else 1
    together = 1 if tokens == 1 else TOGETHER
    made = low_kernel()(
        [normed, down.w, down.scales] if down.scales is not None else [],
        {"RANK": rank, "COLUMNS": columns, "ROWS": rows, "TOKENS": together},
        blocks=(rank // rows, -(-tokens // together), 1),
        shapes=[(tokens, rank)],
        dtypes=[mx.bfloat16],
    )
    return made[0]


@cache
def mix_kernel(scaled: bool, injects: bool) -> Kernel:
    """The kernel that makes gates and mixes."""
    return Kernel(
        name="streams_mix",
        inputs=("low_rank", "normed", "up", *(("scales",) if scaled else ()), *(("shares",) if injects else ())),
        outputs=("mixed", *(("weights",) if injects else ())),
        headers=("numbers", "formats"),
        body="streams_mix_body",
        threads=MIXING,
        defines=(
            ("SCALES", "scales" if scaled else "nullptr"),
            ("SHARES", "shares" if injects else "nullptr"),
            ("WEIGHTS", "weights" if injects else "nullptr"),
        ),
    )


def mix(low: mx.array, of: Normed, up: Up) -> tuple[mx.array, mx.array | None]:
    """From low `[T, rank]` and normed streams: the mix `[T, hidden]`, and the weights `[T, count]` float32 if any."""
    tokens, count, hidden = of.normed.shape
    together = 1 if tokens == 1 else TOGETHER
    made = mix_kernel(up.scales is not None, of.shares is not None)(
        [low, of.normed, up.w, *(x for x in (up.scales, of.shares) if x is not None)],
        {
            "COUNT": count,
            "HIDDEN": hidden,
            "RANK": up.rank,
            "TOKENS": together,
            "MODE": DENSE if up.scales is None else MXFP8,
            "INJECTS": of.shares is not None,
        },
        blocks=(-(-hidden // (MIXING // 32)), -(-tokens // together), 1),
        shapes=[(tokens, hidden), *([] if of.shares is None else [(tokens, count)])],
        dtypes=[mx.bfloat16, *([] if of.shares is None else [mx.float32])],
    )
    return made[0], None if of.shares is None else made[1]


@cache
def gate_kernel() -> Kernel:
    """The kernel that mixes by gates that are there."""
    return Kernel(
        name="streams_gate",
        inputs=("gate", "normed"),
        outputs=("mixed",),
        headers=("numbers",),
        body="streams_gate_body",
        threads=256,
    )


def gated(gate: mx.array, normed: mx.array) -> mx.array:
    """The mean `[T, hidden]` of normed streams `[T, count, hidden]`, each times sigma of its gate."""
    tokens, count, hidden = normed.shape
    made = gate_kernel()(
        [gate, normed],
        {"COUNT": count, "HIDDEN": hidden},
        blocks=(-(-tokens * hidden // 8 // 256), 1, 1),
        shapes=[(tokens, hidden)],
        dtypes=[mx.bfloat16],
    )
    return made[0]

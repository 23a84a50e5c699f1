"""Causal depthwise convolutions over spans with tails of their own, in one launch for up to 8 spans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.source import Kernel
from arriero.kernels.cuda.spans import ROWS, filled, named, table

THREADS = 128
RUN = 16
"""Tokens that one thread goes through."""
MOST_TAPS = 16


def takes(x: mx.array, w: mx.array, bias: mx.array | None) -> bool:
    """Whether `depthwise_conv` computes this: x `[T, channels]`, w `[taps, channels]`."""
    return (
        x.dtype in (mx.bfloat16, mx.float32)
        and w.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
        and x.shape[1] % 2 == 0
        and 2 <= w.shape[0] <= MOST_TAPS
    )


@cache
def kernel(spans: int, biased: bool, stops: bool) -> Kernel:
    """The kernel for the tails of 1 or `ROWS` spans."""
    return Kernel(
        name="depthwise_conv",
        inputs=("x", "taps", *(("bias",) if biased else ()), "table", *named("t", spans)),
        outputs=("out", *named("t_end", spans), *(named("t_kept", spans) if stops else ())),
        headers=("numbers", "spans"),
        body="conv_body",
        threads=THREADS,
        defines=(
            ("SPANS", str(spans)),
            *((("STOPS", "1"),) if stops else ()),
            ("BIAS", "bias" if biased else "nullptr"),
        ),
    )


def depthwise_conv(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    *,
    tails: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Sequence[Sequence[int]],
    dilation: int,
    silu: bool,
) -> tuple[mx.array, list[list[mx.array]]]:
    """As `kernels/depthwise_conv.py`: rows, and each span's tails after its stops and at its end."""
    outputs: list[mx.array] = []
    every: list[list[mx.array]] = []
    start = 0
    for first in range(0, len(lengths), ROWS):
        some = slice(first, first + ROWS)
        count = sum(lengths[some])
        part = x if len(lengths) <= ROWS else x[start : start + count]
        cuts = tuple(tuple(wanted) for wanted in stops[some])
        y, found = _launch(part, w, bias, tails[some], tuple(lengths[some]), cuts, dilation, silu)
        outputs.append(y)
        every += found
        start += count
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), every


def _launch(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    tails: Sequence[mx.array],
    lengths: tuple[int, ...],
    stops: tuple[tuple[int, ...], ...],
    dilation: int,
    silu: bool,
) -> tuple[mx.array, list[list[mx.array]]]:
    count, spans, kept = len(lengths), 1 if len(lengths) == 1 else ROWS, any(stops)
    channels, history = x.shape[1], (w.shape[0] - 1) * dilation
    nothing: list[tuple[int, ...]] = [(1,)] * (spans - count)
    shapes: list[tuple[int, ...]] = [x.shape, *[(history, channels)] * count, *nothing]
    if kept:
        shapes += [(len(wanted), history, channels) if wanted else (1,) for wanted in stops] + nothing
    y, *rest = kernel(spans, bias is not None, kept)(
        [x, w, *([] if bias is None else [bias]), table(lengths, stops), *filled(tails, spans)],
        {
            "CHANNELS": channels,
            "TAPS": w.shape[0],
            "DILATION": dilation,
            "RUN": RUN,
            "WIDE": x.dtype == mx.float32,
            "BIASED": bias is not None,
            "SILU": silu,
        },
        blocks=(-(-channels // (2 * THREADS)), -(-max(lengths) // RUN), count),
        shapes=shapes,
        dtypes=[x.dtype] * len(shapes),
    )
    every = [[*(rest[spans + i][j] for j in range(len(stops[i]))), rest[i]] for i in range(count)]
    return y, every

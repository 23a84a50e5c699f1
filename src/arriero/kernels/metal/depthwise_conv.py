"""Causal depthwise convolution over spans, and the tails that go on from them, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx

from arriero.kernels.metal.source import TYPES, Launch, kernel, on_device

MOST_TAPS = 16
"""Each number of taps is a kernel of its own, which keeps them in registers."""
CHANNELS = 256
"""Of a threadgroup."""


def takes(x: mx.array, w: mx.array, bias: mx.array | None) -> bool:
    """Whether the kernel has this form: x `[T, channels]`, w `[taps, channels]`."""
    types = {w.dtype} if bias is None else {w.dtype, bias.dtype}
    return x.dtype in TYPES and types <= set(TYPES) and 1 < w.shape[0] <= MOST_TAPS and x.size > 0


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
    launch: Launch | None = None,
) -> tuple[mx.array, list[list[mx.array]]]:
    """`kernels/depthwise_conv.py`: y, and for each span its tails after each of its `stops` and after all of it."""
    rows, channels = x.shape
    history = tails[0].shape[0]
    edges = list(accumulate(lengths, initial=0))
    ends = [[*inside, length] for inside, length in zip(stops, lengths, strict=True)]
    cuts = [number for span, wanted in enumerate(ends) for stop in wanted for number in (span, stop)]
    count = len(cuts) // 2
    y, kept = (launch or kernel("depthwise_conv"))(
        inputs=[
            x,
            w,
            w if bias is None else bias,
            tails[0] if len(tails) == 1 else mx.concatenate(list(tails)),
            on_device(mx.array(edges, mx.int32), rows),
            on_device(mx.array(cuts, mx.int32), 0),
            mx.array([channels, rows, dilation], mx.int32),
        ],
        template=[
            ("T", x.dtype),
            ("W", w.dtype),
            ("B", w.dtype if bias is None else bias.dtype),
            ("TAPS", w.shape[0]),
            ("BIAS", bias is not None),
            ("SILU", silu),
        ],
        grid=(channels, rows + count * history, 1),
        threadgroup=(min(channels, CHANNELS), 1, 1),
        output_shapes=[x.shape, (count, history, channels)],
        output_dtypes=[x.dtype, x.dtype],
    )
    first = list(accumulate((len(wanted) for wanted in ends), initial=0))
    return y, [[kept[first[i] + j] for j in range(len(wanted))] for i, wanted in enumerate(ends)]

"""Causal depthwise convolution over packed rows, each span behind its own tail of earlier rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import conv as cuda
from arriero.kernels.metal import depthwise_conv as metal
from arriero.kernels.spans import Carried, Stops, carried, checked_stops, joined

NATIVE_TAPS = 16
"""Taps that the CPU extension takes."""


def depthwise_conv(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None = None,
    *,
    tails: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops | None = None,
    dilation: int = 1,
    silu: bool = False,
) -> Carried:
    """`y[t] = Σ_j w[j] · x[t − (K − 1 − j) · dilation]` per channel, plus bias, then SiLU where asked.

    x is `[T, C]`, `lengths[i]` of its rows belong to span i; w `[K, C]` has the oldest tap first, and its last tap
    meets the row itself. `tails[i]` `[(K − 1) · dilation, C]`, of x's dtype, holds the rows before span i: zeros where
    it begins. Sums are float32 and rounded to x's dtype once. The states of the result are tails, of memory of their
    own, for the next call. A row's bits don't depend on how its sequence is cut into calls, nor on other spans.
    ValueError for shapes and stops that don't fit.
    """
    if w.shape[1] != x.shape[1] or dilation < 1:
        raise ValueError(f"taps {w.shape} with dilation {dilation} do not fit rows of {x.shape[1]} channels")
    history = (w.shape[0] - 1) * dilation
    cuts = checked_stops(x.shape[0], lengths, len(tails), stops)
    for tail in tails:
        if tail.shape != (history, x.shape[1]) or tail.dtype != x.dtype:
            raise ValueError(
                f"a tail is {tail.dtype} {tail.shape}; {w.shape[0]} taps with dilation {dilation} over {x.dtype} rows "
                f"of {x.shape[1]} need {(history, x.shape[1])} of that type"
            )
    native = device.native()
    if native is not None and w.shape[0] <= NATIVE_TAPS:
        y, states = native.depthwise_conv(
            x, w, bias, tails=tails, lengths=lengths, stops=cuts, dilation=dilation, silu=silu
        )
        return carried(y, states)
    if device.cuda() is not None and cuda.takes(x, w, bias):
        y, states = cuda.depthwise_conv(
            x, w, bias, tails=tails, lengths=lengths, stops=cuts, dilation=dilation, silu=silu
        )
        return carried(y, states)
    if device.metal() and metal.takes(x, w, bias):
        y, states = metal.depthwise_conv(
            x, w, bias, tails=tails, lengths=lengths, stops=cuts, dilation=dilation, silu=silu
        )
        return carried(y, states)
    return graph(x, w, bias, tails=tails, lengths=lengths, stops=cuts, dilation=dilation, silu=silu)


def graph(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None,
    *,
    tails: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops,
    dilation: int,
    silu: bool,
) -> Carried:
    """Plain MLX; spans of one length are computed together."""
    history = (w.shape[0] - 1) * dilation
    windows: list[mx.array] = []
    start = 0
    for tail, length in zip(tails, lengths, strict=True):
        windows.append(mx.concatenate([tail, x[start : start + length]], axis=0))
        start += length
    if len(set(lengths)) == 1:
        y = _taps(mx.stack(windows), w, bias, dilation, silu).reshape(x.shape)
    else:
        y = joined([_taps(window[None], w, bias, dilation, silu)[0] for window in windows])
    # A view would keep the whole window in memory.
    states = [
        [mx.contiguous(window[stop : stop + history]) for stop in (*wanted, length)]
        for window, wanted, length in zip(windows, stops, lengths, strict=True)
    ]
    return carried(y, states)


def _taps(window: mx.array, w: mx.array, bias: mx.array | None, dilation: int, silu: bool) -> mx.array:
    """Over `[spans, history + rows, C]`."""
    taps = w.shape[0]
    rows = window.shape[1] - (taps - 1) * dilation
    wide, taps_wide = window.astype(mx.float32), w.astype(mx.float32)
    y = wide[:, :rows] * taps_wide[0]
    for j in range(1, taps):
        y = y + wide[:, j * dilation : j * dilation + rows] * taps_wide[j]
    if bias is not None:
        y = y + bias.astype(mx.float32)
    if silu:
        y = y * mx.sigmoid(y)
    return y.astype(window.dtype)

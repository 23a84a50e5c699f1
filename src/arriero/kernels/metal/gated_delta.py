"""The gated delta rule over spans of equal length in one launch, with their states after some of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from arriero.kernels.metal.source import TYPES, Launch, kernel, on_device

ROWS = 4
"""Rows of a state that a threadgroup takes, one for each simdgroup."""
WIDEST = 256
"""The widest keys: a lane holds a 32nd of a row of the state, of a query and of a key."""


def takes(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the kernel has heads of this form: q, k `[T, Hk, Dk]`, v `[T, Hv, Dv]`."""
    width = q.shape[2]
    return v.dtype in TYPES and q.dtype == k.dtype == v.dtype and 0 < width <= WIDEST and v.shape[2] % ROWS == 0


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    states: mx.array,
    stops: Sequence[int],
    eps: float,
    launch: Launch | None = None,
) -> tuple[mx.array, mx.array]:
    """`kernels/gated_delta.py` for N spans of L tokens: states float32 `[N, Hv, Dv, Dk]`, q `[N · L, Hk, Dk]`.

    Returns y `[N · L, Hv, Dv]` in v's dtype and the states `[stops, N, Hv, Dv, Dk]` after each of `stops`, which rise
    up to L.
    """
    spans, heads, width, key_width = states.shape
    length = v.shape[0] // spans
    made = (launch or kernel("gated_delta"))(
        inputs=[
            q,
            k,
            v,
            a,
            b,
            rate,
            bias,
            states,
            on_device(mx.array(list(stops), mx.int32), 0),
            mx.array([length, len(stops)], mx.int32),
            mx.array([eps], mx.float32),
        ],
        template=[("T", v.dtype), ("DK", key_width), ("DV", width), ("HK", q.shape[1]), ("HV", heads)],
        grid=(32, width, spans * heads),
        threadgroup=(32, ROWS, 1),
        output_shapes=[v.shape, (len(stops), *states.shape)],
        output_dtypes=[v.dtype, mx.float32],
    )
    return made[0], made[1]

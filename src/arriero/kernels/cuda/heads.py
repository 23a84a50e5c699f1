"""Heads whose queries bring a gate: what is done before attention, and the gate behind it."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.cuda.attention import Shape
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel

WARPS = 4

PREPARE = Kernel(
    name="gated_heads",
    inputs=("rows", "angles", "q_gain", "k_gain"),
    outputs=("out",),
    headers=("numbers", "gated_heads"),
    body="gated_heads_body",
    threads=32 * WARPS,
)
GATE = Kernel(
    name="gate_heads",
    inputs=("rows", "y"),
    outputs=("out",),
    headers=("numbers", "gated_heads"),
    body="gate_heads_body",
    threads=256,
)


def takes(shape: Shape, angles: mx.array, query_norm: Norm, key_norm: Norm) -> bool:
    """Whether `prepare` has heads of this form, rotated by halves."""
    gains = {query_norm[0].dtype, key_norm[0].dtype}
    return shape.head_dim % 32 == 0 and 2 * angles.shape[1] <= shape.head_dim and gains in ({mx.bfloat16}, {mx.float32})


def prepare(shape: Shape, rows: mx.array, angles: mx.array, half: int, query_norm: Norm, key_norm: Norm) -> mx.array:
    """q, k and v `[T, width]` as attention takes them, q and k normed and rotated.

    `rows` `[T, width + heads · head_dim]`, bfloat16, hold of each query head the query and the gate, then k and v.
    `angles` has `half` pairs of cosine and sine of each token, float32, in the device's own memory.
    """
    made = PREPARE(
        [rows, angles, query_norm[0], key_norm[0]],
        {
            "DIM": shape.head_dim,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "ROTATED": 2 * half,
            "WIDE_GAIN": query_norm[0].dtype == mx.float32,
            "Q_EPS_BITS": bits_of(query_norm[1]),
            "K_EPS_BITS": bits_of(key_norm[1]),
        },
        blocks=(-(-(shape.heads + 2 * shape.kv_heads) // WARPS), rows.shape[0], 1),
        shapes=[(rows.shape[0], shape.width)],
        dtypes=[mx.bfloat16],
    )
    return made[0]


def gate(shape: Shape, rows: mx.array, y: mx.array) -> mx.array:
    """`y · σ(gate)` for y `[T, heads · head_dim]` and the gates in `rows`."""
    made = GATE(
        [rows, y],
        {"DIM": shape.head_dim, "HEADS": shape.heads, "KV_HEADS": shape.kv_heads},
        blocks=(-(-shape.heads * shape.head_dim // 2 // GATE.threads), rows.shape[0], 1),
        shapes=[y.shape],
        dtypes=[mx.bfloat16],
    )
    return made[0]

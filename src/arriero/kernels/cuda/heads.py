"""Heads that need more than attention does itself: what is done before it, and the gate behind it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from arriero.kernels.cuda.attention import Shape
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel

WARPS = 4

PREPARE = Kernel(
    name="heads",
    inputs=("rows", "angles", "q_gain", "k_gain"),
    outputs=("out",),
    headers=("numbers", "heads"),
    body="heads_body",
    threads=32 * WARPS,
)
GATE = Kernel(
    name="gate_heads",
    inputs=("rows", "y"),
    outputs=("out",),
    headers=("numbers", "heads"),
    body="gate_heads_body",
    threads=256,
)


@dataclass(frozen=True, slots=True)
class Form:
    """What rows of heads hold, and what values need."""

    gated: bool = False
    """A gate for the output stands behind each query."""
    keys_are_values: bool = False
    """There are no values but the keys as they come."""
    normed_values: bool = False
    """Values are normed, without a gain, by the epsilon of the keys' norm."""


def takes(shape: Shape, form: Form, half: int, query_norm: Norm, key_norm: Norm) -> bool:
    """Whether `prepare` has heads of this form, with so many pairs rotated by halves."""
    gains = {query_norm[0].dtype, key_norm[0].dtype}
    known = gains in ({mx.bfloat16}, {mx.float32}) and not (form.gated and form.keys_are_values)
    return known and shape.head_dim % 32 == 0 and 2 * half <= shape.head_dim


def prepare(
    shape: Shape, form: Form, rows: mx.array, angles: mx.array, half: int, query_norm: Norm, key_norm: Norm
) -> mx.array:
    """q, k and v `[T, width]` as attention takes them, normed and rotated, from bfloat16 rows of `form`.

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
            "GATED": form.gated,
            "KEYS_ARE_VALUES": form.keys_are_values,
            "NORM_V": form.normed_values,
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

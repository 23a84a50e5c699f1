"""Attention of a span's queries over its cache: over all keys in sight, or over listed blocks of them."""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels.metal.source import LEAST_DEVICE_VALUES, TYPES, Launch, kernel, on_device

SIMDGROUPS = 8
"""Of 32 lanes each. MLX raises where a GPU has too few registers for 256 such threads; no Mac was there to show it."""
WIDEST = 512
"""The widest heads: a lane holds an eighth of a query and of a sum, and a threadgroup has 32 KiB."""
MOST_QUERIES = 16
"""Queries of a span up to which each reads its keys alone; more share them in plain MLX's kernels for prompts."""
SHARED_WIDTH = 256
"""Numbers of all queries of one threadgroup, which bounds how many heads read a key together."""
FULL_GRID = 64
"""Threadgroups from which a launch is left as it is; fewer share the keys of a query among several."""
KEYS_EACH = 512
"""Keys that are worth another threadgroup. Neither number was measured: no Mac was at hand."""
MOST_PARTS = 16


def takes(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether the kernel has this form: q `[T, q_heads, D]`, k and v `[1, kv_heads, K, ·]`, all of one float type."""
    widths = (k.shape[3], v.shape[3])
    return (
        q.dtype in TYPES
        and q.dtype == k.dtype == v.dtype
        and q.size > 0
        and k.shape[2] > 0
        and q.shape[1] % k.shape[1] == 0
        and all(0 < width <= WIDEST and width % 8 == 0 for width in widths)
    )


def indexed(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    blocks: mx.array,
    *,
    scale: float,
    position: int,
    block: int,
    launch: Launch | None = None,
    join: Launch | None = None,
) -> mx.array:
    """`kernels/indexed_attention.py` for a span: q `[T, q_heads, D]`, k, v `[1, kv_heads, K, ·]`, blocks `[T, width]`.

    Returns `[T, q_heads, Dv]` in q's dtype. The keys reach the last query's position.
    """
    width = blocks.shape[1]
    flat = on_device(mx.contiguous(blocks).reshape(-1), -1)
    dims = [position, 0, k.shape[2], width, 0]
    return _launch(q, k, v, flat, None, dims, scale, (width + 1) * block, launch, join, block=block)


def dense(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    position: int,
    base: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    causal: bool = True,
    launch: Launch | None = None,
    join: Launch | None = None,
) -> mx.array:
    """`kernels/attention.py` for one span: q `[T, q_heads, D]`, k and v `[1, kv_heads, K, ·]`.

    Returns `[T, q_heads, Dv]` in q's dtype. With `causal` the keys reach the last query's position.
    """
    dims = [position, base, k.shape[2], 0, window or 0]
    reads = k.shape[2] if window is None else min(window, k.shape[2])
    nothing = mx.array([0] * LEAST_DEVICE_VALUES, mx.int32)
    return _launch(q, k, v, nothing, sinks, dims, scale, reads, launch, join, softcap=softcap, causal=causal)


def _launch(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    blocks: mx.array,
    sinks: mx.array | None,
    dims: list[int],
    scale: float,
    reads: int,
    launch: Launch | None,
    join: Launch | None,
    *,
    block: int = 0,
    softcap: float | None = None,
    causal: bool = True,
) -> mx.array:
    rows, heads, width = q.shape
    kv_heads, value_width = k.shape[1], v.shape[3]
    together = _together(heads // kv_heads, max(width, value_width))
    parts = _parts(rows * heads // together, reads)
    partial = parts > 1
    extra = mx.array([0.0] * LEAST_DEVICE_VALUES) if sinks is None else sinks.reshape(-1).astype(mx.float32)
    made = (launch or kernel("attention"))(
        inputs=[
            mx.contiguous(q),
            k,
            v,
            blocks,
            on_device(mx.contiguous(extra), 0),
            mx.array(dims, mx.int32),
            mx.array([scale, softcap or 0], mx.float32),
        ],
        template=[
            ("O", mx.float32 if partial else q.dtype),
            ("D", width),
            ("DV", value_width),
            ("HQ", heads),
            ("HK", kv_heads),
            ("HG", together),
            ("NSG", SIMDGROUPS),
            ("LISTED", block > 0),
            ("BS", max(block, 1)),
            ("CAUSAL", causal),
            ("SOFTCAP", softcap is not None),
            ("SINKS", sinks is not None),
            ("PARTIAL", partial),
        ],
        grid=(32 * SIMDGROUPS * parts, rows, heads // together),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(rows, heads, parts, value_width + 2) if partial else (rows, heads, value_width)],
        output_dtypes=[mx.float32 if partial else q.dtype],
    )
    if not partial:
        return made[0]
    joined = (join or kernel("attention_join"))(
        inputs=[made[0], mx.array([parts], mx.int32)],
        template=[("T", q.dtype), ("DV", value_width)],
        grid=(value_width, rows * heads, 1),
        threadgroup=(value_width, 1, 1),
        output_shapes=[(rows, heads, value_width)],
        output_dtypes=[q.dtype],
    )
    return joined[0]


def _parts(groups: int, reads: int) -> int:
    """Among how many threadgroups the keys of a query are shared."""
    return max(1, min(FULL_GRID // groups, reads // KEYS_EACH, MOST_PARTS))


def _together(heads: int, width: int) -> int:
    """How many of the heads of one key head a threadgroup takes."""
    most = max(1, SHARED_WIDTH // width)
    return max(count for count in range(1, heads + 1) if heads % count == 0 and count <= most)

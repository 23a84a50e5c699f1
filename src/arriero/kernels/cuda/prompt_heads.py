"""Heads of a prompt between its products, a launch a row: norms, rotation, append in place, queries for attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.attention import REPLAYED, Shape, angles_on_device
from arriero.kernels.cuda.heads import Form
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel, argument

THREADS = 128
HEAD_DIMS = (64, 128, 256, 512)
RUN = "cuda run"
"""What the keys of a forward's memo begin with: `(RUN, first, count, before, place, capacity)` for where a row is."""


def takes(
    shape: Shape,
    form: Form,
    buffers: Sequence[mx.array],
    angles: mx.array | None,
    norms: Sequence[Norm | None],
    memo: dict[Any, Any],
    *,
    interleaved: bool = False,
) -> bool:
    """Whether `prepare` has heads of this form: bfloat16, widths of powers of two, and no recording under way.

    What a recording follows of positions is in `cuda.attention`'s tables alone.
    """
    gains = {norm[0].dtype for norm in norms if norm is not None}
    half = 0 if angles is None else angles.shape[1]
    each = max(8, shape.head_dim // 32)
    lanes = half // each
    whole = 2 * half % each == 0 if interleaved else half % each == 0 and lanes & (lanes - 1) == 0
    return (
        REPLAYED not in memo
        and shape.head_dim in HEAD_DIMS
        and all(buffer.dtype == mx.bfloat16 for buffer in buffers)
        and gains in (set(), {mx.bfloat16}, {mx.float32})
        and whole
        and 2 * half <= shape.head_dim
        and not (form.gated and form.keys_are_values)
    )


@cache
def kernel(angles: bool, q_gain: bool, k_gain: bool) -> Kernel:
    """The kernel for rows with or without rotation and gains."""
    optional = {"angles": angles, "q_gain": q_gain, "k_gain": k_gain}
    return Kernel(
        name="prompt_heads",
        inputs=("rows", "run", "keys", "values", *(name for name, given in optional.items() if given)),
        outputs=("out",),
        headers=("numbers", "prompt_heads"),
        body="prompt_heads_body",
        threads=THREADS,
        defines=tuple((name.upper(), name if given else "nullptr") for name, given in optional.items()),
        # A copy of a buffer would take the new tokens in its place. Caches make them contiguous, and products rows.
        contiguous=False,
    )


def prepare(
    shape: Shape,
    form: Form,
    rows: mx.array,
    angles: mx.array | None,
    buffers: Sequence[mx.array],
    *,
    first: int,
    count: int,
    place: int,
    spare: tuple[int, int],
    query_norm: Norm | None,
    key_norm: Norm | None,
    memo: dict[Any, Any],
    interleaved: bool = False,
) -> tuple[mx.array, list[mx.array]]:
    """Queries bfloat16 `[spare[0] + count + spare[1], heads, head_dim]`, the spare ones zeros, and the filled buffers.

    `rows` are bfloat16 `[T, width]` of `form`, of which `count` from `first` on are one row's; they stand at places
    from `place` on of its two `buffers`, which are written in place: the given ones must not be used again. `angles`
    are those of all T, as `rope` takes them.
    """
    before, behind = spare
    numbers = (first, count, before, place, buffers[0].shape[2])
    key = (RUN, *numbers)
    if key not in memo:
        memo[key] = argument(mx.array(np.array([*numbers, 0, 0, 0], np.int32)))
    gains = [norm[0] for norm in (query_norm, key_norm) if norm is not None]
    turns = [] if angles is None else [angles_on_device(angles, memo)]
    made = kernel(angles is not None, query_norm is not None, key_norm is not None)(
        [rows, memo[key], *buffers, *turns, *gains],
        {
            "DIM": shape.head_dim,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "ROTATED": 0 if angles is None else 2 * angles.shape[1],
            "INTERLEAVED": interleaved,
            "NORM_Q": query_norm is not None,
            "NORM_K": key_norm is not None,
            "NORM_V": form.normed_values,
            "WIDE_GAIN": any(gain.dtype == mx.float32 for gain in gains),
            "GATED": form.gated,
            "KEYS_ARE_VALUES": form.keys_are_values,
            "Q_EPS_BITS": bits_of(query_norm[1] if query_norm is not None else 0.0),
            "K_EPS_BITS": bits_of(key_norm[1] if key_norm is not None else 0.0),
        },
        blocks=(before + count + behind, 1, 1),
        shapes=[(before + count + behind, shape.heads, shape.head_dim)],
        dtypes=[mx.bfloat16],
    )
    return made[0], mx.depends(list(buffers), made)

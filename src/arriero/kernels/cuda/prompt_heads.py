"""Heads of a prompt between its products, a launch a row: norms, rotation, append in place, queries for attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.attention import REPLAYED, Shape, angles_on_device
from arriero.kernels.cuda.heads import Form
from arriero.kernels.cuda.product import Norm, bits_of
from arriero.kernels.cuda.source import Kernel, argument

THREADS = 128
HEAD_DIMS = (64, 128, 256, 512)
RESIDENT = 8
"""Blocks that a multiprocessor holds at once, for heads of up to 256 with gains in bfloat16."""
MANY = 64
"""Warps' worth of a token's heads from which two blocks share them."""
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
    return (
        REPLAYED not in memo
        and all(buffer.dtype == mx.bfloat16 for buffer in buffers)
        and _known(shape.head_dim, angles, norms, interleaved)
        and not (form.gated and form.keys_are_values)
    )


def turns(x: mx.array, angles: mx.array | None, norm: Norm | None, *, interleaved: bool = False) -> bool:
    """Whether `turned` computes this: bfloat16 x `[T, heads, head_dim]` and the same of norms and angles."""
    return x.dtype == mx.bfloat16 and x.ndim == 3 and _known(x.shape[2], angles, [norm], interleaved)


def _known(width: int, angles: mx.array | None, norms: Sequence[Norm | None], interleaved: bool) -> bool:
    """Whether a lane's numbers turn alike, or with those of one other lane."""
    gains = {norm[0].dtype for norm in norms if norm is not None}
    half = 0 if angles is None else angles.shape[1]
    each = max(8, width // 32)
    lanes = half // each
    whole = 2 * half % each == 0 if interleaved else half % each == 0 and lanes & (lanes - 1) == 0
    return width in HEAD_DIMS and gains in (set(), {mx.bfloat16}, {mx.float32}) and whole and 2 * half <= width


@cache
def kernel(angles: bool, q_gain: bool, k_gain: bool, *, buffers: bool = True, resident: int = 1) -> Kernel:
    """The kernel for rows with or without rotation and gains, and for queries alone."""
    optional = {"keys": buffers, "values": buffers, "angles": angles, "q_gain": q_gain, "k_gain": k_gain}
    return Kernel(
        name="prompt_heads",
        inputs=("rows", "run", *(name for name, given in optional.items() if given)),
        outputs=("out",),
        headers=("numbers", "prompt_heads"),
        body="prompt_heads_body",
        threads=THREADS,
        resident=resident,
        defines=tuple((name.upper(), name if given else "nullptr") for name, given in optional.items()),
        # A copy of a buffer would take the new tokens in its place. Caches make them contiguous, and products rows.
        contiguous=not buffers,
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
        memo[key] = _run(*numbers)
    table = None if angles is None else angles_on_device(angles, memo)
    q = _launch(
        shape, form, rows, memo[key], buffers, table, angles, query_norm, key_norm, before + count + behind, interleaved
    )
    return q, mx.depends(list(buffers), [q])


def turned(x: mx.array, norm: Norm | None, angles: mx.array | None, *, interleaved: bool = False) -> mx.array:
    """Heads `[T, heads, head_dim]`, normed and rotated, of x that `turns` has accepted."""
    count, heads, width = x.shape
    shape = Shape(heads, 0, width, 1.0)
    return _launch(shape, Form(), x, _whole(count), [], angles, angles, norm, None, count, interleaved)


def _run(*numbers: int) -> mx.array:
    """What prompt_heads.cu calls a run, in the device's own memory."""
    return argument(mx.array(np.array([*numbers, *[0] * (8 - len(numbers))], np.int32)))


@lru_cache(maxsize=64)
def _whole(count: int) -> mx.array:
    """The run of all tokens, made once: prompts come in few lengths."""
    made = _run(0, count, 0, 0, 0)
    mx.eval(made)
    return made


def _launch(
    shape: Shape,
    form: Form,
    rows: mx.array,
    run: mx.array,
    buffers: Sequence[mx.array],
    table: mx.array | None,
    angles: mx.array | None,
    query_norm: Norm | None,
    key_norm: Norm | None,
    blocks: int,
    interleaved: bool,
) -> mx.array:
    """`table` holds the numbers of `angles`."""
    gains = [norm[0] for norm in (query_norm, key_norm) if norm is not None]
    given = angles is not None, query_norm is not None, key_norm is not None
    wide = any(gain.dtype == mx.float32 for gain in gains)
    resident = RESIDENT if shape.head_dim <= 256 and not wide else 1
    warps = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // 256
    made = kernel(*given, buffers=bool(buffers), resident=resident)(
        [rows, run, *buffers, *([] if table is None else [table]), *gains],
        {
            "DIM": shape.head_dim,
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "ROTATED": 0 if angles is None else 2 * angles.shape[1],
            "INTERLEAVED": interleaved,
            "NORM_Q": query_norm is not None,
            "NORM_K": key_norm is not None,
            "NORM_V": form.normed_values,
            "WIDE_GAIN": wide,
            "GATED": form.gated,
            "KEYS_ARE_VALUES": form.keys_are_values,
            "Q_EPS_BITS": bits_of(query_norm[1] if query_norm is not None else 0.0),
            "K_EPS_BITS": bits_of(key_norm[1] if key_norm is not None else 0.0),
        },
        blocks=(blocks, 2 if warps >= MANY else 1, 1),
        shapes=[(blocks, shape.heads, shape.head_dim)],
        dtypes=[mx.bfloat16],
    )
    return made[0]

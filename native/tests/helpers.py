"""References in float64, and the error measure the tests share."""

from __future__ import annotations

from typing import Any

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np

DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
# Largest error of a row, relative to the largest row norm. Half a unit in the last place is 2^-8 in bfloat16.
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 4e-3, mx.float16: 5e-4}


def f64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


def error(got: mx.array, want: np.ndarray) -> float:
    a = f64(got)
    assert a.shape == want.shape
    if a.size == 0:
        return 0.0
    return float(np.max(np.linalg.norm(a - want, axis=-1)) / np.max(np.linalg.norm(want, axis=-1)))


def same(a: mx.array, b: mx.array) -> bool:
    """Bit for bit."""
    a, b = np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32))
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def multiply(
    x: mx.array,
    *q: mx.array,
    group_size: int,
    bits: int,
    mode: str = "affine",
    global_scale: Any = None,
    exact: bool = True,
) -> mx.array:
    """The product with weights in MLX's layout, packed first where the format is."""
    how = {"group_size": group_size, "bits": bits, "mode": mode}
    if cpu.packable(mode, bits, group_size):
        return cpu.packed_matmul(x, cpu.pack(*q, **how), global_scale=global_scale, exact=exact)
    return cpu.quantized_matmul(x, *q, **how, global_scale=global_scale, exact=exact)


def gather(
    x: mx.array,
    *q: mx.array,
    indices: mx.array,
    group_size: int,
    bits: int,
    mode: str = "affine",
    global_scale: Any = None,
    exact: bool = True,
) -> mx.array:
    """The same of experts."""
    how = {"group_size": group_size, "bits": bits, "mode": mode}
    if cpu.packable(mode, bits, group_size):
        return cpu.packed_gather(x, cpu.pack(*q, **how), indices, global_scale=global_scale, exact=exact)
    return cpu.gather_qmm(x, *q, indices=indices, **how, global_scale=global_scale, exact=exact)

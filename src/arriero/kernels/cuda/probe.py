"""One small product on the device, compared with plain MLX, before anything relies on the kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import multiply, operand

ROWS, COLUMNS = 64, 256
TOLERANCE = 0.01


def probe(gpu: Gpu) -> None:
    """RuntimeError when the kernels do not compile, do not run, or give other numbers than plain MLX."""
    words = mx.arange(ROWS * COLUMNS // 8, dtype=mx.uint32) * 2654435761
    w = words.reshape(ROWS, COLUMNS // 8)
    scales = mx.broadcast_to(mx.array(56, mx.uint8), (ROWS, COLUMNS // 16)) + mx.zeros((1,), mx.uint8)
    x = (mx.arange(COLUMNS, dtype=mx.float32) % 7 - 3)[None].astype(mx.bfloat16)
    matrix = operand(w, scales, None, mode="nvfp4", bits=4, group_size=16)
    if matrix is None:
        raise RuntimeError("the kernels do not take the matrix that they are tried with")
    ours = np.array(multiply(gpu, x, matrix).y.astype(mx.float32))
    plain = np.array(
        (x @ mx.dequantize(w, scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.bfloat16).T).astype(mx.float32)
    )
    error = float(np.linalg.norm(ours - plain) / np.linalg.norm(plain))
    if not error < TOLERANCE:
        raise RuntimeError(f"a product differs from plain MLX by {error:.2g} of its size")

"""Packed matrices for the tests of products, and what plain MLX makes of them in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from arriero.kernels.metal.product import FORMATS as KNOWN
from arriero.kernels.metal.product import Operand

LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 5e-3}
FORMATS = {f"{mode}-{bits}-{group}": {"mode": mode, "bits": bits, "group_size": group} for mode, bits, group in KNOWN}


def matrix(
    *shape: int, kind: dict[str, Any], dtype: mx.Dtype = mx.float32, seed: int | None = None
) -> list[mx.array | None]:
    """Codes, scales and zero points of random values `[columns, depth]`, or of a bank of them."""
    values = mx.random.normal(shape, key=mx.random.key(shape[-2] if seed is None else seed)) * 0.3
    made = list(mx.quantize(values.astype(dtype), **kind))
    return [*made, None] if len(made) == 2 else made


def operand(parts: list[mx.array | None], kind: dict[str, Any], **how: Any) -> Operand:
    """As the kernels take it."""
    w, scales, biases = parts
    assert w is not None
    assert scales is not None
    return Operand(w, scales, biases, kind["mode"], kind["bits"], kind["group_size"], **how)


def rows(count: int, depth: int, dtype: mx.Dtype, seed: int | None = None) -> mx.array:
    return mx.random.normal((count, depth), key=mx.random.key(count if seed is None else seed)).astype(dtype)


def values(parts: list[mx.array | None], kind: dict[str, Any]) -> mx.array:
    """The matrix, decoded in float32."""
    # Scales of a 16-bit type would round what is decoded.
    wide = [p.astype(mx.float32) if p is not None and mx.issubdtype(p.dtype, mx.floating) else p for p in parts]
    return mx.dequantize(*wide, **kind, dtype=mx.float32)


def exact(x: mx.array, parts: list[mx.array | None], kind: dict[str, Any], factor: mx.array | None = None) -> mx.array:
    """The product with the matrix that is decoded first, in float32."""
    y = x.astype(mx.float32) @ values(parts, kind).T
    return (y if factor is None else y * factor).astype(x.dtype)

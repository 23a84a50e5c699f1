"""Rows of tables decoded on an NVIDIA GPU, to the bit those of plain MLX."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import ple
from arriero.kernels.cuda.gpu import Gpu
from arriero.model.layers.host_table import Layout, ShardedTable
from arriero.model.quantization import Quantization
from arriero.model.stored import HostWeight
from tests.helpers.cuda import SEED, exact, executed, gpu, plain_mlx

__all__ = ["executed", "gpu"]

SIZES = [7, 30, 12]
ROWS = np.array([[48, 3, 3], [7, 36, 0]])
PACKED = [
    Quantization("nvfp4", 4, 16),
    Quantization("mxfp4", 4, 32),
    Quantization("mxfp8", 8, 32),
    Quantization("affine", 4, 64),
    Quantization("affine", 8, 32),
]


def views(kind: str | Quantization, width: int) -> list[HostWeight]:
    """Shards of random rows, every code among them, as a file has them."""
    made = []
    for size in SIZES:
        dense = SEED.normal(0, 1, (size, width)).astype(np.float32)
        if isinstance(kind, Quantization):
            how: dict[str, Any] = {"group_size": kind.group_size, "bits": kind.bits, "mode": kind.mode}
            parts = [
                np.array(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part) for part in quantized(dense, how)
            ]
            parts = [part.view(ml_dtypes.bfloat16) if part.dtype == np.uint16 else part for part in parts]
            made.append(HostWeight(parts[0], kind, parts[1], parts[2] if len(parts) > 2 else None))
        elif kind == "F8_E4M3":
            made.append(HostWeight(SEED.integers(0, 127, (size, width)).astype(np.uint8)))
        else:
            made.append(HostWeight(dense.astype({"F32": np.float32, "BF16": ml_dtypes.bfloat16}[kind])))
    return made


def quantized(dense: np.ndarray, how: dict[str, Any]) -> list[mx.array]:
    return list(mx.quantize(mx.array(dense).astype(mx.bfloat16), **how))


def table(kind: str | Quantization, width: int, dtype: mx.Dtype, *, factors: bool) -> ShardedTable:
    how = kind if isinstance(kind, Quantization) else None
    layout = Layout("U32" if how else str(kind), how, width)
    numbers = np.array([0.3, 1.7, 0.011], np.float32) if factors else None
    return ShardedTable(layout, SIZES, numbers, dtype, views=views(kind, width))


def check(monkeypatch: pytest.MonkeyPatch, held: ShardedTable) -> None:
    used = []
    decode = ple.decode

    def spy(*args: Any) -> mx.array:
        used.append(args)
        return decode(*args)

    monkeypatch.setattr(ple, "decode", spy)
    ours = exact(held(ROWS))
    assert used
    with plain_mlx(monkeypatch):
        plain = exact(held(ROWS))
    assert len(used) == 1
    if held.layout.quantization is not None and held.layout.quantization.mode == "affine":
        # A product and a sum, rounded once or twice.
        assert np.allclose(ours, plain, rtol=1e-2, atol=1e-6)
    else:
        assert np.array_equal(ours, plain)


@pytest.mark.parametrize(
    ("kind", "factors"), [("F32", False), ("BF16", False), ("F8_E4M3", True), *((kind, True) for kind in PACKED)]
)
def test_rows_are_those_of_plain_mlx(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str | Quantization, factors: bool
) -> None:
    check(monkeypatch, table(kind, 192, mx.bfloat16, factors=factors))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_rows_as_published(executed: Gpu, monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    check(monkeypatch, table(PACKED[0], 160, dtype, factors=True))


def test_what_the_kernel_does_not_take_is_left_to_plain_mlx(executed: Gpu) -> None:
    odd = table("F32", 12, mx.bfloat16, factors=False)
    assert odd(ROWS).shape == (6, 12)
    assert ple.rows_of("F16", 160, 0, 0, [(320, "float16")], factor=False, dtype=mx.bfloat16) is None
    assert ple.rows_of("affine", 64, 3, 64, [(24, "uint32")] * 3, factor=False, dtype=mx.bfloat16) is None
    assert ple.rows_of("nvfp4", 160, 4, 16, [(80, "uint8"), (10, "uint8")], factor=True, dtype=mx.float16) is None

"""The NVIDIA GPU for tests of its kernels, and matrices with what float64 says of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import device
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Operand, operand
from arriero.kernels.cuda.source import Kernel
from arriero.model.layers import replay
from tests.helpers.cuda_on_cpu.run import Emulated, compiler

SEED = np.random.default_rng(20261130)


EMULATED = Gpu(multiprocessors=3, shared_memory=227 << 10, capability=(9, 0), in_place=True)


def emulate(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Have the kernels executed on the CPU, as if there were a small GPU."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    emulated = Emulated()
    monkeypatch.setattr(Kernel, "__call__", lambda kernel, *args, **kwargs: emulated(kernel, *args, **kwargs))
    monkeypatch.setattr(device, "cuda", lambda: EMULATED)
    monkeypatch.setattr(device, "native", lambda: None)
    monkeypatch.setattr(replay, "BUILT_FIRST", False)
    # An executed kernel has numbers at once, so there is nothing to trace.
    monkeypatch.setattr(mx, "compile", lambda function, **how: function)
    return EMULATED


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Skips the test where there is none, or where the kernels don't work.

    With ARRIERO_TEST_CUDA=emulated the kernels are executed on the CPU instead.
    """
    if os.environ.get("ARRIERO_TEST_CUDA") == "emulated":
        return emulate(monkeypatch)
    found = device.cuda()
    if found is None:
        pytest.skip("there is no NVIDIA GPU that the kernels work on")
    return found


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The GPU where there is one, else the kernels are executed on the CPU."""
    return device.cuda() or emulate(monkeypatch)


@contextmanager
def plain_mlx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain MLX on the CPU: on a GPU its quantised products take up to half a minute each to compile."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(device, "cuda", lambda: None)
            yield
    finally:
        mx.set_default_device(before)


ON_GPU = pytest.mark.skipif(
    not mx.cuda.is_available() and os.environ.get("ARRIERO_TEST_CUDA") != "emulated",
    reason="executed on the CPU only with ARRIERO_TEST_CUDA=emulated",
)
"""Cases beyond those that CI executes."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix or bank, and its values in float64 with the global scale in them."""

    operand: Operand
    values: np.ndarray
    how: dict[str, object]
    global_scale: mx.array | None


def packed(
    shape: tuple[int, ...],
    mode: str,
    bits: int,
    group: int,
    *,
    deviation: float = 0.02,
    global_scale: mx.array | None = None,
    bias: mx.array | None = None,
    ragged: bool = False,
) -> Packed:
    """Random normal weights of this size, quantised by MLX."""
    dense = mx.array(SEED.normal(0, deviation, shape).astype(np.float32)).astype(mx.bfloat16)
    parts = mx.quantize(dense, group_size=group, bits=bits, mode=mode)
    w, scales = parts[0], parts[1]
    biases = parts[2] if len(parts) > 2 else None
    how = {"mode": mode, "bits": bits, "group_size": group}
    found = operand(w, scales, biases, **how, global_scale=global_scale, bias=bias, ragged=ragged)
    assert found is not None
    values = exact(mx.dequantize(w, scales, biases, group_size=group, bits=bits, mode=mode, dtype=mx.float32))
    if mode == "affine":
        # In float32, of 16-bit scales: MLX decodes to their type.
        assert biases is not None
        wide = mx.dequantize(
            w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits, mode=mode
        )
        values = exact(wide)
    if global_scale is not None:
        factors = exact(global_scale)
        values = values * (factors.reshape(-1, *[1] * (len(shape) - 1)) if factors.size > 1 else factors)
    return Packed(found, values, how, global_scale)


def rows(count: int, width: int, size: float = 1.0) -> mx.array:
    """Random bfloat16 rows."""
    return mx.array(SEED.normal(0, size, (count, width)).astype(np.float32)).astype(mx.bfloat16)


def exact(array: mx.array) -> np.ndarray:
    """Its numbers in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def error(found: mx.array, expected: np.ndarray) -> float:
    """The difference as a part of what is expected, both as whole vectors; infinite for what is not finite."""
    ours = exact(found)
    assert ours.shape == expected.shape
    if not np.isfinite(ours).all():
        return float("inf")
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))

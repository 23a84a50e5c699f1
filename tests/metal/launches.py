"""Kernels as the tests launch them: on a Mac's GPU where there is one, else on the CPU by the harness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels.metal.source import FOLDER, Launch, kernel
from tests.metal.harness.build import compiler
from tests.metal.harness.errors import MetalError
from tests.metal.harness.kernel import Kernel, from_file

ON_GPU = mx.metal.is_available()
ORDERS: list[dict[str, Any]] = (
    [{}] if ON_GPU else [{"seed": 0, "hostile_fast_math": True}, {"seed": 1, "shift_inputs": True}]
)
"""Orders of threads. The second puts every input one element off alignment, as a slice is."""

runnable = pytest.mark.skipif(not ON_GPU and compiler() is None, reason="no Apple GPU, and no C++ compiler either")
emulated = pytest.mark.skipif(ON_GPU or compiler() is None, reason="needs a C++ compiler, and no GPU: wrong on purpose")


def launch(name: str, **options: Any) -> Launch:
    """The kernel of `name.metal`."""
    return kernel(name) if ON_GPU else from_file(FOLDER / f"{name}.metal", **options)


def faulty(name: str, *edits: tuple[str, str], **options: Any) -> Kernel:
    """The kernel with faults planted."""
    return from_file(FOLDER / f"{name}.metal", edits, **options)


def apart(a: mx.array, b: mx.array) -> float:
    """The largest difference, relative to 1 and the second's value."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    x, y = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.max(mx.abs(x - y) / (1 + mx.abs(y))))


def error(a: mx.array, b: mx.array) -> float:
    """The difference as a part of the second, both as whole vectors."""
    assert a.shape == b.shape
    x, y = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.linalg.norm((x - y).reshape(-1)) / mx.linalg.norm(y.reshape(-1)))


def caught(kinds: str | Sequence[str], run: Any, seeds: Sequence[int] = (0, 1)) -> str:
    """The message of the fault, which every order of threads must report as one of `kinds`."""
    message = ""
    for seed in seeds:
        with pytest.raises(MetalError) as error:
            run(seed)
        assert error.value.kind in ((kinds,) if isinstance(kinds, str) else kinds), str(error.value)
        message = str(error.value)
    return message

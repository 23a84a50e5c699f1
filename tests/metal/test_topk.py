"""The Metal top-k kernel against plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device, topk
from arriero.kernels.metal import topk as metal
from tests.metal.launches import ORDERS, caught, emulated, faulty, launch, runnable

pytestmark = runnable

SPECIAL = [float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 1e-40, -1e-40, -float("nan"), 3.0, 3.0]


def scores(rows: int, length: int, dtype: mx.Dtype) -> mx.array:
    """Many ties, and what floats have beside numbers."""
    x = mx.round(mx.random.normal((rows, length), key=mx.random.key(length)) * 4) / 4
    for i, value in enumerate(SPECIAL[: length // 3]):
        x[:, (i * 37) % length] = value
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "length", "k"), [(1, 1, 1), (2, 3, 3), (3, 256, 7), (2, 300, 300), (1, 4500, 1024)])
def test_the_order_is_that_of_plain_mlx(dtype: mx.Dtype, rows: int, length: int, k: int) -> None:
    x = scores(rows, length, dtype)
    want = topk.graph(x, k)
    for order in ORDERS:
        made = metal.top_k(x, k, launch=launch("topk", **order))
        assert made.dtype == mx.int32
        assert mx.array_equal(made, want)


def test_leading_axes_are_kept_and_rows_may_be_strided() -> None:
    x = scores(6, 40, mx.float32).reshape(2, 3, 40)[:, :, ::2]
    assert mx.array_equal(metal.top_k(x, 5, launch=launch("topk", **ORDERS[0])), topk.graph(x, 5))


def test_the_operation_takes_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def asked(name: str) -> Any:
        calls.append(name)
        return launch(name, **ORDERS[0])

    monkeypatch.setattr(device, "native", lambda: None)
    monkeypatch.setattr(device, "metal", lambda: True)
    monkeypatch.setattr(metal, "kernel", asked)
    x = scores(2, 50, mx.float32)
    assert mx.array_equal(topk.top_k(x, 4), topk.graph(x, 4))
    assert calls == ["topk"]
    long = scores(1, 1100, mx.float32)
    assert mx.array_equal(topk.top_k(long, 1025), topk.graph(long, 1025))
    assert calls == ["topk"]  # more than a piece holds goes to plain MLX


INNER = "      threadgroup_barrier(mem_flags::mem_threadgroup);\n    }"
LOADED = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n  for (uint run"


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        ((INNER, "    }"), ("race",)),
        ((LOADED, "  for (uint run"), ("race", "uninitialised")),
        ((INNER, "      if (thread_number < 64)" + INNER), ("divergent-barrier", "race")),
        (("at < length)", "at <= length)"), ("out-of-bounds",)),
        (("j < kept;", "j + 1 < kept;"), ("unwritten-output",)),
        (("key_of[PIECE],", "key_of[PIECE - 1],"), ("array-bounds", "out-of-bounds")),
    ],
    ids=["no barrier in the sort", "no barrier before it", "a divergent barrier", "a value too many", "one left out",
         "an array too small"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kernel, x = faulty("topk", edit), scores(1, 200, mx.float32)
    caught(kinds, lambda seed: metal.top_k(x, 9, launch=lambda **call: kernel(**call, seed=seed)))

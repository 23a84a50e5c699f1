"""The Metal product of quantised matrices against plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device, quantized_matmul
from arriero.kernels.metal import product as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable

pytestmark = runnable

LIMIT = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 5e-3}
FORMATS = {
    f"{mode}-{bits}-{group}": {"mode": mode, "bits": bits, "group_size": group} for mode, bits, group in metal.FORMATS
}


def matrix(columns: int, depth: int, kind: dict[str, Any], dtype: mx.Dtype = mx.float32) -> list[mx.array | None]:
    w = mx.random.normal((columns, depth), key=mx.random.key(columns)) * 0.3
    made = list(mx.quantize(w.astype(dtype), **kind))
    return [*made, None] if len(made) == 2 else made


def rows(count: int, depth: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((count, depth), key=mx.random.key(count)).astype(dtype)


def exact(x: mx.array, parts: list[mx.array | None], kind: dict[str, Any], factor: mx.array | None = None) -> mx.array:
    """The same by a matrix that is decoded first, in float32."""
    # Scales of a 16-bit type would round what is decoded.
    wide = [p.astype(mx.float32) if p is not None and mx.issubdtype(p.dtype, mx.floating) else p for p in parts]
    w = mx.dequantize(*wide, **kind).astype(mx.float32)
    y = x.astype(mx.float32) @ w.T
    return (y if factor is None else y * factor).astype(x.dtype)


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_every_format_is_read_as_plain_mlx_reads_it(dtype: mx.Dtype, kind: dict[str, Any]) -> None:
    parts = matrix(11, 384, kind, dtype)
    x = rows(3, 384, dtype)
    want = exact(x, parts, kind)
    for order in ORDERS:
        assert apart(metal.multiply(x, *parts, **kind, launch=launch("product", **order)), want) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_rows_of_every_type_share_a_matrix(dtype: mx.Dtype, count: int) -> None:
    kind = FORMATS["nvfp4-4-16"]
    parts = matrix(9, 256, kind)
    x, factor = rows(count, 256, dtype), mx.array(0.37)
    want = exact(x, parts, kind, factor)
    for order in ORDERS:
        made = metal.multiply(x, *parts, **kind, global_scale=factor, launch=launch("product", **order))
        assert apart(made, want) <= LIMIT[dtype]


@pytest.mark.parametrize("count", [9, 16])
def test_more_rows_than_a_lane_keeps_are_taken_in_turn(count: int) -> None:
    kind = FORMATS["affine-4-64"]
    parts = matrix(8, 64, kind, mx.bfloat16)
    x = rows(count, 64, mx.float32)
    assert (
        apart(
            metal.multiply(x, *parts, **kind, launch=launch("product", **ORDERS[1 % len(ORDERS)])),
            exact(x, parts, kind),
        )
        <= 1e-5
    )


@pytest.mark.parametrize("name", ["mxfp4-4-32", "affine-8-32"])
def test_a_matrix_of_one_column_and_one_group_has_inputs_of_under_eight_values(name: str) -> None:
    kind = FORMATS[name]
    parts, x = matrix(1, 32, kind), rows(1, 32, mx.float32)
    for order in ORDERS:
        assert (
            apart(metal.multiply(x, *parts, **kind, launch=launch("product", **order)), exact(x, parts, kind)) <= 1e-5
        )


def test_a_factor_for_each_column_is_met_in_float32() -> None:
    kind = FORMATS["nvfp4-4-16"]
    parts, x = matrix(13, 64, kind), rows(2, 64, mx.float16) * 100
    factors = mx.arange(1, 14).astype(mx.float32) * 1e-3
    made = metal.multiply(x, *parts, **kind, global_scale=factors, launch=launch("product", **ORDERS[0]))
    assert apart(made, exact(x, parts, kind, factors)) <= 2e-3


def test_the_operation_takes_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def asked(name: str) -> Any:
        calls.append(name)
        return launch(name, **ORDERS[0])

    monkeypatch.setattr(device, "native", lambda: None)
    monkeypatch.setattr(device, "metal", lambda: True)
    monkeypatch.setattr(metal, "kernel", asked)
    kind = FORMATS["mxfp8-8-32"]
    parts = matrix(5, 64, kind)
    for count, times in ((2, 1), (17, 1)):  # seventeen rows go to plain MLX
        x = rows(count, 64, mx.float32).reshape(1, count, 64)
        assert apart(quantized_matmul.quantized_matmul(x, *parts, **kind), exact(x, parts, kind)) <= 1e-5
        assert calls == ["product"] * times


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("metal::min(first + r, columns - 1)", "(first + r)"), ("out-of-bounds",)),
        (("metal::min(top + m, rows - 1)", "(top + m)"), ("out-of-bounds",)),
        (("column < columns && top", "column + 1 < columns && top"), ("unwritten-output",)),
        (("if (lane == 0 && column", "if (column"), ("race",)),
    ],
    ids=["a column too many", "a row too many", "a column left out", "all lanes write"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kind = FORMATS["nvfp4-4-16"]
    kernel, parts, x = faulty("product", edit), matrix(10, 64, kind), rows(3, 64, mx.float32)
    caught(kinds, lambda seed: metal.multiply(x, *parts, **kind, launch=lambda **call: kernel(**call, seed=seed)))

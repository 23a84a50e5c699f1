"""The Metal product of quantised matrices against plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device, quantized_matmul
from arriero.kernels.metal import product as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable
from tests.metal.packed import FORMATS, LIMIT, exact, matrix, rows

pytestmark = runnable


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_every_format_is_read_as_plain_mlx_reads_it(dtype: mx.Dtype, kind: dict[str, Any]) -> None:
    parts = matrix(11, 384, kind=kind, dtype=dtype)
    x = rows(3, 384, dtype)
    want = exact(x, parts, kind)
    for order in ORDERS:
        assert apart(metal.multiply(x, *parts, **kind, launch=launch("product", **order)), want) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_rows_of_every_type_share_a_matrix(dtype: mx.Dtype, count: int) -> None:
    kind = FORMATS["nvfp4-4-16"]
    parts = matrix(9, 256, kind=kind)
    x, factor = rows(count, 256, dtype), mx.array(0.37)
    want = exact(x, parts, kind, factor)
    for order in ORDERS:
        made = metal.multiply(x, *parts, **kind, global_scale=factor, launch=launch("product", **order))
        assert apart(made, want) <= LIMIT[dtype]


@pytest.mark.parametrize("count", [9, 16])
def test_more_rows_than_a_lane_keeps_are_taken_in_turn(count: int) -> None:
    kind = FORMATS["affine-4-64"]
    parts = matrix(8, 64, kind=kind, dtype=mx.bfloat16)
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
    parts, x = matrix(1, 32, kind=kind), rows(1, 32, mx.float32)
    for order in ORDERS:
        assert (
            apart(metal.multiply(x, *parts, **kind, launch=launch("product", **order)), exact(x, parts, kind)) <= 1e-5
        )


def test_a_factor_for_each_column_is_met_in_float32() -> None:
    kind = FORMATS["nvfp4-4-16"]
    parts, x = matrix(13, 64, kind=kind), rows(2, 64, mx.float16) * 100
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
    parts = matrix(5, 64, kind=kind)
    for count, times in ((2, 1), (17, 1)):  # seventeen rows go to plain MLX
        x = rows(count, 64, mx.float32).reshape(1, count, 64)
        assert apart(quantized_matmul.quantized_matmul(x, *parts, **kind), exact(x, parts, kind)) <= 1e-5
        assert calls == ["product"] * times


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("metal::min(first + r / PARTS, columns - 1)", "(first + r)"), ("out-of-bounds",)),
        (("metal::min(top + m, rows - 1)", "(top + m)"), ("out-of-bounds",)),
        (("column >= columns ||", "column + 1 >= columns ||"), ("unwritten-output",)),
        (("if (lane > 0 || column", "if (column"), ("race",)),
    ],
    ids=["a column too many", "a row too many", "a column left out", "all lanes write"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kind = FORMATS["nvfp4-4-16"]
    kernel, parts, x = faulty("product", edit), matrix(10, 64, kind=kind), rows(3, 64, mx.float32)
    caught(kinds, lambda seed: metal.multiply(x, *parts, **kind, launch=lambda **call: kernel(**call, seed=seed)))

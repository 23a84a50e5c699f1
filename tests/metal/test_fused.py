"""What the Metal product does with its sum in the same launch, against plain MLX in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import activation
from arriero.kernels.metal import product as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable
from tests.metal.packed import FORMATS, LIMIT, matrix, operand, rows, values

pytestmark = runnable

KIND = FORMATS["nvfp4-4-16"]
DEPTH = 288
"""More than the lanes of a simdgroup read at a time."""


def normed(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x.astype(mx.float32), gain.astype(mx.float32), eps)


def gate(columns: int, parts: list[mx.array | None], kind: dict[str, Any], x: mx.array, name: Any) -> mx.array:
    first, second = mx.split(x.astype(mx.float32) @ values(parts, kind).T, [columns], axis=-1)
    return activation.gated(name, first, second)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("count", "wide"), [(1, True), (3, False), (10, True)])
def test_a_branch_and_a_norm_come_before_and_a_bias_and_a_residual_after(
    dtype: mx.Dtype, count: int, wide: bool
) -> None:
    columns, eps = 10, 1e-3
    parts, factors = matrix(columns, DEPTH, kind=KIND), mx.arange(1, columns + 1) * 0.1
    x, branch, residual = (rows(count, width, dtype, seed) for seed, width in enumerate((DEPTH, DEPTH, columns)))
    gain = rows(1, DEPTH, mx.float32 if wide else dtype, 5).reshape(-1)
    bias = rows(1, columns, dtype, 6).reshape(-1)
    given = operand(parts, KIND, global_scale=factors.astype(mx.float32), bias=bias)
    total = x + branch
    want = (normed(total, gain, eps) @ values(parts, KIND).T) * factors + bias.astype(mx.float32)
    want = (want + residual.astype(mx.float32)).astype(dtype)
    assert metal.fuses(x, given, norm=(gain, eps))
    for order in ORDERS:
        made = metal.fused(
            x, given, branch=branch, norm=(gain, eps), residual=residual, launch=launch("product", **order)
        )
        assert mx.array_equal(made.x, total)
        assert apart(made.y, want) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(
    ("name", "kind", "count"), [("silu", "nvfp4-4-16", 3), ("gelu_tanh", "affine-4-32", 1), ("silu", "mxfp8-8-32", 8)]
)
def test_gate_and_up_meet_in_one_launch(dtype: mx.Dtype, name: Any, kind: str, count: int) -> None:
    columns, how = 5, FORMATS[kind]
    parts = matrix(2 * columns, DEPTH, kind=how, dtype=dtype if how["mode"] == "affine" else mx.float32)
    x, gain = rows(count, DEPTH, dtype), rows(1, DEPTH, dtype, 5).reshape(-1)
    want = gate(columns, parts, how, normed(x, gain, 1e-6), name).astype(dtype)
    given = operand(parts, how)
    assert metal.fuses(x, given, norm=(gain, 1e-6), activation=name)
    for order in ORDERS:
        made = metal.fused(x, given, norm=(gain, 1e-6), activation=name, launch=launch("product", **order))
        assert made.x is x
        assert apart(made.y, want) <= LIMIT[dtype]


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gates_far_from_zero_are_neither_infinite_nor_no_numbers(name: Any) -> None:
    parts, x = matrix(4, 32, kind=FORMATS["affine-8-32"]), rows(1, 32, mx.float32) * 1e4
    given = operand(parts, FORMATS["affine-8-32"])
    want = gate(2, parts, FORMATS["affine-8-32"], x, name)
    for order in ORDERS:
        made = metal.fused(x, given, activation=name, launch=launch("product", **order))
        assert bool(mx.all(mx.isfinite(made.y)))
        assert apart(made.y, want) <= 1e-5


def test_what_is_not_taken() -> None:
    parts, x = matrix(6, 32, kind=FORMATS["mxfp4-4-32"]), rows(2, 32, mx.bfloat16)
    given = operand(parts, FORMATS["mxfp4-4-32"])
    assert metal.fuses(x, given)
    assert not metal.fuses(x, given, activation="gelu")  # erf
    assert not metal.fuses(x, given, norm=(mx.ones((32,), mx.float16), 1e-6))
    assert not metal.fuses(rows(metal.MOST_ROWS + 1, 32, mx.bfloat16), given)
    assert not metal.fuses(x, operand(parts, FORMATS["mxfp4-4-32"], bias=mx.zeros((6,))))
    odd = operand(matrix(5, 32, kind=FORMATS["mxfp4-4-32"]), FORMATS["mxfp4-4-32"])
    assert not metal.fuses(x, odd, activation="silu")


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("if (first == 0) total", "total"), ("race",)),
        (("if (first == 0) total", "if (first == 0 && m > 0) total"), ("unwritten-output",)),
        (("gain[k + i]", "gain[k + i + 1]"), ("out-of-bounds",)),
        (("residual[to]", "residual[to + 1]"), ("out-of-bounds",)),
        (("bias[row]", "bias[row + PARTS]"), ("out-of-bounds",)),
        (("columns * PARTS;", "columns * PARTS + 1;"), ("out-of-bounds",)),
    ],
    ids=["all write the sum", "a row of the sum left out", "a gain too far", "a residual too far", "a bias too far",
         "a row of gate too far"],
)  # fmt: skip
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kernel, parts = faulty("product", edit), matrix(20, 64, kind=KIND)
    given = operand(parts, KIND, bias=mx.zeros((20,)))
    x, branch, residual = rows(3, 64, mx.float32, 1), rows(3, 64, mx.float32, 2), rows(3, 10, mx.float32, 3)
    how: dict[str, Any] = {"norm": (mx.ones((64,)), 1e-6), "activation": "silu", "branch": branch, "residual": residual}
    caught(kinds, lambda seed: metal.fused(x, given, **how, launch=lambda **call: kernel(**call, seed=seed)).y)

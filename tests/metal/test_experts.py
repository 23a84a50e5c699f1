"""Products with the matrices of chosen experts on the Metal kernel, against plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import activation, device, gather_matmul
from arriero.kernels.metal import experts as metal
from arriero.kernels.metal import product
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable
from tests.metal.packed import FORMATS, LIMIT, matrix, operand, rows, values

pytestmark = runnable

EXPERTS, COLUMNS, DEPTH = 5, 6, 96
CHOSEN = {
    "one for each row": mx.array([4, 0, 4], mx.uint32),
    "several for each row": mx.array([[1, 3], [0, 4], [2, 2]], mx.uint32),
    "enough for the device's memory": mx.array([[1, 3, 0, 4]] * 3, mx.uint32),
}


def want(
    x: mx.array, parts: list[mx.array | None], kind: dict[str, Any], indices: mx.array, factors: mx.array | None
) -> mx.array:
    bank = values(parts, kind)
    if factors is not None:
        bank = bank * factors[:, None, None]
    wide = x.astype(mx.float32)[:, None] if indices.ndim == 1 else x.astype(mx.float32)[:, None, None]
    return (wide @ bank[indices].swapaxes(-1, -2)).squeeze(-2)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("indices", CHOSEN.values(), ids=CHOSEN)
def test_each_row_meets_the_experts_that_were_chosen_for_it(dtype: mx.Dtype, indices: mx.array) -> None:
    kind = FORMATS["nvfp4-4-16"]
    parts, factors = matrix(EXPERTS, COLUMNS, DEPTH, kind=kind), mx.arange(1, EXPERTS + 1).astype(mx.float32) / 3
    x, bank = rows(3, DEPTH, dtype), operand(parts, kind, global_scale=factors)
    expected = want(x, parts, kind, indices, factors).astype(dtype)
    assert metal.takes(x, bank, indices)
    for order in ORDERS:
        made = metal.multiply(x, bank, indices, launch=launch("product", **order))
        assert apart(made, expected) <= LIMIT[dtype]


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_gate_and_up_of_an_expert_meet_in_one_launch(kind: dict[str, Any]) -> None:
    depth, indices = max(DEPTH // kind["group_size"], 1) * kind["group_size"], CHOSEN["several for each row"]
    parts, x = matrix(EXPERTS, 2 * COLUMNS, depth, kind=kind), rows(3, depth, mx.float32)
    bank = operand(parts, kind)
    gate, up = mx.split(want(x, parts, kind, indices, None), 2, axis=-1)
    name: Any = "gelu_tanh" if kind["mode"] == "nvfp4" else "silu"
    made = metal.multiply(x, bank, indices, activation=name, launch=launch("product", **ORDERS[-1]))
    assert apart(made, activation.gated(name, gate, up)) <= 1e-5


def test_the_operations_take_the_kernel_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def asked(name: str) -> Any:
        calls.append(name)
        return launch(name, **ORDERS[0])

    monkeypatch.setattr(device, "native", lambda: None)
    kind, indices = FORMATS["mxfp8-8-32"], CHOSEN["several for each row"]
    parts, x = matrix(EXPERTS, 2 * COLUMNS, DEPTH, kind=kind), rows(3, DEPTH, mx.float32)
    assert gather_matmul.gather_gated(x, *parts, indices=indices, **kind, activation="silu") is None
    monkeypatch.setattr(device, "metal", lambda: True)
    monkeypatch.setattr(product, "kernel", asked)
    both = want(x, parts, kind, indices, None)
    made = gather_matmul.gather_quantized_matmul(x, *parts, indices=indices, **kind)
    assert apart(made, both) <= 1e-5
    assert calls == ["product"]
    inner = gather_matmul.gather_gated(x, *parts, indices=indices, **kind, activation="silu")
    assert inner is not None
    assert apart(inner, activation.gated("silu", *mx.split(both, 2, axis=-1))) <= 1e-5
    assert calls == ["product"] * 2
    # Exact gelu needs erf, and many pairs share their matrices in plain MLX.
    assert gather_matmul.gather_gated(x, *parts, indices=indices, **kind, activation="gelu") is None
    many = mx.zeros((metal.PAIRS + 1,), mx.uint32)
    gather_matmul.gather_quantized_matmul(rows(metal.PAIRS + 1, DEPTH, mx.float32), *parts, indices=many, **kind)
    assert calls == ["product"] * 2


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("int(chosen[turn])", "int(chosen[turn]) + 1"), ("out-of-bounds",)),
        (("EXPERTS ? turn / dims[3]", "EXPERTS ? turn"), ("wrong",)),
        (("size_t(EXPERTS ? turn : top + m)", "size_t(top + m)"), ("race",)),
        (("(!EXPERTS && top + m >= rows)", "(turn >= rows)"), ("unwritten-output",)),
    ],
    ids=["an expert too far", "a row too far", "pairs in one place", "pairs left out"],
)
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kind, indices = FORMATS["mxfp4-4-32"], mx.array([[4, 0], [1, 2], [3, 4]], mx.uint32)
    kernel, parts, x = faulty("product", edit), matrix(EXPERTS, COLUMNS, DEPTH, kind=kind), rows(3, DEPTH, mx.float32)
    bank = operand(parts, kind)

    def run(seed: int) -> mx.array:
        return metal.multiply(x, bank, indices, launch=lambda **call: kernel(**call, seed=seed))

    if kinds == ("wrong",):
        # Rows are kept inside x, so this is a wrong number and no access out of bounds.
        assert apart(run(0), want(x, parts, kind, indices, None)) > 0.1
    else:
        caught(kinds, run)

"""The halves of a layer on the Metal kernels: what their steps give, in fewer launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device
from arriero.kernels.activation import Activation
from arriero.kernels.attention_part import AttentionPart
from arriero.kernels.gated_part import GatedPart
from arriero.kernels.matrix import Matrix
from tests.metal.launches import apart, error, runnable
from tests.metal.packed import FORMATS, LIMIT, matrix, rows
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable

HIDDEN, INNER, HEADS, SIZE = 64, 96, 4, 16


def packed(columns: int, depth: int, seed: int, kind: str = "nvfp4-4-16", bias: mx.array | None = None) -> Matrix:
    how = FORMATS[kind]
    w, scales, biases = matrix(columns, depth, kind=how, seed=seed)
    factor = mx.array(0.7) if kind.startswith("nvfp4") else None
    return Matrix(w, scales, biases, **how, global_scale=factor, bias=bias)


def gain(width: int, seed: int, dtype: mx.Dtype) -> tuple[mx.array, float]:
    return 1 + 0.3 * rows(1, width, dtype, seed).reshape(-1), 1e-5


def plain(monkeypatch: pytest.MonkeyPatch, run: Any) -> Any:
    """By plain MLX."""
    with monkeypatch.context() as off:
        off.setattr(device, "metal", lambda: False)
        made = run()
        mx.eval(made)
    return made


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("activation", "joined", "after", "launches"),
    [("silu", True, False, 2), ("gelu_tanh", True, True, 2), ("gelu", True, False, 2), ("silu", False, True, 3)],
    ids=["joined", "a norm behind", "erf", "two matrices"],
)
def test_the_gated_half_takes_two_products(
    monkeypatch: pytest.MonkeyPatch,
    calls: Counter[str],
    dtype: mx.Dtype,
    activation: Activation,
    joined: bool,
    after: bool,
    launches: int,
) -> None:
    first = [packed(2 * INNER, HIDDEN, 1)] if joined else [packed(INNER, HIDDEN, 1), packed(INNER, HIDDEN, 2)]
    down = packed(HIDDEN, INNER, 3, "mxfp8-8-32", rows(1, HIDDEN, dtype, 4).reshape(-1))
    norms = gain(HIDDEN, 5, mx.float32), gain(HIDDEN, 6, dtype) if after else None
    part = GatedPart(norms[0], first, down, activation, norms[1])
    x, branch = rows(3, HIDDEN, dtype, 7), rows(3, HIDDEN, dtype, 8)
    made = part(x, branch)
    assert calls == {"product": launches}
    wide = [array.astype(mx.float32) for array in (x + branch, mx.zeros_like(x))]
    assert made.dtype == dtype
    assert error(made, plain(monkeypatch, lambda: part.graph(*wide))) <= LIMIT[dtype]


def test_what_the_product_has_no_form_for_goes_to_plain_mlx(calls: Counter[str]) -> None:
    dense = [Matrix(rows(2 * INNER, HIDDEN, mx.float32))]
    part = GatedPart(gain(HIDDEN, 5, mx.float32), dense, packed(HIDDEN, INNER, 3), "silu")
    x = rows(2, HIDDEN, mx.float32)
    assert apart(part(x, x), part.graph(x, x)) <= 1e-5
    assert calls == {"product": 2}  # of the packed matrix, both times
    many = rows(17, HIDDEN, mx.float32)
    whole = GatedPart(gain(HIDDEN, 5, mx.float32), [packed(2 * INNER, HIDDEN, 1)], packed(HIDDEN, INNER, 3), "silu")
    assert apart(whole(many, many), whole.graph(many, many)) <= 1e-5
    assert calls == {"product": 2}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("joined", [True, False])
def test_the_attention_half_has_its_norm_in_its_products(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str], dtype: mx.Dtype, joined: bool
) -> None:
    width = HEADS * SIZE
    qkv = [packed(3 * width, HIDDEN, 1)] if joined else [packed(width, HIDDEN, seed) for seed in range(3)]
    part = AttentionPart(qkv, packed(HIDDEN, width, 4), HEADS, HEADS, SIZE, 0.25, before=gain(HIDDEN, 5, dtype))
    x = rows(2, HIDDEN, dtype, 9)
    held = [mx.random.normal((1, HEADS, 12, SIZE), key=mx.random.key(i)).astype(dtype) for i in range(2)]
    spans: dict[str, Any] = {"lengths": [2], "positions": [7], "bases": [0], "memo": {}}

    def run(dtype: mx.Dtype) -> list[mx.array]:
        y, filled = part(x.astype(dtype), None, [buffer.astype(dtype) + 0 for buffer in held], **spans)
        return [y, *filled]

    made = run(dtype)
    assert calls == {"product": len(qkv) + 1, "attention": 1}  # neither norms nor angles of heads
    for ours, exact in zip(made, plain(monkeypatch, lambda: run(mx.float32)), strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) <= LIMIT[dtype]

"""Rows of packed tables on the Metal kernel against plain MLX."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels import device, embedding
from arriero.kernels.metal import rows as metal
from tests.metal.launches import ORDERS, apart, caught, emulated, faulty, launch, runnable
from tests.metal.packed import FORMATS, LIMIT, matrix, values
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable

ROWS, WIDTH = 7, 256
IDS = mx.array([6, 0, 3, 3], mx.int32)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, mx.float32) for kind in FORMATS.values()), *((FORMATS["nvfp4-4-16"], dtype) for dtype in LIMIT)],
    ids=[*FORMATS, *map(str, LIMIT)],
)
def test_every_format_is_decoded_as_plain_mlx_decodes_it(kind: dict[str, Any], dtype: mx.Dtype) -> None:
    parts = matrix(ROWS, WIDTH, kind=kind)
    factors = mx.arange(1, ROWS + 1).astype(mx.float32) / 3
    want = (values(parts, kind)[IDS] * factors[IDS][:, None]).astype(dtype)
    for order in ORDERS:
        made = metal.take(*parts, IDS, **kind, dtype=dtype, factors=factors, launch=launch("rows", **order))
        assert apart(made, want) <= LIMIT[dtype]


def test_one_group_of_one_row_and_many_ids() -> None:
    kind, ids = FORMATS["nvfp4-4-16"], mx.zeros((11,), mx.uint32)
    parts = matrix(1, 32, kind=kind)  # plain MLX takes two groups at a time
    w, scales, biases = [part if part is None else part[:, : part.shape[1] // 2] for part in parts]
    for order in ORDERS:
        made = metal.take(w, scales, biases, ids, **kind, dtype=mx.float32, launch=launch("rows", **order))
        assert apart(made, mx.broadcast_to(values(parts, kind)[:, :16], (11, 16))) <= 1e-5


def test_every_code_of_eight_bits_is_the_number_that_plain_mlx_reads() -> None:
    codes = mx.arange(256).astype(mx.uint8).reshape(2, 128)
    # Two codes are no numbers: real tables hold none, and what a kernel makes of them is its own.
    codes = mx.where((codes & 0x7F) == 0x7F, mx.array(0, mx.uint8), codes)
    how: dict[str, Any] = {"mode": "e4m3", "bits": 8, "group_size": 0, "dtype": mx.float32}
    ids = mx.array([1, 0], mx.int32)
    made = metal.take(codes.view(mx.uint32), None, None, ids, **how, launch=launch("rows", **ORDERS[-1]))
    assert mx.array_equal(made, mx.from_fp8(codes, mx.float32)[ids])


@pytest.mark.parametrize("kind", [FORMATS["nvfp4-4-16"], FORMATS["affine-8-64"]], ids=["nvfp4", "affine"])
def test_the_operations_take_the_kernel_where_they_may(
    monkeypatch: pytest.MonkeyPatch, calls: Counter[str], kind: dict[str, Any]
) -> None:
    parts, dtype = matrix(ROWS, WIDTH, kind=kind), mx.bfloat16
    factors = mx.arange(1, ROWS + 1).astype(mx.float32) / 3
    codes = mx.arange(ROWS * WIDTH).astype(mx.uint8).reshape(ROWS, WIDTH) & 0x3F
    how: dict[str, Any] = {**kind, "dtype": dtype}

    def run() -> list[mx.array]:
        return [
            embedding.take_quantized_rows(*parts, IDS, **how, global_scale=mx.array(0.3)),
            embedding.take_quantized_rows(*parts, IDS, **how, global_scale=factors),
            embedding.decoded_rows(*parts, IDS, **how, factors=factors),
            embedding.decoded_rows(
                codes, None, None, IDS, mode="e4m3", bits=8, group_size=0, dtype=dtype, factors=factors
            ),
        ]

    made = run()
    assert calls == {"rows": 4}
    monkeypatch.setattr(device, "metal", lambda: False)
    for ours, theirs in zip(made, run(), strict=True):
        assert apart(ours, theirs) <= 5e-3
    assert calls == {"rows": 4}


@emulated
@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (("I(ids[line])", "I(ids[line]) + 1"), ("out-of-bounds",)),
        (("line * width + part", "line * width / 2 + part"), ("race",)),
        (("i < 8; ++i) out", "i < 7; ++i) out"), ("unwritten-output",)),
        (("words[at + n]", "words[at + n + 1]"), ("out-of-bounds",)),
        (("scales[place]", "scales[place + 1]"), ("out-of-bounds",)),
    ],
    ids=["a row too far", "rows in one place", "a value left out", "a word too far", "a scale too far"],
)
def test_planted_faults_are_caught(edit: tuple[str, str], kinds: tuple[str, ...]) -> None:
    kind = FORMATS["mxfp4-4-32"]
    kernel, parts = faulty("rows", edit), matrix(ROWS, 64, kind=kind)
    caught(
        kinds,
        lambda seed: metal.take(*parts, IDS, **kind, dtype=mx.float32, launch=lambda **call: kernel(**call, seed=seed)),
    )

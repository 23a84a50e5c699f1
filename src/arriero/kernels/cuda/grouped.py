"""Experts of a prompt: its rows sorted by expert, gate, up and activation in one launch, down in another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.formats import FORMATS
from arriero.kernels.cuda.product import Operand
from arriero.kernels.cuda.source import Kernel

NVFP4 = FORMATS["nvfp4", 4, 16].code
ROWS, STEP = 64, 128
"""Rows of a block of threads, and numbers of each that are multiplied together."""
SHARED = 2 * ROWS * (STEP * 2 + 16)
MOST_EXPERTS = 1024


def takes(x: mx.array, gate_up: Sequence[Operand], down: Operand, top_k: int) -> bool:
    """Whether `multiply` computes this: bfloat16 rows, banks in NVFP4 of whole tiles."""
    inner, hidden = down.columns, down.rows
    every = [*gate_up, down]
    return (
        x.dtype == mx.bfloat16
        and x.size > 0
        and all(bank.format.code == NVFP4 and bank.experts == down.experts and bank.bias is None for bank in every)
        and 0 < down.experts <= MOST_EXPERTS
        and all(bank.columns == hidden == x.shape[1] for bank in gate_up)
        and sum(bank.rows for bank in gate_up) == 2 * inner
        and inner % STEP == 0
        and hidden % STEP == 0
        and top_k > 0
    )


@cache
def tiles_kernel() -> Kernel:
    """The kernel that divides sorted rows."""
    return Kernel(
        name="grouped_tiles",
        inputs=("experts",),
        outputs=("tiles",),
        headers=("numbers", "topk"),
        body="grouped_tiles_body",
        threads=MOST_EXPERTS,
    )


@cache
def kernel(factors: bool, up: bool, columns_out: int) -> Kernel:
    """The kernel of a product; `up`: a bank of its own."""
    second = ("up", "up_scales", *(("up_factors",) if factors else ()))
    return Kernel(
        name="grouped",
        inputs=(
            *("x", "order", "tiles", "w", "scales"),
            *(("factors",) if factors else ()),
            *(second if up else ()),
        ),
        outputs=("out",),
        headers=("numbers", "formats", "grouped"),
        body="grouped_body",
        threads=128,
        shared=SHARED,
        resident=2,
        defines=(
            ("COLUMNS_OUT", str(columns_out)),
            ("FACTORS", "factors" if factors else "nullptr"),
            *((name.upper(), name if up else "nullptr") for name in ("up", "up_scales")),
            ("UP_FACTORS", "up_factors" if up and factors else "nullptr"),
        ),
    )


def multiply(x: mx.array, chosen: mx.array, gate_up: Sequence[Operand], down: Operand) -> mx.array:
    """`down(silu(gate(x)) · up(x))` of rows x `[T, hidden]` and experts uint32 `[T, k]`: `[T, k, hidden]`."""
    tokens, top_k = chosen.shape
    pairs, inner = tokens * top_k, down.columns
    flat = chosen.reshape(-1)
    order = mx.argsort(flat).astype(mx.uint32)
    most = -(-pairs // ROWS) + down.experts
    tiles = tiles_kernel()(
        [mx.take(flat, order)],
        {"PAIRS": pairs, "EXPERTS": down.experts, "MOST": most},
        blocks=(1, 1, 1),
        shapes=[(most, 4)],
        dtypes=[mx.int32],
    )[0]
    rows = _product(x, order, tiles, gate_up, most, inner, pairs, top_k)
    return _product(rows, order, tiles, [down], most, down.rows, pairs, 0).reshape(tokens, top_k, -1)


def _product(
    x: mx.array,
    order: mx.array,
    tiles: mx.array,
    banks: Sequence[Operand],
    most: int,
    columns: int,
    pairs: int,
    spread: int,
) -> mx.array:
    first, gated = banks[0], spread > 0
    factors = first.factors is not None
    inputs = [x, order, tiles]
    for bank in banks:
        inputs += [bank.w, bank.scales, *([] if bank.factors is None else [bank.factors])]
    made = kernel(factors, len(banks) > 1, columns)(
        inputs,
        {
            "K_": first.columns,
            "COLUMNS_": first.rows,
            "GATED": gated,
            "SPREAD": spread,
            "JOINED": gated and len(banks) == 1,
        },
        blocks=(columns // (64 if gated else 128), most, 1),
        shapes=[(pairs, columns)],
        dtypes=[mx.bfloat16],
    )
    return made[0]

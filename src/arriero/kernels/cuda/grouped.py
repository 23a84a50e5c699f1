"""Experts of a prompt: its rows sorted by expert, gate, up and activation in one launch, down in another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.mixture import ALL, Banks, arguments
from arriero.kernels.cuda.mixture import takes as alike
from arriero.kernels.cuda.product import ACTIVATIONS, Operand, bits_of
from arriero.kernels.cuda.source import Kernel

ROWS, STEP = 64, 128
"""Rows of a block of threads, and numbers of each that are multiplied together."""
SHARED = 2 * ROWS * (STEP * 2 + 16)
MOST_EXPERTS = 1024
WIDE, GATED = 128, 64
"""Columns of a block of down, and of gate and up."""
LANE = 32
"""Numbers of a row that a thread decodes."""


def takes(x: mx.array, banks: Banks) -> bool:
    """Whether `multiply` computes this: bfloat16 rows, banks of one format, nothing that every token takes."""
    inner, hidden = banks.inner, banks.hidden
    return (
        alike(banks)
        and x.dtype == mx.bfloat16
        and x.size > 0
        and x.shape[1] == hidden
        and not banks.one
        and 0 < banks.down.experts <= MOST_EXPERTS
        and inner % LANE == 0
        and hidden % LANE == 0
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


SUM = Kernel(
    name="grouped_sum",
    inputs=("y", "weights"),
    outputs=("out",),
    headers=("numbers",),
    body="grouped_sum_body",
    threads=128,
)


@cache
def kernel(inputs: tuple[str, ...], defines: tuple[tuple[str, str], ...]) -> Kernel:
    """The kernel of a product with the banks that `inputs` and `defines` name."""
    return Kernel(
        name="grouped",
        inputs=inputs,
        outputs=("out",),
        headers=("numbers", "formats", "product", "clamped", "copies", "grouped"),
        body="grouped_body",
        threads=128,
        shared=SHARED,
        resident=2,
        defines=defines,
    )


def multiply(x: mx.array, chosen: mx.array, weights: mx.array, banks: Banks) -> mx.array:
    """`Σ weight · down(activation(gate(x)) · up(x))` of rows x `[T, hidden]`, bfloat16.

    `chosen` uint32 and `weights` float32 are `[T, k]`; sums are float32, of results that are rounded to bfloat16.
    """
    tokens, hidden = x.shape
    y = each(x, chosen, banks)
    return SUM(
        [y, weights],
        {"PER": chosen.shape[1], "WIDTH": hidden},
        blocks=(-(-hidden // 8 // SUM.threads), tokens, 1),
        shapes=[(tokens, hidden)],
        dtypes=[mx.bfloat16],
    )[0]


def each(x: mx.array, chosen: mx.array, banks: Banks) -> mx.array:
    """`down(activation(gate(x)) · up(x))` of rows x `[T, hidden]` and experts uint32 `[T, k]`: `[T, k, hidden]`."""
    tokens, top_k = chosen.shape
    pairs = tokens * top_k
    flat = chosen.reshape(-1)
    order = mx.argsort(flat).astype(mx.uint32)
    most = -(-pairs // ROWS) + banks.down.experts
    tiles = tiles_kernel()(
        [mx.take(flat, order)],
        {"PAIRS": pairs, "EXPERTS": banks.down.experts, "MOST": most},
        blocks=(1, 1, 1),
        shapes=[(most, 4)],
        dtypes=[mx.int32],
    )[0]
    rows = _product(x, order, tiles, banks, banks.gate_up, most, pairs, top_k)
    return _product(rows, order, tiles, banks, [banks.down], most, pairs, 0).reshape(tokens, top_k, -1)


def _product(
    x: mx.array,
    order: mx.array,
    tiles: mx.array,
    banks: Banks,
    operands: Sequence[Operand],
    most: int,
    pairs: int,
    spread: int,
) -> mx.array:
    first, gated = operands[0], spread > 0
    columns = banks.inner if gated else banks.hidden
    joined, turns = gated and len(operands) == 1, gated and banks.by_turns
    inputs: dict[str, mx.array] = {"x": x, "order": order, "tiles": tiles}
    defines: dict[str, str] = {}
    for name, operand in (("W", first), ("U", operands[-1] if len(operands) > 1 else None)):
        found, macros = arguments(name, operand, ALL)
        inputs |= found
        defines |= macros
    if joined:
        defines |= {f"U_{part}": defines[f"W_{part}"] for part in ALL}
    clamp = banks.clamp or (0.0, 0.0)
    made = kernel(tuple(inputs), tuple(defines.items()))(
        list(inputs.values()),
        {
            "MODE": first.format.code,
            "GROUP": first.format.group,
            "K_": first.columns,
            "COLUMNS_": first.rows,
            "COLUMNS_OUT": columns,
            "GATED": gated,
            "SPREAD": spread,
            "STRIDE": 2 if turns else 1,
            "U_FROM": 1 if turns else columns if joined else 0,
            "ACTIVATION": ACTIVATIONS[banks.activation if gated else "silu"],
            "CLAMPED": gated and banks.clamp is not None,
            "ALPHA_BITS": bits_of(clamp[0]) if gated else 0,
            "LIMIT_BITS": bits_of(clamp[1]) if gated else 0,
        },
        blocks=(-(-columns // (GATED if gated else WIDE)), most, 1),
        shapes=[(pairs, columns)],
        dtypes=[mx.bfloat16],
    )
    return made[0]

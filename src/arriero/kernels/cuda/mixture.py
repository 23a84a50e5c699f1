"""The experts of a few tokens: gate, up and activation in one launch, down and the weighed sum in another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import ACTIVATIONS, TILE, Activation, Operand, bits_of
from arriero.kernels.cuda.source import Kernel

INNER_WARPS, DOWN_WARPS = 4, 4
INNER_RESIDENT, DOWN_RESIDENT = 3, 4
"""Warps of a block, which share out a line's columns, and blocks that a multiprocessor holds at once."""
INNER_DEEPEST, DOWN_DEEPEST = 4, 5
"""Units of each row that a thread keeps in flight at most."""
LINES = 512
"""The most pairs of token and expert: beyond, sorting tokens by expert reads less."""


@dataclass(frozen=True, eq=False, slots=True)
class Banks:
    """All experts of a layer, in one format; `one` is the network that every token takes beside those chosen for it."""

    gate_up: tuple[Operand, ...]
    """One bank with gate's rows before up's, or one of each."""
    down: Operand
    one: tuple[Operand, ...] = ()
    one_down: Operand | None = None
    activation: Activation = "silu"
    clamp: tuple[float, float] | None = None
    """In place of the activation: α and the limit L of `g · σ(α g) · (u + 1)` with g ≤ L and u within ± L."""
    by_turns: bool = False
    """The rows of gate and up take turns in their one bank."""

    @property
    def inner(self) -> int:
        return self.gate_up[0].rows // (2 if len(self.gate_up) == 1 else 1)

    @property
    def hidden(self) -> int:
        return self.down.rows


def takes(banks: Banks) -> bool:
    """Whether the kernels have banks of this form: all of one format, and the one as wide as each of the others."""
    every = [*banks.gate_up, banks.down, *banks.one, *([] if banks.one_down is None else [banks.one_down])]
    inner, hidden = banks.inner, banks.hidden
    of_one = inner * (2 if len(banks.one) == 1 else 1)
    return (
        all(operand.format == banks.down.format for operand in every)
        and all(operand.bias is None for operand in every if not operand.experts)
        and len({operand.bias is None for operand in banks.gate_up}) == 1
        and not (banks.by_turns and len(banks.gate_up) > 1)
        and banks.down.columns == inner
        and inner % TILE == 0
        and hidden % TILE == 0
        and all(operand.columns == hidden for operand in (*banks.gate_up, *banks.one))
        and bool(banks.one) == (banks.one_down is not None)
        and all(operand.rows == of_one for operand in banks.one)
        and (banks.one_down is None or (banks.one_down.rows, banks.one_down.columns) == (hidden, inner))
    )


def depth_of(units: int, warps: int, deepest: int) -> int:
    """Units of each row that a thread keeps in flight: a number that a warp's share comes close to a multiple of."""
    share = -(-units // warps)
    exact = max(depth for depth in range(1, deepest + 1) if share % depth == 0)
    if 2 * exact >= min(deepest, share):
        return exact
    return max(depth for depth in range(1, deepest + 1) if -(-share // depth) * depth <= share + max(1, share // 8))


PARTS = {"W": "w", "S": "scales", "B": "biases", "F": "factors", "BIAS": "bias"}
"""What operands are made of, by what their arguments' names end in."""
ALL = tuple(PARTS)
ONE = ALL[:-1]


def arguments(name: str, operand: Operand | None, parts: tuple[str, ...]) -> tuple[dict[str, mx.array], dict[str, str]]:
    """An operand's arrays by the names of arguments, and what stands for each in the body."""
    arrays: dict[str, mx.array] = {}
    defines: dict[str, str] = {}
    for part in parts:
        array = None if operand is None else getattr(operand, PARTS[part])
        defines[f"{name}_{part}"] = "nullptr" if array is None else f"{name.lower()}_{part.lower()}"
        if array is not None:
            arrays[f"{name.lower()}_{part.lower()}"] = array
    return arrays, defines


@cache
def _kernel(
    body: str, inputs: tuple[str, ...], defines: tuple[tuple[str, str], ...], tiles: int, warps: int, resident: int
) -> Kernel:
    return Kernel(
        name=body,
        inputs=inputs,
        outputs=("out",),
        headers=("numbers", "formats", "product", "clamped", "mixture"),
        body=f"{body}_body",
        threads=32 * warps,
        shared=2 * warps * tiles * 16 * 4,
        defines=defines,
        resident=resident,
    )


def first_arguments(banks: Banks) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What the product with gate and up takes, with the factors of down; and what stands for each in a body."""
    joined, one_joined = len(banks.gate_up) == 1, len(banks.one) == 1
    one = banks.one or (None,)
    named: dict[str, tuple[Operand | None, tuple[str, ...]]] = {
        "G": (banks.gate_up[0], ALL),
        "U": (None if joined else banks.gate_up[1], ALL),
        "OG": (one[0], ONE),
        "OU": (None if len(one) == 1 else one[1], ONE),
        "D": (banks.down, ("F",)),
        "OD": (banks.one_down, ("F",)),
    }
    arrays: dict[str, mx.array] = {}
    defines: dict[str, str] = {}
    for name, (operand, parts) in named.items():
        found, macros = arguments(name, operand, parts)
        arrays |= found
        defines |= macros
    for half, whole, same in (("U", "G", joined), ("OU", "OG", one_joined)):
        if same:
            defines |= {f"{half}_{part}": defines[f"{whole}_{part}"] for part in (ONE if half == "OU" else ALL)}
    return arrays, defines


def first_template(banks: Banks) -> dict[str, int | bool]:
    """Where the rows of gate and up are, and what becomes of them."""
    joined = len(banks.gate_up) == 1
    alpha, limit = banks.clamp or (0.0, 0.0)
    return {
        "G_ROWS": banks.gate_up[0].rows,
        "U_FROM": 1 if banks.by_turns else banks.inner if joined else 0,
        "STRIDE": 2 if banks.by_turns else 1,
        "OU_FROM": banks.inner if len(banks.one) == 1 else 0,
        "ACTIVATION": ACTIVATIONS[banks.activation],
        "CLAMPED": banks.clamp is not None,
        "ALPHA_BITS": bits_of(alpha),
        "LIMIT_BITS": bits_of(limit),
    }


def multiply(
    gpu: Gpu, banks: Banks, x: mx.array, chosen: mx.array, weights: mx.array, residual: mx.array | None = None
) -> mx.array:
    """`Σ weight · down(activation(gate(x)) · up(x)) (+ residual)` of rows x `[T, hidden]`, bfloat16, biases included.

    `chosen` uint32 and `weights` float32 are `[T, k]`; the number of experts stands for the one. Sums are float32, and
    rounded once.
    """
    tokens, per = chosen.shape
    inner, hidden = banks.inner, banks.hidden
    arrays, defines = first_arguments(banks)
    arrays = {"x": x, "chosen": chosen, "weights": weights} | arrays
    fixed: dict[str, int | bool] = {
        "MODE": banks.down.format.code,
        "GROUP": banks.down.format.group,
        "PER": per,
        "EXPERTS_": banks.down.experts,
    }
    unit = banks.down.format.unit
    made = _kernel("mixture_inner", tuple(arrays), tuple(defines.items()), 2, INNER_WARPS, INNER_RESIDENT)(
        list(arrays.values()),
        {
            **fixed,
            "K_": hidden,
            "N_": inner,
            **first_template(banks),
            "DEPTH": depth_of(-(-hidden // unit), INNER_WARPS, INNER_DEEPEST),
        },
        blocks=(min(gpu.multiprocessors * INNER_RESIDENT, tokens * per * inner // TILE), 1, 1),
        shapes=[(tokens, per, inner)],
        dtypes=[mx.bfloat16],
    )
    biased = banks.down.bias is not None
    arrays, defines = {"x": made[0], "chosen": chosen}, {"RESIDUAL": "nullptr" if residual is None else "residual"}
    defines["WEIGHTS"] = "weights" if biased else "nullptr"
    for name, operand, parts in (("D", banks.down, ("W", "S", "B", "BIAS")), ("OD", banks.one_down, ("W", "S", "B"))):
        found, macros = arguments(name, operand, parts)
        arrays |= found
        defines |= macros
    if residual is not None:
        arrays["residual"] = residual
    if biased:
        arrays["weights"] = weights
    summed = _kernel("mixture_down", tuple(arrays), tuple(defines.items()), 1, DOWN_WARPS, DOWN_RESIDENT)(
        list(arrays.values()),
        {**fixed, "K_": inner, "N_": hidden, "DEPTH": depth_of(per * -(-inner // unit), DOWN_WARPS, DOWN_DEEPEST)},
        blocks=(min(gpu.multiprocessors * DOWN_RESIDENT, tokens * hidden // TILE), 1, 1),
        shapes=[(tokens, hidden)],
        dtypes=[mx.bfloat16],
    )
    return summed[0]

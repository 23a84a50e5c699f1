"""Experts of prompts on an NVIDIA GPU, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import grouped
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.mixture import Banks
from arriero.kernels.cuda.product import Activation
from tests.helpers.cuda import ON_GPU, SEED, Packed, error, exact, executed, gpu, packed, rows

__all__ = ["executed", "gpu"]

TOLERANCE = 5e-3


Format = tuple[str, int, int]
NVFP4 = ("nvfp4", 4, 16)


@dataclass
class Case:
    """Banks, and what becomes of rows."""

    experts: int
    hidden: int
    inner: int
    how: Format = NVFP4
    joined: bool = True
    scaled: bool = False
    clamped: bool = False
    """As gpt-oss has it: biases, clamps, rows of gate and up by turns."""
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        wide = (self.experts, 2 * self.inner, self.hidden)
        half = (self.experts, self.inner, self.hidden)
        self.wide = [self.bank(shape, self.hidden**-0.5) for shape in ([wide] if self.joined else [half] * 2)]
        self.down = self.bank((self.experts, self.hidden, self.inner), 0.1)
        gate_up = tuple(bank.operand for bank in self.wide)
        self.banks = Banks(gate_up, self.down.operand, activation=self.activation)
        if self.clamped:
            self.banks = replace(self.banks, clamp=(1.702, 1.0), by_turns=True)

    def bank(self, shape: tuple[int, int, int], deviation: float) -> Packed:
        scale = mx.array(SEED.uniform(0.5, 2, self.experts).astype(np.float32)) if self.scaled else None
        bias = rows(*shape[:2]) if self.clamped else None
        return packed(shape, *self.how, deviation=deviation, global_scale=scale, bias=bias, ragged=True)

    def check(self, chosen: np.ndarray) -> None:
        x, weights = rows(len(chosen), self.hidden), SEED.uniform(0, 1, chosen.shape).astype(np.float32)
        assert grouped.takes(x, self.banks)
        taken = mx.array(chosen.astype(np.uint32))
        each, ours = grouped.each(x, taken, self.banks), grouped.multiply(x, taken, mx.array(weights), self.banks)
        made = np.einsum("tk,teok->teo", exact(x), np.concatenate([bank.values for bank in self.wide], axis=1)[chosen])
        if self.clamped:
            (wide, down) = (
                exact(bank.bias) for bank in (self.wide[0].operand, self.down.operand) if bank.bias is not None
            )
            made = made + wide[chosen]
            gate, up = np.minimum(made[..., 0::2], 1.0), np.clip(made[..., 1::2], -1.0, 1.0)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        else:
            gate, up = made[..., : self.inner], made[..., self.inner :]
            turned = (
                np.exp(-gate)
                if self.activation == "silu"
                else np.exp(-2 * (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))
            )
            inner, down = gate / (1 + turned) * up, 0.0
        want = np.einsum("tek,teok->teo", inner, self.down.values[chosen]) + (down[chosen] if self.clamped else 0)
        assert error(each, want) < TOLERANCE
        assert error(ours, np.einsum("te,teo->to", weights, want)) < TOLERANCE


def mixed(tokens: int) -> np.ndarray:
    """Nobody chooses the third of 6 experts, and the last is chosen by all."""
    some = np.stack([SEED.permutation([0, 1, 3, 4])[:2] for _ in range(tokens)])
    return np.concatenate([some, np.full((tokens, 1), 5)], axis=1)


@pytest.mark.parametrize(("joined", "scaled"), [(True, False), (False, True)])
def test_experts_of_rows_in_any_order(executed: Gpu, joined: bool, scaled: bool) -> None:
    # The last is chosen by more rows than a block takes.
    Case(6, 128, 64, joined=joined, scaled=scaled).check(mixed(70))


def test_experts_with_biases_and_rows_that_end_in_part_of_a_step(executed: Gpu) -> None:
    Case(6, 160, 96, ("mxfp4", 4, 32), clamped=True).check(mixed(20))


@pytest.mark.parametrize(
    "how",
    [("mxfp8", 8, 32), pytest.param(("affine", 4, 64), marks=ON_GPU), pytest.param(("affine", 8, 32), marks=ON_GPU)],
)
def test_experts_in_other_formats(executed: Gpu, how: Format) -> None:
    Case(6, 128, 64, how).check(mixed(9))


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 2, 2), (64, 1, 1), (257, 12, 4), (40, 130, 3)])
def test_other_numbers_of_rows_and_experts(gpu: Gpu, tokens: int, experts: int, top_k: int) -> None:
    chosen = np.stack([SEED.permutation(experts)[:top_k] for _ in range(tokens)])
    Case(experts, 384, 256, joined=False, scaled=True).check(chosen)


@pytest.mark.parametrize("how", [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("affine", 4, 128), ("affine", 8, 64)])
@pytest.mark.parametrize(("hidden", "inner", "clamped"), [(2880, 256, True), (256, 2880, True), (640, 384, False)])
def test_other_shapes_in_all_formats(gpu: Gpu, how: Format, hidden: int, inner: int, clamped: bool) -> None:
    how = (*how[:2], 32) if how[0] == "affine" and clamped else how
    Case(6, hidden, inner, how, clamped=clamped, activation="gelu_tanh").check(mixed(70))


def test_what_the_kernel_does_not_take(executed: Gpu) -> None:
    case = Case(2, 128, 128)
    assert grouped.takes(rows(3, 128), case.banks)
    assert not grouped.takes(rows(3, 256), case.banks)
    assert not grouped.takes(rows(3, 128).astype(mx.float32), case.banks)
    other = packed((2, 128, 128), "mxfp8", 8, 32).operand
    assert not grouped.takes(rows(3, 128), replace(case.banks, down=other))

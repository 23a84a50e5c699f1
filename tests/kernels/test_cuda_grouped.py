"""Experts of prompts on an NVIDIA GPU, against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import grouped
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import SEED, Packed, error, exact, executed, gpu, packed, rows

__all__ = ["executed", "gpu"]

TOLERANCE = 1e-2
"""Two products, with a rounding to bfloat16 of gate, of up and of what down takes."""


def banks(experts: int, hidden: int, inner: int, *, joined: bool, scaled: bool) -> tuple[list[Packed], Packed]:
    def factors() -> mx.array | None:
        return mx.array(SEED.uniform(0.5, 2, experts).astype(np.float32)) if scaled else None

    shapes = [(experts, 2 * inner, hidden)] if joined else [(experts, inner, hidden)] * 2
    wide = [packed(shape, "nvfp4", 4, 16, deviation=hidden**-0.5, global_scale=factors()) for shape in shapes]
    return wide, packed((experts, hidden, inner), "nvfp4", 4, 16, deviation=0.1, global_scale=factors())


def check(chosen: np.ndarray, experts: int, hidden: int, inner: int, *, joined: bool, scaled: bool) -> None:
    wide, down = banks(experts, hidden, inner, joined=joined, scaled=scaled)
    x = rows(len(chosen), hidden)
    gate_up = [bank.operand for bank in wide]
    assert grouped.takes(x, gate_up, down.operand, chosen.shape[1])
    ours = grouped.multiply(x, mx.array(chosen.astype(np.uint32)), gate_up, down.operand)
    both = np.concatenate([bank.values for bank in wide], axis=1)[chosen]
    made = np.einsum("tk,teok->teo", exact(x), both)
    gate, up = made[..., :inner], made[..., inner:]
    want = np.einsum("tek,teok->teo", gate / (1 + np.exp(-gate)) * up, down.values[chosen])
    assert error(ours, want) < TOLERANCE


@pytest.mark.parametrize(("joined", "scaled"), [(True, False), (False, True)])
def test_experts_of_rows_in_any_order(executed: Gpu, joined: bool, scaled: bool) -> None:
    # Nobody chooses the third expert, and the last is chosen by more rows than a block takes.
    chosen = np.stack([SEED.permutation([0, 1, 3, 4])[:2] for _ in range(70)])
    chosen = np.concatenate([chosen, np.full((70, 1), 5)], axis=1)
    check(chosen, 6, 256, 128, joined=joined, scaled=scaled)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 2, 2), (64, 1, 1), (257, 12, 4), (40, 130, 3)])
def test_other_numbers_of_rows_and_experts(gpu: Gpu, tokens: int, experts: int, top_k: int) -> None:
    chosen = np.stack([SEED.permutation(experts)[:top_k] for _ in range(tokens)])
    check(chosen, experts, 384, 256, joined=False, scaled=True)


def test_what_the_kernel_does_not_take(executed: Gpu) -> None:
    wide, down = banks(2, 128, 128, joined=False, scaled=False)
    gate_up = [bank.operand for bank in wide]
    assert grouped.takes(rows(3, 128), gate_up, down.operand, 2)
    assert not grouped.takes(rows(3, 256), gate_up, down.operand, 2)
    assert not grouped.takes(rows(3, 128).astype(mx.float32), gate_up, down.operand, 2)
    other = packed((2, 128, 128), "mxfp8", 8, 32).operand
    assert not grouped.takes(rows(3, 128), gate_up, other, 2)

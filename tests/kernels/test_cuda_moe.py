"""Mixtures of experts of few tokens on an NVIDIA GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import gathering, mixture, router, sparse
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Operand
from arriero.model.layers.corrected_router import CorrectedRouter, CorrectedRouterConfig
from arriero.model.layers.linear import Linear
from arriero.model.weight import Weight
from tests.helpers.cuda import ON_GPU, SEED, Packed, error, exact, executed, packed, rows

__all__ = ["executed"]


def silu(x: np.ndarray) -> np.ndarray:
    made: np.ndarray = x / (1 + np.exp(-x))
    return made


def expected(
    x: np.ndarray,
    gates: list[np.ndarray],
    ups: list[np.ndarray],
    downs: list[np.ndarray],
    chosen: np.ndarray,
    weights: np.ndarray,
) -> np.ndarray:
    made = np.zeros_like(x)
    for m in range(len(x)):
        for e, w in zip(chosen[m], weights[m], strict=True):
            made[m] += w * downs[e] @ (silu(gates[e] @ x[m]) * (ups[e] @ x[m]))
    return made


@pytest.mark.parametrize(
    ("how", "tokens", "joined", "one"),
    [
        (("nvfp4", 4, 16), 3, False, True),
        pytest.param(("nvfp4", 4, 16), 1, True, False, marks=ON_GPU),
        pytest.param(("mxfp8", 8, 32), 2, False, True, marks=ON_GPU),
        (("affine", 4, 64), 1, True, True),
    ],
)
def test_experts_are_weighed_and_summed(
    executed: Gpu, how: tuple[str, int, int], tokens: int, joined: bool, one: bool
) -> None:
    hidden, inner, count, k = 256, 128, 5, 3
    scaled = how[0] == "nvfp4"

    def bank(*shape: int) -> Packed:
        scale = mx.array(SEED.uniform(0.5, 2, shape[0]).astype(np.float32)) if scaled and len(shape) == 3 else None
        if scaled and len(shape) == 2:
            scale = mx.array(0.7)
        return packed(shape, *how, deviation=0.1, global_scale=scale)

    gate_up = [bank(count, 2 * inner, hidden)] if joined else [bank(count, inner, hidden) for _ in range(2)]
    down = bank(count, hidden, inner)
    shared = [bank(2 * inner, hidden)] if one else []
    shared_down = bank(hidden, inner) if one else None
    banks = mixture.Banks(
        tuple(b.operand for b in gate_up),
        down.operand,
        tuple(b.operand for b in shared),
        None if shared_down is None else shared_down.operand,
    )
    assert mixture.takes(banks)

    def halves(values: np.ndarray) -> list[np.ndarray]:
        return [values[..., :inner, :], values[..., inner:, :]]

    first = halves(gate_up[0].values) if joined else [b.values for b in gate_up]
    gates, ups, downs = list(first[0]), list(first[1]), list(down.values)
    chosen = np.stack([SEED.permutation(count)[:k] for _ in range(tokens)])
    if shared_down is not None:
        gate, up = halves(shared[0].values)
        gates, ups, downs = [*gates, gate], [*ups, up], [*downs, shared_down.values]
        chosen = np.concatenate([chosen, np.full((tokens, 1), count)], axis=1)
    weights = SEED.uniform(0, 1, chosen.shape).astype(np.float32)
    x, residual = rows(tokens, hidden), rows(tokens, hidden)
    ours = mixture.multiply(executed, banks, x, mx.array(chosen.astype(np.uint32)), mx.array(weights), residual)
    assert error(ours, expected(exact(x), gates, ups, downs, chosen, weights) + exact(residual)) < 5e-3


@pytest.mark.parametrize(
    ("how", "hidden", "inner", "by_turns"),
    [
        (("mxfp4", 4, 32), 224, 352, True),
        pytest.param(("mxfp4", 4, 32), 2880, 160, False, marks=ON_GPU),
        pytest.param(("affine", 8, 32), 288, 96, True, marks=ON_GPU),
        pytest.param(("nvfp4", 4, 16), 96, 2880, True, marks=ON_GPU),
    ],
)
def test_clamped_experts_with_biases_and_rows_that_end_in_part_of_a_unit(
    executed: Gpu, how: tuple[str, int, int], hidden: int, inner: int, by_turns: bool
) -> None:
    tokens, count, k, alpha, limit = 3, 4, 2, 1.702, 1.0
    biases = [rows(count, width) for width in (2 * inner, hidden)]
    gate_up = packed((count, 2 * inner, hidden), *how, deviation=0.1, bias=biases[0], ragged=True)
    down = packed((count, hidden, inner), *how, deviation=0.1, bias=biases[1], ragged=True)
    banks = mixture.Banks((gate_up.operand,), down.operand, clamp=(alpha, limit), by_turns=by_turns)
    assert mixture.takes(banks)
    x, chosen = rows(tokens, hidden), np.stack([SEED.permutation(count)[:k] for _ in range(tokens)])
    weights = SEED.uniform(0, 1, chosen.shape).astype(np.float32)
    both = np.einsum("tk,teok->teo", exact(x), gate_up.values[chosen]) + exact(biases[0])[chosen]
    gate, up = (both[..., 0::2], both[..., 1::2]) if by_turns else (both[..., :inner], both[..., inner:])
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    made = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
    each = np.einsum("tek,teok->teo", made, down.values[chosen]) + exact(biases[1])[chosen]
    ours = mixture.multiply(executed, banks, x, mx.array(chosen.astype(np.uint32)), mx.array(weights))
    assert error(ours, np.einsum("te,teo->to", weights, each)) < 5e-3


@pytest.mark.parametrize(
    ("tokens", "experts", "top", "normalise", "around", "one"),
    [
        (9, 40, 5, True, True, True),
        (1, 33, 1, False, False, False),
        pytest.param(2, 6, 6, False, True, True, marks=ON_GPU),
    ],
)
def test_a_router_chooses_the_best_by_softmax(
    executed: Gpu, tokens: int, experts: int, top: int, normalise: bool, around: bool, one: bool
) -> None:
    x, w, gate = rows(tokens, 128), rows(experts, 128), rows(1, 128, 0.1)
    branch, gain = rows(tokens, 128), 1 + 0.1 * rows(1, 128)[0].astype(mx.float32)
    made = router.route(
        executed,
        x,
        w,
        router.Choice(top, normalise),
        branch=branch if around else None,
        norm=(gain, 1e-6) if around else None,
        one=gate if one else None,
    )
    taken = exact(x)
    if around:
        total = (x.astype(mx.float32) + branch.astype(mx.float32)).astype(mx.bfloat16)
        assert error(made.total, exact(total)) == 0
        taken = exact(total) / np.sqrt((exact(total) ** 2).mean(1, keepdims=True) + 1e-6) * exact(gain)
        assert error(made.normed, taken) < 5e-3
        taken = exact(made.normed)
    scores = taken @ exact(w).T
    order = np.argsort(-scores, axis=1)[:, :top]
    parts = np.exp(scores - scores.max(1, keepdims=True))
    best = np.take_along_axis(parts, order, 1)
    weights = best / (best if normalise else parts).sum(1, keepdims=True)
    if one:
        order = np.concatenate([order, np.full((tokens, 1), experts)], axis=1)
        weights = np.concatenate([weights, 1 / (1 + np.exp(-taken @ exact(gate).T))], axis=1)
    assert made.chosen.tolist() == order.tolist()
    assert np.allclose(np.array(made.weights), weights, rtol=1e-4, atol=1e-6)


@ON_GPU
def test_a_routers_bias_counts(executed: Gpu) -> None:
    x, w, bias = rows(2, 96), rows(9, 96, 0.1), rows(1, 9)[0]
    made = router.route(executed, x, w, router.Choice(3, True), bias=bias)
    scores = exact(x) @ exact(w).T + exact(bias)
    order = np.argsort(-scores, axis=1)[:, :3]
    parts = np.exp(np.take_along_axis(scores, order, 1))
    assert made.chosen.tolist() == order.tolist()
    assert np.allclose(np.array(made.weights), parts / parts.sum(1, keepdims=True), rtol=1e-4)


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "normalise"),
    [(40, 5, 2, True), pytest.param(33, 1, 1, False, marks=ON_GPU), pytest.param(256, 8, 4, True, marks=ON_GPU)],
)
def test_experts_are_chosen_with_a_correction_out_of_the_best_groups(
    executed: Gpu, experts: int, groups: int, top_groups: int, normalise: bool
) -> None:
    config = CorrectedRouterConfig(experts, 4, groups, top_groups, normalise, 2.5)
    x, w = rows(6, 128), rows(experts, 128, 0.1)
    plain = CorrectedRouter(
        config, Linear(Weight(w.astype(mx.float32))), mx.array(SEED.normal(0, 0.3, experts), mx.float32)
    )
    choice = plain.choice
    assert choice is not None
    made = router.route(executed, x, w, replace(choice, whole=True))
    chosen, weights = plain(x)
    assert made.chosen[:, :4].tolist() == chosen.tolist()
    assert made.chosen[:, 4].tolist() == [experts] * 6
    assert np.allclose(np.array(made.weights[:, :4]), np.array(weights), rtol=1e-4)
    assert made.weights[:, 4].tolist() == [1.0] * 6


def test_of_equal_experts_the_first_are_chosen(executed: Gpu) -> None:
    w = mx.zeros((70, 128), mx.bfloat16)
    made = router.route(executed, rows(1, 128), w, router.Choice(4, True))
    assert made.chosen.tolist() == [[0, 1, 2, 3]]
    assert made.weights.tolist() == [[0.25] * 4]


@pytest.mark.parametrize(
    ("how", "tokens", "hidden", "inner", "shared", "clamped", "around"),
    [
        pytest.param(("nvfp4", 4, 16), 1, 256, 128, True, False, True, marks=ON_GPU),
        (("mxfp4", 4, 32), 3, 160, 96, False, True, True),
        pytest.param(("affine", 4, 64), 8, 512, 256, True, False, False, marks=ON_GPU),
        pytest.param(("nvfp4", 4, 16), 8, 2048, 512, True, False, True, marks=ON_GPU),
        pytest.param(("mxfp4", 4, 32), 1, 2880, 2880, False, True, True, marks=ON_GPU),
    ],
)
def test_all_of_a_mixture_in_one_launch_is_what_launches_of_their_own_give(
    executed: Gpu,
    how: tuple[str, int, int],
    tokens: int,
    hidden: int,
    inner: int,
    shared: bool,
    clamped: bool,
    around: bool,
) -> None:
    count, choice = 9, router.Choice(3, True)

    def bank(*shape: int) -> Operand:
        bias = rows(*shape[:2]) if clamped and len(shape) == 3 else None
        return packed(shape, *how, deviation=shape[-1] ** -0.5, bias=bias, ragged=True).operand

    banks = mixture.Banks((bank(count, 2 * inner, hidden),), bank(count, hidden, inner))
    if clamped:
        banks = replace(banks, clamp=(1.702, 7.0), by_turns=True)
    if shared:
        banks = replace(banks, one=(bank(2 * inner, hidden),), one_down=bank(hidden, inner))
    x, w = rows(tokens, hidden), rows(count, hidden, hidden**-0.5)
    how_routed: dict[str, Any] = {
        "branch": rows(tokens, hidden) if around else None,
        "norm": (1 + 0.1 * rows(1, hidden)[0], 1e-6) if around else None,
        "one": rows(1, hidden, 0.1) if shared else None,
        "bias": rows(1, count)[0] if clamped else None,
    }
    assert sparse.fits(executed, banks, x, w, choice, how_routed["one"], how_routed["bias"])
    for _ in range(2):
        # The second launch counts on where the first has left off.
        ours = sparse.multiply(executed, banks, x, w, choice, **how_routed)
    routed = router.route(executed, x, w, choice, **how_routed)
    residual = routed.total if around else None
    alone = mixture.multiply(executed, banks, routed.normed, routed.chosen, routed.weights, residual)
    assert error(ours, exact(alone)) < 3e-3


def test_more_rows_than_one_launch_takes_and_settings(executed: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = packed((4, 128, 128), "nvfp4", 4, 16).operand
    banks, w, choice = mixture.Banks((bank, bank), bank), rows(4, 128), router.Choice(2, True)
    assert sparse.fits(executed, banks, rows(8, 128), w, choice, None, None)
    assert not sparse.fits(executed, banks, rows(9, 128), w, choice, None, None)
    assert not sparse.fits(executed, banks, rows(1, 128), w, choice, w[:1], None)
    monkeypatch.setenv(gathering.CHAIN, "0")
    assert not sparse.fits(executed, banks, rows(1, 128), w, choice, None, None)

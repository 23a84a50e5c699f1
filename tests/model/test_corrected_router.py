"""The router by sigmoid and correction against a loop over tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.layers.config import Fields
from arriero.model.layers.corrected_router import CorrectedRouter, CorrectedRouterConfig
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

FIELDS: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def made(changes: dict[str, Any]) -> tuple[CorrectedRouterConfig, np.ndarray, np.ndarray, CorrectedRouter]:
    rng = np.random.default_rng(5)
    weight, correction = rng.normal(size=(12, 16)).astype(np.float32), rng.normal(size=12).astype(np.float32)
    config = CorrectedRouterConfig.read(Fields({**FIELDS, **changes}))
    tensors: dict[str, Any] = {"gate.weight": mx.array(weight), "gate.e_score_correction_bias": mx.array(correction)}
    return (
        config,
        weight,
        correction,
        CorrectedRouter.load(MemoryCheckpoint({}, tensors).typed(), "gate", config, hidden=16),
    )


def by_hand(
    x: np.ndarray, config: CorrectedRouterConfig, weight: np.ndarray, correction: np.ndarray
) -> dict[int, float]:
    """Expert → weight of one token."""
    scores = 1 / (1 + np.exp(-(weight @ x).astype(np.float64)))
    choice = (scores + correction).reshape(config.groups, -1)
    sums = np.sort(choice, axis=1)[:, -2:].sum(axis=1)
    for group in np.argsort(-sums)[config.top_groups :]:
        choice[group] = -np.inf
    chosen = np.argsort(-choice.reshape(-1))[: config.top_k]
    weights = scores[chosen] / scores[chosen].sum() if config.normalise else scores[chosen]
    return dict(zip(chosen.tolist(), (weights * config.scale).tolist(), strict=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_group": None, "topk_group": None}, {"topk_group": 4}, {"norm_topk_prob": False, "topk_group": 1}],
)
def test_choice_and_weights_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    config, weight, correction, router = made(changes)
    x = np.random.default_rng(6).normal(size=(50, 16)).astype(np.float32)
    chosen, weights = router(mx.array(x))
    assert (chosen.dtype, weights.dtype) == (mx.uint32, mx.float32)
    for row, experts, shares in zip(x, chosen.tolist(), weights.tolist(), strict=True):
        assert dict(zip(experts, shares, strict=True)) == pytest.approx(
            by_hand(row, config, weight, correction), rel=1e-5
        )


def test_scores_that_are_all_zero_give_no_weights_instead_of_no_numbers() -> None:
    config, weight, correction, _ = made({"n_group": 1, "topk_group": 1})
    tensors: dict[str, Any] = {
        "g.weight": mx.full(weight.shape, -100.0),
        "g.e_score_correction_bias": mx.array(correction),
    }
    router = CorrectedRouter.load(MemoryCheckpoint({}, tensors).typed(), "g", config, hidden=16)
    assert router(mx.ones((2, 16)))[1].tolist() == [[0.0] * 3] * 2


def test_sixteen_bit_tokens_are_scored_in_float32() -> None:
    _, _, _, router = made({})
    x = mx.random.normal((9, 16), key=mx.random.key(1)).astype(mx.bfloat16)
    narrow, wide = router(x), router(x.astype(mx.float32))
    np.testing.assert_array_equal(np.array(narrow[0]), np.array(wide[0]))
    np.testing.assert_array_equal(np.array(narrow[1]), np.array(wide[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 5}, "`n_group` should be so that 12 experts make groups of at least two"),
        ({"n_group": 12}, "`n_group` should be so that 12 experts make groups of at least two"),
        ({"topk_group": 5}, "`topk_group` should be at most 4"),
        ({"topk_group": 1, "num_experts_per_tok": 4}, "`num_experts_per_tok` should be at most 3 experts"),
        ({"n_routed_experts": None}, "`n_routed_experts` is missing"),
    ],
)
def test_what_contradicts_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CorrectedRouterConfig.read(Fields({**FIELDS, **changes}))


def test_a_correction_of_another_length_is_refused() -> None:
    config, weight, _, _ = made({})
    tensors: dict[str, Any] = {"g.weight": mx.array(weight), "g.e_score_correction_bias": mx.zeros(11)}
    with pytest.raises(CheckpointError, match=r"g\.e_score_correction_bias has shape \[11\]"):
        CorrectedRouter.load(MemoryCheckpoint({}, tensors).typed(), "g", config, hidden=16)

"""Rotary frequencies of every kind, and tables by absolute position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.layers.config import Fields
from arriero.model.layers.rope import BLOCK, Rope, RopeConfig


def read(layer_type: str | None = None, **values: Any) -> RopeConfig:
    return RopeConfig.read(Fields(values), theta=10000.0, context_length=64, layer_type=layer_type)


def plain(head_dim: int, theta: float = 10000.0) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


def test_the_default_kind_has_the_paper_s_frequencies() -> None:
    inverse, magnitude = read().frequencies(16)
    np.testing.assert_allclose(inverse, plain(16), rtol=1e-14)
    assert magnitude == 1.0


def test_both_spellings_of_a_configuration_agree() -> None:
    old = read(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = read(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0})
    np.testing.assert_array_equal(old.frequencies(16)[0], new.frequencies(16)[0])
    np.testing.assert_allclose(new.frequencies(16)[0], plain(16, 500.0) / 4, rtol=1e-14)


def test_a_layer_type_has_parameters_of_its_own() -> None:
    nested = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 9.0}}
    assert read("full_attention", rope_parameters=nested).theta == 7.0
    assert read("sliding_attention", rope_parameters=nested).theta == 9.0


def test_llama3_divides_long_waves_keeps_short_ones_and_blends_between() -> None:
    parameters = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read(rope_scaling={"rope_type": "llama3", "original_max_position_embeddings": 8192, **parameters})
    found, base = config.frequencies(128)[0], plain(128)
    wave = 2 * math.pi / base
    np.testing.assert_allclose(found[wave < 2048], base[wave < 2048])
    np.testing.assert_allclose(found[wave > 8192], base[wave > 8192] / 8)
    between = (wave >= 2048) & (wave <= 8192)
    assert between.any()
    assert (found[between] <= base[between]).all()
    assert (found[between] >= base[between] / 8).all()
    assert (np.diff(found) < 0).all()


def test_a_list_of_factors_divides_each_frequency() -> None:
    factors = [1.0, 2.0, 4.0, 32.0]
    found = read(rope_scaling={"rope_type": "llama3_factors", "factors": factors}).frequencies(8)[0]
    np.testing.assert_allclose(found, plain(8) / factors)
    with pytest.raises(CheckpointError, match="a list of 8 numbers"):
        read(rope_scaling={"rope_type": "llama3_factors", "factors": factors}).frequencies(16)


def yarn(**values: Any) -> tuple[np.ndarray, float]:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **values}
    return read(rope_scaling=scaling).frequencies(64)


def test_yarn_of_factor_one_changes_nothing() -> None:
    inverse, magnitude = yarn(factor=1.0)
    np.testing.assert_allclose(inverse, plain(64))
    assert magnitude == 1.0
    assert yarn(factor=1.0, attention_factor=0.5)[1] == 0.5


def test_yarn_interpolates_slow_turns_and_keeps_fast_ones() -> None:
    inverse, magnitude = yarn(factor=4.0)
    assert magnitude == pytest.approx(1.1386, abs=1e-4)
    np.testing.assert_allclose(inverse[:5], plain(64)[:5])
    np.testing.assert_allclose(inverse[-5:], plain(64)[-5:] / 4)


def test_yarn_takes_its_magnitude_from_the_most_specific_field() -> None:
    assert yarn(factor=4.0, attention_factor=0.7, mscale=2.0, mscale_all_dim=1.0)[1] == 0.7
    assert yarn(factor=4.0, mscale=1.0, mscale_all_dim=1.0)[1] == 1.0
    ratio = (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert yarn(factor=4.0, mscale=2.0, mscale_all_dim=1.0)[1] == pytest.approx(ratio)


def test_partial_rotation_covers_the_first_elements() -> None:
    inverse, _ = read(partial_rotary_factor=0.5).frequencies(16)
    np.testing.assert_allclose(inverse, plain(8))
    assert Rope(read(partial_rotary_factor=0.5), 16).table(np.arange(3)).shape == (3, 4, 2)


def test_proportional_rotation_spreads_over_the_head_and_leaves_the_rest_at_zero() -> None:
    config = read(rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6})
    inverse, _ = config.frequencies(16)
    np.testing.assert_allclose(inverse[:2], plain(16, 1e6)[:2])
    np.testing.assert_array_equal(inverse[2:], 0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "nope"])
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope type '{kind}'.*default, linear"):
        read(rope_scaling={"type": kind, "factor": 2.0})


def test_a_parameter_that_is_not_honoured_is_refused() -> None:
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta"):
        read(rope_parameters={"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1})
    with pytest.raises(CheckpointError, match="mrope_section"):
        read(rope_parameters={"rope_type": "default", "mrope_section": [1, 2, 3]})


@pytest.mark.parametrize(
    "scaling", [{"type": "linear"}, {"type": "linear", "factor": 0}, {"type": "llama3", "factor": 8}]
)
def test_a_missing_or_impossible_parameter_is_named(scaling: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="factor"):
        read(rope_scaling=scaling).frequencies(16)


def test_the_context_grows_by_yarn_only() -> None:
    assert read(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    ).extended_length == (128)
    assert read(rope_scaling={"type": "linear", "factor": 4.0}).extended_length == 0


def test_tables_hold_the_angles_of_absolute_positions_in_any_order() -> None:
    rope = Rope(read(), 16)
    positions = np.array([5, 0, BLOCK - 1, BLOCK, 7 * BLOCK + 3, 5], np.int32)
    angles = positions[:, None].astype(np.float64) * plain(16)
    expected = np.stack([np.cos(angles), np.sin(angles)], -1)
    np.testing.assert_allclose(rope.table(positions), expected, atol=1e-6)
    for i, position in enumerate(positions):
        np.testing.assert_array_equal(rope.table(np.array([position])), rope.table(positions)[i : i + 1])


def test_yarn_s_magnitude_is_in_the_table() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    table = Rope(read(rope_scaling=scaling), 16).table(np.arange(4))
    np.testing.assert_allclose(np.hypot(table[..., 0], table[..., 1]), 0.1 * math.log(4) + 1, rtol=1e-6)


def test_yarn_without_a_ramp_is_a_step() -> None:
    inverse, _ = yarn(factor=4.0, beta_fast=2.0, beta_slow=2.0, truncate=False)
    assert np.isfinite(inverse).all()
    assert set(np.round(inverse / yarn(factor=1.0)[0], 6)) == {0.25, 1.0}

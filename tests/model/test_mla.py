"""Latent attention: the plain form's numbers, one vector a token in the cache, and bits that don't depend on chunks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.contract import Batch, Span
from arriero.model.layers.config import Fields
from arriero.model.layers.mla import HeadLinear, LatentAttention, LatentConfig, yarn_gain
from arriero.model.layers.rope import RopeConfig
from arriero.model.weight import Quantization, Weight
from tests.helpers.latent import SMALL, layer, matrices, plainly
from tests.helpers.memory_checkpoint import dequantize, quantize

pytestmark = pytest.mark.usefixtures("kernels")

WIDE = replace(SMALL, hidden=64, heads=16, query_rank=None, rank=512, nope=128, rotated=64, value=128, scale=192**-0.5)
"""DeepSeek-V2 Lite's heads, over a narrow hidden state."""

TWENTY_HEADS = replace(SMALL, heads=20, nope=24, value=32)
"""More query heads than the CPU kernel shares out by chunks of keys."""


class Row:
    """One row's cache of one layer."""

    def __init__(self, attention: LatentAttention) -> None:
        self.attention = attention
        self.cache = attention.new_cache()

    def __call__(self, x: mx.array) -> np.ndarray:
        """The result of the next tokens x `[T, hidden]`."""
        return rows([self], [x])[0]


def rows(them: list[Row], inputs: list[mx.array]) -> list[np.ndarray]:
    """What rows that share a forward get."""
    spans, start = [], 0
    for row, x in zip(them, inputs, strict=True):
        spans.append(Span(start, len(x), row.cache.offset, [row.cache]))
        start += len(x)
    batch = Batch(mx.zeros(start, mx.int32), spans)
    y = np.array(them[0].attention(mx.concatenate(inputs), batch, 0).astype(mx.float32))
    return np.split(y, np.cumsum([len(x) for x in inputs])[:-1])


def states(count: int, width: int, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32))


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, query_rank=None), TWENTY_HEADS])
def test_it_gives_what_every_heads_own_keys_and_values_give(config: LatentConfig) -> None:
    x = states(70, config.hidden)
    found = Row(layer(config))(x)
    np.testing.assert_allclose(found, plainly(config, matrices(config), np.array(x, np.float64)), atol=2e-5)


@pytest.mark.parametrize(("config", "count"), [(SMALL, 600), (TWENTY_HEADS, 530), (WIDE, 140)])
def test_chunks_and_single_steps_give_the_bits_of_the_whole(config: LatentConfig, count: int) -> None:
    attention, x = layer(config), states(count, config.hidden)
    expected = Row(attention)(x)
    for sizes in ([1] * 7 + [250, 1, 1, 41], [128] * 5, [257, 3, 300]):
        row, found = Row(attention), []
        for size in sizes:
            start = row.cache.offset
            if start < count:
                found.append(row(x[start : start + size]))
        end = row.cache.offset
        np.testing.assert_array_equal(np.concatenate(found), expected[:end])


def test_rows_that_share_a_forward_keep_their_bits() -> None:
    attention = layer(TWENTY_HEADS)
    inputs = [states(count, 40, seed) for seed, count in enumerate((1, 300, 17, 1, 64))]
    together = [Row(attention) for _ in inputs]
    first = rows(together, inputs)
    second = rows(together, [x[:1] for x in inputs])
    for x, one, two in zip(inputs, first, second, strict=True):
        alone = Row(attention)
        np.testing.assert_array_equal(one, alone(x))
        np.testing.assert_array_equal(two, alone(x[:1]))


def test_a_rewind_to_every_offset_leaves_no_trace() -> None:
    attention, x = layer(SMALL), states(20, 40)
    expected = Row(attention)(x)
    for offset in range(20):
        row = Row(attention)
        row(mx.concatenate([x[:offset], states(9, 40, 7)]))
        assert row.cache.rewind(offset)
        np.testing.assert_array_equal(row(x[offset:]), expected[offset:])


def test_a_snapshot_at_every_offset_continues_with_the_same_bits() -> None:
    attention, x = layer(SMALL), states(280, 40)
    expected = Row(attention)(x)
    offsets = [1, 2, 100, 255, 256, 257, 279]
    source = Row(attention)
    source.cache.plan(offsets)
    source(x[:101])
    source(x[101:])
    joined: Any = None
    for offset, snapshot in zip(offsets, source.cache.take(), strict=True):
        assert snapshot is not None
        joined = snapshot if joined is None else source.cache.merge(joined, snapshot)
        row = Row(attention)
        assert row.cache.restore(joined)
        np.testing.assert_array_equal(row(x[offset:]), expected[offset:])


def test_the_cache_holds_one_shared_vector_a_token() -> None:
    row = Row(layer(SMALL, dtype=mx.bfloat16))
    row(states(300, 40).astype(mx.bfloat16))
    assert row.cache.nbytes == 512 * (SMALL.rank + SMALL.rotated) * 2
    assert SMALL.cache_bytes(mx.bfloat16, 4096) == (80, 0)


def split(tensors: dict[str, mx.array | Weight], config: LatentConfig) -> dict[str, mx.array | Weight]:
    """Keys' and values' matrices by head, as MLX's tools store them."""
    both = tensors["a.kv_b_proj.weight"]
    assert isinstance(both, mx.array)
    heads = both.reshape(config.heads, -1, config.rank)
    rest = {name: value for name, value in tensors.items() if "kv_b" not in name}
    return rest | {
        "a.embed_q.weight": mx.contiguous(heads[:, : config.nope].swapaxes(1, 2)),
        "a.unembed_out.weight": mx.contiguous(heads[:, config.nope :]),
    }


def test_matrices_that_a_file_splits_by_head_give_the_same_bits() -> None:
    x = states(11, 40)
    found = Row(layer(SMALL, split(matrices(SMALL), SMALL)))(x)
    np.testing.assert_array_equal(found, Row(layer(SMALL))(x))


EIGHT_BITS = Quantization("affine", 8, 32)
FORMATS = [
    Quantization("affine", 4, 32),
    Quantization("affine", 6, 32),
    Quantization("mxfp8", 8, 32),
    Quantization("nvfp4", 4, 16),
]


@pytest.mark.parametrize("how", FORMATS, ids=lambda how: f"{how.name}-{how.bits}")
@pytest.mark.parametrize("by_head", [False, True])
def test_packed_matrices_give_what_their_numbers_give(how: Quantization, by_head: bool) -> None:
    """Each of a file's matrices may have a format of its own: the others are packed with 8 bits."""
    config = replace(SMALL, hidden=64, query_rank=32, nope=32, value=32)
    tensors = matrices(config)
    if by_head:
        tensors = split(tensors, config)
    packed = {
        name: value if "norm" in name else quantize(value, how if re.search("_b_|embed", name) else EIGHT_BITS)
        for name, value in tensors.items()
    }
    meant: dict[str, Any] = {n: dequantize(v) if isinstance(v, Weight) else v for n, v in packed.items()}
    attention, x = layer(config, packed), states(70, 64)
    assert attention.value_up.weight.quantization == how
    assert attention.key_up.weight.quantization == (how if by_head else None)
    found, expected = Row(attention)(x), Row(layer(config, meant))(x)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    row = Row(attention)
    np.testing.assert_array_equal(np.concatenate([row(x[:1]), row(x[1:66]), row(x[66:])]), found)


def test_a_global_scale_reaches_keys_and_values() -> None:
    config = replace(SMALL, nope=32, value=32)
    tensors = matrices(config)
    weight = quantize(tensors["a.kv_b_proj.weight"], Quantization("nvfp4", 4, 16))
    tensors["a.kv_b_proj.weight"] = replace(weight, global_scale=mx.array(0.25))
    meant = tensors | {"a.kv_b_proj.weight": dequantize(weight) * 0.25}
    x = states(9, 40)
    np.testing.assert_allclose(Row(layer(config, tensors))(x), Row(layer(config, meant))(x), atol=1e-5)


def test_a_head_goes_through_its_own_matrix() -> None:
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, 5, 7)).astype(np.float32), rng.normal(size=(4, 3, 7)).astype(np.float32)
    found = HeadLinear(Weight(mx.array(w)))(mx.array(x))
    np.testing.assert_allclose(np.array(found), np.einsum("hoi,thi->tho", w, x), atol=1e-5)


def test_sixteen_bits_stay_sixteen_bits() -> None:
    attention = layer(SMALL, dtype=mx.bfloat16)
    x = states(40, 40)
    batch = Batch(mx.zeros(40, mx.int32), [Span(0, 40, 0, [attention.new_cache()])])
    y = attention(x.astype(mx.bfloat16), batch, 0)
    assert y.dtype == mx.bfloat16
    exact = Row(layer(SMALL))(x)
    assert np.sqrt(np.mean((np.array(y.astype(mx.float32)) - exact) ** 2)) < 0.02 * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("kv_b_proj", (3 * 28 + 1, 32)),
        ("kv_a_proj_with_mqa", (32, 40)),
        ("q_b_proj", (72, 32)),
        ("o_proj", (40, 40)),
        ("kv_a_layernorm", (40,)),
    ],
)
def test_a_shape_that_contradicts_the_configuration_is_named(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=rf"a\.{name}\.weight has shape"):
        layer(SMALL, matrices(SMALL) | {f"a.{name}.weight": mx.zeros(shape)})


def test_half_of_the_split_matrices_is_not_enough() -> None:
    tensors = split(matrices(SMALL), SMALL)
    del tensors["a.unembed_out.weight"]
    with pytest.raises(CheckpointError, match=r"a\.unembed_out\.weight is missing"):
        layer(SMALL, tensors)
    tensors = split(matrices(SMALL), SMALL) | {"a.embed_q.weight": mx.zeros((3, 16, 32))}
    with pytest.raises(CheckpointError, match=r"a\.embed_q\.weight has shape \[3, 16, 32\]"):
        layer(SMALL, tensors)


FIELDS = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def test_queries_without_a_rank_have_no_latent() -> None:
    for missing in ({}, {"q_lora_rank": None}):
        config = LatentConfig.read(Fields(FIELDS | missing), RopeConfig(1e4), hidden=40, heads=3)
        assert config.query_rank is None
        assert config.scale == 24**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, r"`num_key_value_heads` should be num_attention_heads \(3\)"),
        ({"kv_lora_rank": None}, "`kv_lora_rank` is missing"),
        ({"v_head_dim": 0}, "`v_head_dim` should be a whole number of at least 1"),
        ({"attention_bias": "yes"}, "`attention_bias` should be true or false"),
    ],
)
def test_fields_that_are_missing_or_contradict_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LatentConfig.read(Fields(FIELDS | changes), RopeConfig(1e4), hidden=40, heads=3)


def test_a_part_of_the_rotated_width_cannot_rotate() -> None:
    with pytest.raises(CheckpointError, match="`partial_rotary_factor` should be 1"):
        LatentConfig.read(Fields(FIELDS), RopeConfig(1e4, partial=0.5), hidden=40, heads=3)


@pytest.mark.parametrize(
    ("parameters", "gain"),
    [
        ({"factor": 40.0, "mscale_all_dim": 1.0}, 1 + 0.1 * np.log(40)),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, 1 + 0.0707 * np.log(40)),
        ({"factor": 40.0, "mscale": 1.0}, 1.0),
        ({"factor": 40.0, "mscale_all_dim": 0}, 1.0),
        ({"factor": 1.0, "mscale_all_dim": 1.0}, 1.0),
        # Without a factor it is the ratio of both lengths.
        ({"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}, 1 + 0.1 * np.log(40)),
    ],
)
def test_yarn_raises_scores_by_the_square_of_its_gain(parameters: dict[str, Any], gain: float) -> None:
    rope = RopeConfig(1e4, "yarn", 1.0, parameters, context_length=163840)
    assert yarn_gain(rope) == pytest.approx(gain)
    scale = LatentConfig.read(Fields(FIELDS), rope, hidden=40, heads=3).scale
    assert scale == pytest.approx(24**-0.5 * gain**2)

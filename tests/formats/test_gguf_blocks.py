"""Block decoders against the gguf package, and repacking against MLX."""

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.formats import gguf_blocks, gguf_repack
from arriero.formats.gguf_types import BY_NAME
from tests.helpers.gguf_files import SCALE_OFFSETS, decoded, random_blocks

OWN = sorted(gguf_blocks.AFFINE_TYPES | {"MXFP4", "NVFP4"})
EXACT = [name for name, layout in gguf_repack.LAYOUTS.items() if layout.exact]
SIXTEENS = {"Q2_K": 6, "Q3_K": 6, "Q6_K": 8}


def extreme_blocks(kind: str) -> np.ndarray:
    """Random bytes whose scales are any finite numbers: subnormal, tiny, huge, of either sign."""
    raw = random_blocks(kind, 16, 2048, seed=1)
    block = BY_NAME[kind]
    blocks = raw.reshape(16, -1, block.nbytes)
    rng = np.random.default_rng(2)
    for offset in SCALE_OFFSETS.get(kind, []):
        halves = rng.integers(0, 1 << 16, blocks.shape[:2], dtype=np.uint16)
        halves[halves & 0x7C00 == 0x7C00] ^= 0x4000
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    if kind.startswith("MXFP4"):
        blocks[..., 0] = np.resize(np.arange(255), blocks.shape[:2])
    if kind == "NVFP4":
        blocks[..., :4] = np.resize(np.arange(0x7F), (*blocks.shape[:2], 4))
    return raw


def by_mlx(packed: gguf_repack.Packed) -> np.ndarray:
    kind = {"group_size": packed.layout.group_size, "bits": packed.layout.bits, "mode": packed.layout.mode}
    if packed.biases is None:
        values = mx.dequantize(mx.array(packed.data), mx.array(packed.scales), dtype=mx.float32, **kind)
    else:
        scales, biases = (mx.array(part.astype(np.float32)) for part in (packed.scales, packed.biases))
        values = mx.dequantize(mx.array(packed.data), scales, biases, **kind)
    return np.array(values)


@pytest.mark.parametrize("kind", OWN)
def test_a_block_decodes_as_the_gguf_package_decodes_it(kind):
    raw = extreme_blocks(kind)
    np.testing.assert_array_equal(gguf_blocks.decode(BY_NAME[kind], raw), decoded((kind, raw)))


def test_mxfp4_of_pairs_is_mxfp4_with_its_codes_in_another_order():
    halves = extreme_blocks("MXFP4").reshape(16, -1, 17)
    codes = np.concatenate([halves[..., 1:] & 15, halves[..., 1:] >> 4], axis=-1)
    pairs = np.concatenate([halves[..., :1], codes[..., 0::2] | codes[..., 1::2] << 4], axis=-1)
    found = gguf_blocks.decode(BY_NAME["MXFP4_PAIRS"], pairs.reshape(16, -1))
    np.testing.assert_array_equal(found, gguf_blocks.decode(BY_NAME["MXFP4"], halves.reshape(16, -1)))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(
    "blocks", [lambda kind: random_blocks(kind, 16, 2048), extreme_blocks], ids=["usual", "extreme"]
)
def test_an_exact_layout_gives_every_value_bit_for_bit(kind, blocks):
    raw = blocks(kind)
    packed = gguf_repack.repack(BY_NAME[kind], raw)
    np.testing.assert_array_equal(by_mlx(packed), gguf_blocks.decode(BY_NAME[kind], raw))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_half_precision_scales_stay_so_while_the_bias_fits(kind):
    assert gguf_repack.repack(BY_NAME[kind], random_blocks(kind, 4, 256)).scales.dtype == np.float16


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL"])
def test_a_bias_beyond_half_precision_takes_float32_for_the_tensor(kind):
    raw = random_blocks(kind, 4, 256)
    raw[1, :2] = np.array([60000], "<f2").view(np.uint8)
    packed = gguf_repack.repack(BY_NAME[kind], raw)
    assert packed.scales.dtype == packed.biases.dtype == np.float32
    np.testing.assert_array_equal(by_mlx(packed), gguf_blocks.decode(BY_NAME[kind], raw))


@pytest.mark.parametrize("kind", ["Q3_K", "Q6_K"])
def test_of_two_groups_of_16_the_coarser_is_exact_and_the_finer_within_half_a_step(kind):
    block = BY_NAME[kind]
    raw = random_blocks(kind, 32, 2048, seed=3)
    found = gguf_blocks.groups(block, raw)
    values, back = found.values(), by_mlx(gguf_repack.repack(block, raw))
    error = np.abs(back - values).reshape(32, -1, 2, 16).max(axis=-1)
    scales = found.scales.reshape(32, -1, 2)
    coarse = np.abs(scales).max(axis=-1, keepdims=True)
    step = coarse / {"Q6_K": 4, "Q3_K": 8}[kind]
    rounding = np.abs(values).max() * 2e-7
    same_sign = (scales[..., :1] < 0) == (scales[..., 1:] < 0)
    assert (error <= np.where(same_sign, step / 2, step) + rounding).all()
    alone = np.abs(scales[..., :1]) != np.abs(scales[..., 1:])
    is_coarse = (np.abs(scales) == coarse) & alone
    assert error[is_coarse].max() <= rounding
    assert is_coarse.any()


@pytest.mark.parametrize("kind", ["Q3_K", "Q6_K"])
def test_the_middle_code_stands_for_zero_in_every_shared_group(kind):
    packed = gguf_repack.repack(BY_NAME[kind], random_blocks(kind, 8, 2048, seed=5))
    assert (packed.scales < 0).any()
    np.testing.assert_array_equal(packed.biases, -(2.0 ** (packed.layout.bits - 1)) * packed.scales)


def test_two_groups_of_2_bits_are_within_half_a_step_of_their_common_range():
    raw = random_blocks("Q2_K", 32, 2048, seed=4)
    values, back = gguf_blocks.decode(BY_NAME["Q2_K"], raw), by_mlx(gguf_repack.repack(BY_NAME["Q2_K"], raw))
    found = gguf_blocks.groups(BY_NAME["Q2_K"], raw)
    ends = np.stack([found.offsets, found.offsets + 3 * found.scales], axis=-1).reshape(32, -1, 4)
    step = (ends.max(axis=-1) - ends.min(axis=-1)) / 63
    assert (np.abs(back - values).reshape(32, -1, 32).max(axis=-1) <= step * 0.501 + 1e-7).all()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K"])
def test_blocks_of_zero_scale_stay_zero(kind):
    raw = np.zeros((2, BY_NAME[kind].nbytes), np.uint8)
    np.testing.assert_array_equal(by_mlx(gguf_repack.repack(BY_NAME[kind], raw)), np.zeros((2, 256), np.float32))


@pytest.mark.parametrize("kind", ["IQ3_S", "IQ2_XS", "TQ2_0"])
def test_a_codebook_type_is_within_half_of_1_in_255_of_its_range(kind):
    raw = random_blocks(kind, 4, 1024)
    values, back = gguf_blocks.decode(BY_NAME[kind], raw), by_mlx(gguf_repack.repack(BY_NAME[kind], raw))
    groups = values.reshape(4, -1, 32)
    spread = (groups.max(axis=-1) - groups.min(axis=-1)) / 255
    assert (np.abs(back - values).reshape(4, -1, 32).max(axis=-1) <= spread * 0.501 + 1e-7).all()


def test_many_rows_are_repacked_as_one_by_one():
    raw = random_blocks("Q4_K", 600, 2048)
    whole = gguf_repack.repack(BY_NAME["Q4_K"], raw)
    rows = [gguf_repack.repack(BY_NAME["Q4_K"], raw[i : i + 1]) for i in (0, 127, 128, 599)]
    for row, i in zip(rows, (0, 127, 128, 599), strict=True):
        np.testing.assert_array_equal(whole.data[i : i + 1], row.data)
        np.testing.assert_array_equal(whole.scales[i : i + 1], row.scales)
        np.testing.assert_array_equal(whole.biases[i : i + 1], row.biases)


@pytest.mark.parametrize("kind", sorted(SCALE_OFFSETS))
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_scale_that_is_no_finite_number_is_refused(kind, bad):
    raw = random_blocks(kind, 2, 256)
    offset = SCALE_OFFSETS[kind][0]
    raw[1, offset : offset + 2] = np.array([bad], "<f2").view(np.uint8)
    with pytest.raises(CheckpointError, match="not a finite number"):
        gguf_repack.repack(BY_NAME[kind], raw)


@pytest.mark.parametrize(("kind", "nan"), [("MXFP4", 255), ("MXFP4_PAIRS", 255), ("NVFP4", 0x7F)])
def test_a_float_scale_that_is_no_number_is_refused(kind, nan):
    raw = random_blocks(kind, 2, 64)
    raw[0, 0] = nan
    with pytest.raises(CheckpointError, match="not a number"):
        gguf_repack.repack(BY_NAME[kind], raw)


def test_types_that_carry_no_weights_are_not_repackable():
    assert not gguf_repack.repackable(BY_NAME["Q8_K"])
    assert not gguf_repack.repackable(BY_NAME["F16"])

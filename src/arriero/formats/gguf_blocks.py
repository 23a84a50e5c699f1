"""What GGUF's block types mean: blocks → codes, and the scale and offset of each group.

The types decoded here are `value = scale · code + offset` with a small unsigned code; the product is exact in float32,
so a value is rounded once. Codebook types, whose tables are large, are decoded by the `gguf` package. Layouts: ggml's
`block_*` structures (the GGUF specification's quantisation types).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.codes import E2M1, E4M3, E8M0
from arriero.formats.gguf_types import BlockType

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
"""The 16 values of the non-linear 4-bit types."""
DOUBLED_E2M1 = (E2M1 * 2).astype(np.int8)
"""E2M1 as small integers; ggml's scales are half of ours for it."""

FLOAT_TYPES = ("MXFP4", "MXFP4_PAIRS", "NVFP4")
"""Types of E2M1 codes under 8-bit float scales."""
PACKAGE_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
"""Types that the `gguf` package decodes."""

_IQ4_CODES = (IQ4_VALUES + 128).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Groups:
    """Decoded blocks: `codes` uint8 `[rows, groups, size]`, `scales` and `offsets` float32 `[rows, groups]`."""

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray

    def values(self) -> np.ndarray:
        """Float32 `[rows, groups · size]`."""
        values = self.codes.astype(np.float32)
        values *= self.scales[..., None]
        values += self.offsets[..., None]
        return values.reshape(len(values), -1)


def decode(block_type: BlockType, raw: np.ndarray) -> np.ndarray:
    """Bytes uint8 `[rows, bytes of a row]` → float32 values `[rows, columns]`.

    Raises CheckpointError for a type without a decoder or a scale that is no finite number.
    """
    if block_type.name in FLOAT_TYPES:
        scale_codes, codes = float_groups(block_type, raw)
        # The tables hold doubled elements, so scales are halved.
        scales = (E4M3 if block_type.name == "NVFP4" else E8M0)[scale_codes] * np.float32(0.5)
        with np.errstate(over="ignore"):  # the largest exponents pass float32's range, as MLX has it
            values: np.ndarray = (DOUBLED_E2M1[codes] * scales[..., None]).reshape(len(raw), -1)
        return values
    if block_type.name in PACKAGE_TYPES:
        return _by_package(block_type, raw)
    return groups(block_type, raw).values()


def groups(block_type: BlockType, raw: np.ndarray) -> Groups:
    """Bytes uint8 `[rows, bytes of a row]` of an affine type → its codes, scales and offsets."""
    if block_type.name not in _DECODERS:
        raise CheckpointError(f"blocks of type {block_type.name} cannot be decoded")
    rows = len(raw)
    blocks = np.ascontiguousarray(raw).reshape(rows, -1, block_type.nbytes)
    with np.errstate(invalid="ignore"):  # infinite scales are refused below
        decoded = _DECODERS[block_type.name](blocks)
    size = decoded.codes.shape[-1]
    found = Groups(
        decoded.codes.reshape(rows, -1, size), decoded.scales.reshape(rows, -1), decoded.offsets.reshape(rows, -1)
    )
    if not (np.isfinite(found.scales).all() and np.isfinite(found.offsets).all()):
        raise CheckpointError(f"a {block_type.name} block has a scale that is not a finite number")
    return found


def _by_package(block_type: BlockType, raw: np.ndarray) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(invalid="ignore"):
        values = np.asarray(dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[block_type.name]), np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"a {block_type.name} block has a scale that is not a finite number")
    return values


def float_groups(block_type: BlockType, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 or NVFP4 bytes → scale codes uint8 `[rows, groups]` and E2M1 codes uint8 `[rows, groups, 32 or 16]`.

    The scale codes are E8M0 (MXFP4) or E4M3 (NVFP4) and mean whole E2M1 values.
    """
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, block_type.nbytes)
    if block_type.name == "MXFP4":
        scales, codes, nan = blocks[..., 0], _nibbles(blocks[..., 1:17]), 255
    elif block_type.name == "MXFP4_PAIRS":
        pairs = np.stack([blocks[..., 1:17] & 0xF, blocks[..., 1:17] >> 4], axis=-1)
        scales, codes, nan = blocks[..., 0], pairs.reshape(*blocks.shape[:-1], 32), 255
    else:
        # Scales are unsigned: the sign bit means nothing.
        scales, nan = blocks[..., :4] & 0x7F, 0x7F
        codes = _nibbles(blocks[..., 4:36].reshape(*blocks.shape[:-1], 4, 8))
    if (scales == nan).any():
        raise CheckpointError(f"a {block_type.name} block has a scale that is not a number")
    return scales.reshape(len(raw), -1), codes.reshape(len(raw), -1, codes.shape[-1])


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    halves: np.ndarray = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")
    floats: np.ndarray = halves[..., 0].astype(np.float32)
    return floats


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """Low nibbles are the first half of the values, high nibbles the second."""
    return np.concatenate([qs & 0xF, qs >> 4], axis=-1)


def _q4_0(b: np.ndarray) -> Groups:
    d = _f16(b, 0)
    return Groups(_nibbles(b[..., 2:18]), d, d * -8)


def _q4_1(b: np.ndarray) -> Groups:
    return Groups(_nibbles(b[..., 4:20]), _f16(b, 0), _f16(b, 2))


def _fives(high: np.ndarray, qs: np.ndarray) -> np.ndarray:
    codes: np.ndarray = _nibbles(qs) | np.unpackbits(high, axis=-1, bitorder="little") << 4
    return codes


def _q5_0(b: np.ndarray) -> Groups:
    d = _f16(b, 0)
    return Groups(_fives(b[..., 2:6], b[..., 6:22]), d, d * -16)


def _q5_1(b: np.ndarray) -> Groups:
    return Groups(_fives(b[..., 4:8], b[..., 8:24]), _f16(b, 0), _f16(b, 2))


def _q8_0(b: np.ndarray) -> Groups:
    d = _f16(b, 0)
    return Groups(b[..., 2:34] ^ 0x80, d, d * -128)


def _crumbs(qs: np.ndarray) -> np.ndarray:
    """2-bit codes: in each half of 128, four layers of 32 → `[..., 16, 16]`."""
    halves = qs.reshape(*qs.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves >> shifts & 3).reshape(*qs.shape[:-1], 16, 16)


def _q2_k(b: np.ndarray) -> Groups:
    scales = b[..., :16]
    d, dmin = _f16(b, 80)[..., None], _f16(b, 82)[..., None]
    return Groups(_crumbs(b[..., 16:80]), d * (scales & 0xF), -dmin * (scales >> 4))


def _q3_k(b: np.ndarray) -> Groups:
    low, high = b[..., 96:104], b[..., 104:108]
    fours = np.concatenate([low & 0xF, low >> 4], axis=-1)
    twos = (high[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(fours.shape)
    scales = _f16(b, 108)[..., None] * ((fours | twos << 4).astype(np.int8) - 32)
    mask = b[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _crumbs(b[..., 32:96]) | mask.reshape(*b.shape[:-1], 16, 16) << 2
    return Groups(codes, scales, scales * -4)


def _k4_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of 8 groups from `d`, `dmin` and 12 bytes of 6-bit numbers."""
    low, middle, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = np.concatenate([low & 63, high & 0xF | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _f16(b, 0)[..., None] * scales, -_f16(b, 2)[..., None] * minima


def _k_nibbles(qs: np.ndarray) -> np.ndarray:
    """4 runs of 32 bytes, each two groups: low nibbles, then high → `[..., 8, 32]`."""
    runs = qs.reshape(*qs.shape[:-1], 4, 1, 32)
    return (runs >> np.array([0, 4], np.uint8)[:, None] & 0xF).reshape(*qs.shape[:-1], 8, 32)


def _q4_k(b: np.ndarray) -> Groups:
    return Groups(_k_nibbles(b[..., 16:144]), *_k4_scales(b))


def _q5_k(b: np.ndarray) -> Groups:
    fifth = b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Groups(_k_nibbles(b[..., 48:176]) | fifth << 4, *_k4_scales(b))


def _q6_k(b: np.ndarray) -> Groups:
    low = b[..., :128].reshape(*b.shape[:-1], 2, 1, 64)
    fours = (low >> np.array([0, 4], np.uint8)[:, None] & 0xF).reshape(*b.shape[:-1], 2, 4, 32)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    twos = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = _f16(b, 208)[..., None] * b[..., 192:208].view(np.int8)
    return Groups((fours | twos << 4).reshape(*b.shape[:-1], 16, 16), scales, scales * -32)


def _iq4_nl(b: np.ndarray) -> Groups:
    d = _f16(b, 0)
    return Groups(_IQ4_CODES[_nibbles(b[..., 2:18])], d, d * -128)


def _iq4_xs(b: np.ndarray) -> Groups:
    high = np.ascontiguousarray(b[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (b[..., 4:8, None] >> np.array([0, 4], np.uint8) & 0xF).reshape(*b.shape[:-1], 8)
    scales = _f16(b, 0)[..., None] * ((low | high << 4).astype(np.int8) - 32)
    codes = _IQ4_CODES[_nibbles(b[..., 8:136].reshape(*b.shape[:-1], 8, 16))]
    return Groups(codes, scales, scales * -128)


_DECODERS: dict[str, Callable[[np.ndarray], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}

AFFINE_TYPES = frozenset(_DECODERS)
"""Types that `groups` takes apart."""

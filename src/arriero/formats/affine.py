"""MLX's affine layout: unsigned codes of 2, 3, 4, 5, 6 or 8 bits with a scale and a bias per group.

The codes of a row are one little-endian bit stream, exposed as uint32 words; a value is `code · scale + bias`.
"""

from __future__ import annotations

import numpy as np

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 `[..., n]` below `2**bits` → uint32 words `[..., n · bits / 32]`; `n` a multiple of 32."""
    n = codes.shape[-1]
    if bits not in BITS or n % 32:
        raise ValueError(f"cannot pack rows of {n} codes at {bits} bits")
    stream: np.ndarray = np.ascontiguousarray(codes, dtype=np.uint8)
    if bits == 4:
        pairs = stream.view("<u2")
        stream = (pairs | pairs >> 4).astype(np.uint8)
    elif bits == 2:
        fours = stream.view("<u4")
        stream = (fours | fours >> 6 | fours >> 12 | fours >> 18).astype(np.uint8)
    elif bits != 8:
        stream = _pack_eights(stream, bits)
    words: np.ndarray = stream.view("<u4")
    return words


def _pack_eights(codes: np.ndarray, bits: int) -> np.ndarray:
    """Eight codes become `bits` bytes."""
    eights = codes.view("<u8")
    word = eights & 0xFF
    for i in range(1, 8):
        word |= (eights >> np.uint64(8 * i) & np.uint64(0xFF)) << np.uint64(bits * i)
    stream = np.ascontiguousarray(word[..., None].view(np.uint8)[..., :bits])
    return stream.reshape(*codes.shape[:-1], -1)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Words uint32 `[..., m]` → codes uint8 `[..., m · 32 / bits]`."""
    *lead, m = packed.shape
    if bits not in BITS or m * 32 % bits:
        raise ValueError(f"cannot unpack rows of {m} words at {bits} bits")
    stream = np.ascontiguousarray(packed).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return stream
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return (stream[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(*lead, -1)
    eights = np.zeros((*lead, m * 4 // bits, 8), np.uint8)
    eights[..., :bits] = stream.reshape(*lead, m * 4 // bits, bits)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    codes = eights.view("<u8") >> shifts & np.uint64((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*lead, m * 32 // bits)


def dequantize(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, group_size: int, bits: int) -> np.ndarray:
    """Float32 values `[..., n]` of packed words, scales and biases `[..., n / group_size]`."""
    codes = unpack(packed, bits)
    groups = codes.reshape(*codes.shape[:-1], -1, group_size).astype(np.float32)
    values = groups * scales.astype(np.float32)[..., None] + biases.astype(np.float32)[..., None]
    return values.reshape(codes.shape)


def quantize(values: np.ndarray, group_size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 `[..., n]`, scales and biases float32 `[..., n / group_size]`; each group spans its own range.

    Any value is off by at most half a scale: `(max - min) / (2**bits - 1) / 2`.
    """
    groups = values.reshape(*values.shape[:-1], -1, group_size).astype(np.float32)
    biases = groups.min(axis=-1)
    top = np.float32((1 << bits) - 1)
    scales = groups.max(axis=-1) / top - biases / top
    safe = np.where(scales > 0, scales, np.float32(1))
    codes = np.rint((groups - biases[..., None]) / safe[..., None]).clip(0, top).astype(np.uint8)
    return codes.reshape(values.shape), scales, biases


def fit(groups: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases float32 `[...]` of groups `[..., group size]`: the end of larger magnitude and zero are exact.

    As MLX chooses them; scales are negative where the largest magnitude is positive.
    """
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    negative = np.abs(low) > np.abs(high)
    edge = np.where(negative, low, high)
    scales = np.maximum((high - low) / np.float32((1 << bits) - 1), np.float32(1e-7))
    scales = np.where(negative, scales, -scales)
    steps = np.rint(edge / scales)
    return np.where(steps == 0, scales, edge / np.where(steps == 0, np.float32(1), steps)), np.where(
        steps == 0, np.float32(0), edge
    )


def encode(groups: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """Nearest codes uint8 `[..., group size]` under scales and biases float32 `[...]` as they will be stored."""
    codes = np.rint((groups - biases[..., None]) / scales[..., None])
    clipped: np.ndarray = np.clip(codes, 0, (1 << bits) - 1, out=codes).astype(np.uint8)
    return clipped

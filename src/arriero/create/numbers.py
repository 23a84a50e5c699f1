"""The float32 numbers of a stored tensor, some rows at a time: whatever it is stored as, never all of it at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats import affine, blockfp8, mxfp, nvfp4
from arriero.formats.codes import E4M3
from arriero.model.companions import Bundle, Part
from arriero.model.quantization import Quantization


class Numbers(Protocol):
    """A tensor `[…, rows, columns]` whose leading axes are read as more rows."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Float32 `[stop - start, columns]`, all finite; raises CheckpointError otherwise."""
        ...


@dataclass(frozen=True)
class PlainNumbers:
    """Float16, bfloat16, float32, or E4M3 codes under one factor (a shard of a table)."""

    name: str
    part: Part
    factor: Part | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.span.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = _rows(self.part)[start:stop]
        if self.part.span.dtype == "F8_E4M3":
            values = E4M3[rows]
            if self.factor is not None:
                values = values * _scalar(self.factor)
        else:
            values = _float32(rows, self.part.span.dtype)
        return finite(values, self.name)


@dataclass(frozen=True)
class Fp8Numbers:
    """E4M3 codes under scales by block of 128 × 128, by row, or one for all."""

    name: str
    codes: Part
    scales: Part

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.span.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = _rows(self.codes)
        values = E4M3[rows[start:stop]]
        scales = self.scales.file.view(self.scales.span.name).astype(np.float32)
        per_matrix = self.shape[-2]
        if scales.size == 1:
            values *= scales.reshape(-1)[0]
        elif scales.shape == (*self.shape[:-1], 1):
            values *= scales.reshape(-1, 1)[start:stop]
        else:
            blocks = scales.reshape(-1, *scales.shape[-2:])
            index = np.arange(start, stop)
            chosen = blocks[index // per_matrix, index % per_matrix // blockfp8.BLOCK]
            values *= chosen.repeat(blockfp8.BLOCK, axis=-1)[:, : values.shape[-1]]
        return finite(values, self.name)


@dataclass(frozen=True)
class PackedNumbers:
    """A tensor in one of MLX's layouts, in any spelling."""

    found: Bundle
    how: Quantization
    factor: Part | None = None
    """Of the table that this is a shard of."""

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.found.scales is not None
        scales = self.found.scales.span.shape
        return (*scales[:-1], scales[-1] * self.how.group_size)

    def read(self, start: int, stop: int) -> np.ndarray:
        found = self.found
        assert found.scales is not None
        words = np.ascontiguousarray(_rows(found.data)[start:stop]).view(np.uint32)
        scales = _rows(found.scales)[start:stop]
        if self.how.mode == "affine":
            assert found.biases is not None
            kind, biases = found.scales.span.dtype, _rows(found.biases)[start:stop]
            values = affine.dequantize(
                words, _float32(scales, kind), _float32(biases, kind), self.how.group_size, self.how.bits
            )
        elif self.how.mode == "nvfp4":
            values = nvfp4.dequantize(words, scales)
            factors = self.multipliers()
            values *= factors[np.arange(start, stop) // (math.prod(self.shape[:-1]) // factors.size), None]
        else:
            values = mxfp.dequantize(words, scales, self.how.bits)
        if self.factor is not None:
            values *= _scalar(self.factor)
        return finite(values, self.name)

    def multipliers(self) -> np.ndarray:
        """Float32 factors of nvfp4, one for all or one for each leading index."""
        part = self.found.global_scale
        if part is None:
            return np.ones(1, np.float32)
        numbers = _float32(part.file.view(part.span.name).reshape(-1), part.span.dtype)
        if self.found.global_kind == "reciprocal":
            if not numbers.all():
                raise CheckpointError(f"tensor {self.name} has a reciprocal global scale of zero; convert it again")
            return np.float32(1) / numbers
        return numbers / np.float32(nvfp4.LARGEST) if self.found.global_kind == "largest" else numbers


def _scalar(part: Part) -> np.float32:
    return np.float32(part.file.view(part.span.name).reshape(-1)[0])


def _rows(part: Part) -> np.ndarray:
    view = part.file.view(part.span.name)
    return view.reshape(-1, view.shape[-1])


def _float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """The same numbers; bfloat16 by its bits, which lets other threads run meanwhile."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def finite(values: np.ndarray, name: str) -> np.ndarray:
    """The values; CheckpointError when one of them is no finite number."""
    if not np.isfinite(values).all():
        raise CheckpointError(f"tensor {name} holds numbers that are not finite, which no quantisation can keep")
    return values

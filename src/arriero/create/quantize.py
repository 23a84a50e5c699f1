"""Numbers into packed layouts, or into plain types, a block of rows at a time on some threads.

Runs in the server's process, in NumPy, which lets the server's own thread run. What is in memory is a few blocks of
rows and the scales of one tensor, whatever its size: codes are written as they are computed.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from arriero.create.made import Piece, Sink, Told
from arriero.create.numbers import Numbers
from arriero.create.precisions import PACKED
from arriero.errors import CheckpointError
from arriero.formats import affine, mxfp, nvfp4

BLOCK = 1 << 17
"""Numbers of a block: its scratch stays in a core's cache."""
THREADS = min(8, os.cpu_count() or 1)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Block:
    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray | None
    missed: float
    """Squares of what rounding lost, summed; and of the numbers."""
    size: float


@dataclass(frozen=True)
class Quantized:
    """A tensor that is packed: `X`, `X.scale`, for affine `X.bias`, for nvfp4 `X.global_scale`."""

    numbers: Numbers
    kind: str
    scales: str
    """Type of affine scales: F16, BF16 or F32."""
    source_bytes: int
    search: bool = True
    lossless: bool = False

    @property
    def pieces(self) -> dict[str, Piece]:
        """The packed words and their companions."""
        how, name = PACKED[self.kind], self.numbers.name
        *lead, columns = self.numbers.shape
        groups = (*lead, columns // how.group_size)
        packed = how.mode != "affine"
        found = {
            name: Piece("U32", (*lead, columns * how.bits // 32)),
            f"{name}.scale": Piece("U8" if packed else self.scales, groups),
        }
        if not packed:
            found[f"{name}.bias"] = Piece(self.scales, groups)
        if how.mode == "nvfp4":
            # One number for each expert; what is no stack of experts has one.
            found[f"{name}.global_scale"] = Piece("F32", tuple(lead[:-1]))
        return found

    def write(self, sink: Sink, told: Told) -> float:
        """See `Made.write`."""
        multipliers = self._multipliers() if self.kind == "nvfp4" else None
        rows, columns = self.numbers.shape[-2:]
        per_number = self.source_bytes / max(1, math.prod(self.numbers.shape))

        def code(start: int, stop: int) -> _Block:
            multiplier = 1.0 if multipliers is None else float(multipliers[start // rows])
            return self._code(self.numbers.read(start, stop), multiplier)

        scales: list[np.ndarray] = []
        biases: list[np.ndarray] = []
        missed = size = 0.0
        for block in _in_order(self.numbers.shape, code):
            sink(block.codes.data.cast("B"))
            scales.append(block.scales)
            if block.biases is not None:
                biases.append(block.biases)
            missed, size = missed + block.missed, size + block.size
            told(round(len(block.codes) * columns * per_number))
        for kept in (scales, biases):
            for array in kept:
                sink(_bytes(array, self.scales).data)
        if multipliers is not None:
            sink(multipliers.tobytes())
        return math.sqrt(missed / size) if size else 0.0

    def _multipliers(self) -> np.ndarray:
        """Of each matrix, by its largest magnitude: a first pass over the numbers."""
        shape = self.numbers.shape
        largest = np.zeros(math.prod(shape[:-2]), np.float32)

        def measure(start: int, stop: int) -> tuple[int, float]:
            return start // shape[-2], float(np.abs(self.numbers.read(start, stop)).max())

        for matrix, value in _in_order(shape, measure):
            largest[matrix] = max(largest[matrix], value)
        return np.array([nvfp4.multiplier_for(float(value)) for value in largest], np.float32)

    def _code(self, values: np.ndarray, multiplier: float) -> _Block:
        how = PACKED[self.kind]
        biases = None
        if how.mode == "affine":
            groups = values.reshape(len(values), -1, how.group_size)
            scales, biases = (_rounded(part, self.scales) for part in affine.fit(groups, how.bits))
            codes = affine.encode(groups, scales, biases, how.bits).reshape(values.shape)
            packed = affine.pack(codes, how.bits)
            got = affine.dequantize(packed, scales, biases, how.group_size, how.bits)
        elif how.mode == "nvfp4":
            codes, scales = nvfp4.quantize(values, multiplier, search=self.search)
            packed = affine.pack(codes, 4)
            got = nvfp4.dequantize(packed, scales, multiplier)
        else:
            codes, scales = mxfp.quantize(values, how.bits, search=self.search)
            packed = affine.pack(codes, how.bits)
            got = mxfp.dequantize(packed, scales, how.bits)
        got -= values
        return _Block(packed, scales, biases, _squares(got), _squares(values))


@dataclass(frozen=True)
class Plain:
    """A tensor as bfloat16 or float16, rounded to nearest, ties to even, or as float32."""

    numbers: Numbers
    dtype: str
    """Safetensors' name."""
    source_bytes: int
    lossless: bool = False

    @property
    def pieces(self) -> dict[str, Piece]:
        """The one tensor."""
        return {self.numbers.name: Piece(self.dtype, self.numbers.shape)}

    def write(self, sink: Sink, told: Told) -> float:
        """See `Made.write`; raises CheckpointError for a number beyond the type's largest."""
        dtype = self.dtype
        per_number = self.source_bytes / max(1, math.prod(self.numbers.shape))

        def cast(start: int, stop: int) -> tuple[np.ndarray, int, float, float]:
            values = self.numbers.read(start, stop)
            limit = {"F16": 65504.0, "BF16": 3.3895e38}.get(dtype, math.inf)
            if float(np.abs(values).max(initial=0)) > limit:
                raise CheckpointError(f"tensor {self.numbers.name} holds numbers beyond {limit:.6g}; ask for bf16")
            got = _rounded(values, dtype)
            return _bytes(got, dtype), values.size, _squares(got - values), _squares(values)

        missed = size = 0.0
        for data, count, lost, whole in _in_order(self.numbers.shape, cast):
            sink(data.data.cast("B"))
            missed, size = missed + lost, size + whole
            told(round(count * per_number))
        return math.sqrt(missed / size) if size else 0.0


def _in_order(shape: tuple[int, ...], work: Callable[[int, int], T]) -> Iterator[T]:
    """Results of blocks of rows in their order; no block has rows of two matrices, and few are ahead of the taker."""
    rows, columns = shape[-2:]
    step = max(1, BLOCK // max(1, columns))
    spans = (
        (at + start, at + min(start + step, rows))
        for at in range(0, math.prod(shape[:-1]), rows)
        for start in range(0, rows, step)
    )
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for start, stop in spans:
                waiting.append(pool.submit(work, start, stop))
                if len(waiting) > 2 * THREADS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _squares(values: np.ndarray) -> float:
    flat = values.reshape(-1)
    with np.errstate(over="ignore"):
        total = float(np.dot(flat, flat))
    if math.isinf(total):  # numbers beyond 1e19, whose squares float32 does not hold
        wide = flat.astype(np.float64)
        total = float(np.dot(wide, wide))
    return total


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 numbers rounded to a 16-bit type, still float32."""
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def _bytes(values: np.ndarray, dtype: str) -> np.ndarray:
    """What is stored of codes, or of numbers that the type holds exactly; uint8."""
    if values.dtype == np.uint8:
        stored = values
    elif dtype == "F16":
        stored = values.astype(np.float16)
    elif dtype == "BF16":
        stored = (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        stored = values.astype(np.float32)
    return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)

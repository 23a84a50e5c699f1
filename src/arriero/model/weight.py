"""A weight matrix as a checkpoint holds it: dense, or packed with its scales.

Shape words: `[out, in]`, or `[experts, out, in]` for a stack. Groups run along the input axis, so rows can be sliced,
permuted and concatenated without touching a code. That ends when a product first asks for the matrix: on the CPU it is
then repacked for the kernels, and the arrays of the checkpoint are let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels import device
from arriero.kernels.packed import Packed, pack
from arriero.model.quantization import Mode, Quantization

__all__ = ["Mode", "Quantization", "Weight", "concatenate_rows", "stack_experts"]


@dataclass(eq=False, repr=False, slots=True)
class Weight:
    """One matrix. Dense when `quantization` is None; otherwise `data` is MLX's packed uint32.

    Once `packed` or `arrays` has repacked it, `data`, `scales` and `biases` are gone: reading them, and with them
    `rows`, raises RuntimeError. Shape, format and size stay.
    """

    data: mx.array
    quantization: Quantization | None = None
    scales: mx.array | None = None
    biases: mx.array | None = None
    """Affine zero points (MLX's `biases`), not a layer's additive bias."""
    global_scale: mx.array | None = None
    """Float32 multiplier of an NVFP4 tensor: scalar, or one per expert."""
    exact: bool = True
    """False: products with many rows may round 16-bit activations to 8 bits where that is faster."""
    _packed: Packed | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, unpacked."""
        if self._packed is not None:
            matrix = (self._packed.rows, self._packed.columns)
            return (self._packed.experts, *matrix) if self._packed.experts else matrix
        shape = tuple(self.data.shape)
        if self.quantization is None:
            return shape
        return (*shape[:-1], shape[-1] * 32 // self.quantization.bits)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._held())

    def arrays(self) -> list[mx.array]:
        """Every array of this weight as products read it: packed where they want that."""
        self.packed()
        return self._held()

    def packed(self) -> Packed | None:
        """The matrix repacked for the kernels, once, whoever asks; None where they read it as it is.

        Computes the arrays that it is made of. Layers ask as soon as they are built, so that a load never holds more
        than one matrix in both layouts.
        """
        how = self.quantization
        if self._packed is not None or how is None:
            return self._packed
        if self.scales is None:
            raise CheckpointError("a packed matrix has no scales")
        if self.global_scale is not None and self.global_scale.size > 1 and self.data.ndim == 2:
            return None  # one number for each row, which the kernels don't take
        self._packed = pack(
            self.data, self.scales, self.biases, group_size=how.group_size, bits=how.bits, mode=how.mode
        )
        if self._packed is not None:
            del self.data, self.scales, self.biases
        return self._packed

    def _held(self) -> list[mx.array]:
        if self._packed is None:
            parts = [self.data, self.scales, self.biases, self.global_scale]
        else:
            parts = [*self._packed.arrays, self.global_scale]
        return [part for part in parts if part is not None]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for what is not there."""
            if name in ("data", "scales", "biases"):
                raise RuntimeError(
                    f"the {name} of this matrix were repacked for the CPU kernels when a product first asked for it; "
                    "take rows, and join matrices, before"
                )
            raise AttributeError(f"a weight has no {name}")

    def astype(self, dtype: mx.Dtype) -> Weight:
        """A dense matrix in another dtype; a packed one stays as it is."""
        if self.quantization is not None or self.data.dtype == dtype:
            return self
        return replace(self, data=self.data.astype(dtype))

    def rows(self, index: slice | mx.array) -> Weight:
        """The same codes for some output rows (a slice or an index array), exact."""
        return replace(
            self,
            data=self.data[..., index, :],
            scales=None if self.scales is None else self.scales[..., index, :],
            biases=None if self.biases is None else self.biases[..., index, :],
        )


def concatenate_rows(weights: Sequence[Weight]) -> Weight | None:
    """Stack along the output axis, exact; None when formats or global scales differ so that it would not be.

    Parts of one matrix or bank, which share its global scale, become one again. On NVIDIA GPUs matrices with global
    scales become one with a number for each row, which the kernels there take.
    """
    first = weights[0]
    if any(w.quantization != first.quantization or w.data.dtype != first.data.dtype for w in weights):
        return None
    scales = [w.global_scale for w in weights if w.global_scale is not None]
    shared = (
        len(scales) == len(weights) > 1
        and all(scale is scales[0] for scale in scales)
        and (first.data.ndim == 3 or scales[0].size == 1)
    )
    by_row = len(scales) == len(weights) and not shared and first.data.ndim == 2 and device.cuda() is not None
    if (scales and not by_row and not shared) or any((w.biases is None) != (first.biases is None) for w in weights):
        return None
    if any(w.scales is not None and first.scales is not None and w.scales.dtype != first.scales.dtype for w in weights):
        return None

    def joined(parts: Sequence[mx.array | None]) -> mx.array | None:
        present = [part for part in parts if part is not None]
        return mx.concatenate(present, axis=-2) if present else None

    data = joined([w.data for w in weights])
    if data is None:
        raise CheckpointError("no weights to concatenate")
    return replace(
        first,
        data=data,
        scales=joined([w.scales for w in weights]),
        biases=joined([w.biases for w in weights]),
        global_scale=mx.concatenate(
            [mx.broadcast_to(scale.reshape(-1), (w.shape[0],)) for scale, w in zip(scales, weights, strict=True)]
        )
        if by_row
        else (scales[0] if shared else None),
    )


def stack_experts(weights: Sequence[Weight]) -> Weight | None:
    """One `[experts, out, in]` bank of single matrices, exact; None when their formats or shapes differ.

    Scalar global scales become one per expert.
    """
    first = weights[0]
    for w in weights:
        same = (
            w.quantization == first.quantization
            and w.data.dtype == first.data.dtype
            and w.data.shape == first.data.shape
            and (w.biases is None) == (first.biases is None)
            and (w.global_scale is None) == (first.global_scale is None)
            and (w.scales is None or first.scales is None or w.scales.dtype == first.scales.dtype)
        )
        if not same:
            return None

    def stacked(parts: Sequence[mx.array | None]) -> mx.array | None:
        present = [part for part in parts if part is not None]
        return mx.stack(present) if present else None

    data = stacked([w.data for w in weights])
    if data is None:
        raise CheckpointError("no experts to stack")
    scale = stacked([None if w.global_scale is None else w.global_scale.reshape(()) for w in weights])
    return replace(
        first,
        data=data,
        scales=stacked([w.scales for w in weights]),
        biases=stacked([w.biases for w in weights]),
        global_scale=scale,
    )

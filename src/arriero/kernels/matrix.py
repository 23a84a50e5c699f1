"""A matrix as products take it: dense or packed, with the bias of its layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.activation import Activation
from arriero.kernels.cuda import dense
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, Operand, fits, multiply, operand
from arriero.kernels.device import CpuKernels
from arriero.kernels.matmul import matmul
from arriero.kernels.metal import product as metal
from arriero.kernels.packed import Packed, pack
from arriero.kernels.quantized_matmul import of_many, packed_matmul, quantized_matmul


@dataclass(frozen=True, eq=False, slots=True)
class Matrix:
    """`[out, in]`: `packed` for the CPU kernels, else in MLX's layout where there are scales, else dense.

    `bias` is `[out]`.
    """

    w: mx.array | None = None
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"
    global_scale: mx.array | None = None
    bias: mx.array | None = None
    exact: bool = True
    """As `quantized_matmul` takes it."""
    packed: Packed | None = None

    @property
    def rows(self) -> int:
        """The size of a product's last axis."""
        return self._dense.shape[0] if self.packed is None else self.packed.rows

    @property
    def dense(self) -> mx.array | None:
        """The numbers of a dense matrix; None for others."""
        return self.w if self.packed is None and self.scales is None else None

    @property
    def plain(self) -> mx.array | None:
        """The numbers of a dense matrix without a bias; None for others."""
        return self.dense if self.bias is None else None

    def __call__(self, x: mx.array) -> mx.array:
        """`x @ Wᵀ (+ bias)` for x `[..., in]`, in x's dtype."""
        if self.packed is not None:
            y = packed_matmul(x, self.packed, global_scale=self.global_scale, exact=self.exact)
        elif self.scales is None:
            y = matmul(x, self._dense)
        else:
            y = quantized_matmul(
                x,
                self._dense,
                self.scales,
                self.biases,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
                global_scale=self.global_scale,
                exact=self.exact,
            )
        return y if self.bias is None else y + self.bias

    def plus(self, x: mx.array, residual: mx.array) -> mx.array:
        """`residual + x @ Wᵀ (+ bias)`: on NVIDIA GPUs one product for many rows of a packed matrix."""
        gpu = device.cuda()
        if gpu is not None and self.scales is not None and x.dtype == residual.dtype == mx.bfloat16:
            operand = self.operand()
            y = None if operand is None else of_many(gpu, x, operand, residual)
            if y is not None:
                return y
        return residual + self(x)

    def handle(self, native: CpuKernels, dtype: mx.Dtype) -> Any:
        """What the extension keeps of it; None where it has no product for this format and activations of `dtype`."""
        if self.bias is not None and self.bias.dtype != dtype:
            return None
        how = {"global_scale": self.global_scale, "bias": self.bias}
        if self.packed is not None:
            return native.matrix(packed=self.packed.native, exact=self.exact, **how)
        if self.scales is None:
            return native.matrix(self._dense, None, None, **how)
        kind: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        packed = pack(self._dense, self.scales, self.biases, **kind)
        if packed is not None:
            return native.matrix(packed=packed.native, exact=self.exact, **how)
        if not native.supports(self.mode, self.bits, self.group_size, dtype):
            return None
        return native.matrix(self._dense, self.scales, self.biases, **kind, **how)

    def operand(self, *, ragged: bool = False) -> Operand | None:
        """As the CUDA kernels take it; None for what they don't. `ragged` as `operand` has it."""
        if self.scales is None:
            return None
        return operand(
            self._dense,
            self.scales,
            self.biases,
            mode=self.mode,
            bits=self.bits,
            group_size=self.group_size,
            global_scale=self.global_scale,
            bias=self.bias,
            ragged=ragged,
        )

    def on_metal(
        self,
        x: mx.array,
        *,
        branch: mx.array | None = None,
        norm: metal.Norm | None = None,
        activation: Activation | None = None,
        residual: mx.array | None = None,
    ) -> metal.Product | None:
        """`norm(x + branch) @ Wᵀ (+ bias) (+ residual)` for rows x `[T, in]` in one launch; None where none does that.

        With an activation the rows are those of gate and of up, and the result is `activation(gate) · up`.
        """
        if self.scales is None or not device.metal() or activation == "gelu":
            return None
        matrix = metal.Operand(
            self._dense,
            self.scales,
            self.biases,
            self.mode,
            self.bits,
            self.group_size,
            self.global_scale,
            self.bias,
        )
        others = [array.dtype for array in (branch, residual) if array is not None]
        if any(dtype != x.dtype for dtype in others) or not metal.fuses(x, matrix, norm=norm, activation=activation):
            return None
        return metal.fused(x, matrix, branch=branch, norm=norm, activation=activation, residual=residual)

    @property
    def _dense(self) -> mx.array:
        """The words or numbers of a matrix that is not packed."""
        if self.w is None:
            raise ValueError("a matrix is made of an array or of a packed matrix, and this one of neither")
        return self.w


def few(gpu: Gpu, x: mx.array, matrix: Matrix, packed: Operand | None, *, norm: Norm | None = None) -> mx.array | None:
    """`norm(x) @ Wᵀ (+ bias)` of few bfloat16 rows in one launch on an NVIDIA GPU; None where no kernel does that.

    `packed` is the matrix's operand.
    """
    if fits(packed, gpu, x.shape[0]):
        return multiply(gpu, x, packed, norm=norm).y
    w = matrix.dense
    if w is None or not dense.fits(gpu, x, w, matrix.bias):
        return None
    return dense.multiply(gpu, x, w, norm=norm, bias=matrix.bias)


def products(x: mx.array, matrices: Sequence[Matrix], sizes: Sequence[int]) -> list[mx.array]:
    """The products with each of `matrices`, one after another, divided anew into parts of `sizes`."""
    return divided([matrix(x) for matrix in matrices], sizes)


def divided(parts: Sequence[mx.array], sizes: Sequence[int]) -> list[mx.array]:
    """Parts one after another along their last axis, divided anew into parts of `sizes`."""
    if [part.shape[-1] for part in parts] == list(sizes):
        return list(parts)
    edges = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(mx.split(parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=-1), edges, axis=-1))

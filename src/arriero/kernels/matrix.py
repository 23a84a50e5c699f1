"""A matrix as products take it: dense or packed, with the bias of its layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from arriero.kernels.device import CpuKernels
from arriero.kernels.matmul import matmul
from arriero.kernels.quantized_matmul import quantized_matmul


@dataclass(frozen=True, eq=False, slots=True)
class Matrix:
    """`[out, in]`, packed in MLX's layout where there are scales; `bias` is `[out]`."""

    w: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group_size: int = 0
    bits: int = 0
    mode: str = "affine"
    global_scale: mx.array | None = None
    bias: mx.array | None = None
    exact: bool = True
    """As `quantized_matmul` takes it."""

    @property
    def rows(self) -> int:
        """The size of a product's last axis."""
        return int(self.w.shape[0])

    def __call__(self, x: mx.array) -> mx.array:
        """`x @ Wᵀ (+ bias)` for x `[..., in]`, in x's dtype."""
        if self.scales is None:
            y = matmul(x, self.w)
        else:
            y = quantized_matmul(
                x,
                self.w,
                self.scales,
                self.biases,
                group_size=self.group_size,
                bits=self.bits,
                mode=self.mode,
                global_scale=self.global_scale,
                exact=self.exact,
            )
        return y if self.bias is None else y + self.bias

    def handle(self, native: CpuKernels, dtype: mx.Dtype) -> Any:
        """What the extension keeps of it; None where it has no product for this format and activations of `dtype`."""
        if self.bias is not None and self.bias.dtype != dtype:
            return None
        if not self.exact and dtype != mx.float32:
            return None
        if self.scales is not None and not native.supports(self.mode, self.bits, self.group_size, dtype):
            return None
        return native.matrix(
            self.w,
            self.scales,
            self.biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            global_scale=self.global_scale,
            bias=self.bias,
        )


def products(x: mx.array, matrices: Sequence[Matrix], sizes: Sequence[int]) -> list[mx.array]:
    """The products with each of `matrices`, one after another, divided anew into parts of `sizes`."""
    parts = [matrix(x) for matrix in matrices]
    if [part.shape[-1] for part in parts] == list(sizes):
        return parts
    edges = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return list(mx.split(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1), edges, axis=-1))

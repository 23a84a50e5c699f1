"""The feed-forward half of a decoder's layer: one operation on the CPU, two on GPUs with our kernels, half a dozen
elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.activation import Activation, gated, gated_rows
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, Operand, fits, multiply
from arriero.kernels.matrix import Matrix
from arriero.kernels.rms_norm import add_rms_norm, rms_norm


@dataclass(eq=False, slots=True)
class GatedPart:
    """`h + after(down(activation(gate) · up))` with `h = x + branch`, gate and up being products of `before(h)`.

    The rows of `gate_up`, one matrix after another, are those of gate and of up. `after` may be missing.
    """

    before: Norm
    gate_up: Sequence[Matrix]
    down: Matrix
    activation: Activation
    after: Norm | None = None
    _handles: dict[mx.Dtype, Any] = field(default_factory=dict)
    _operands: list[Operand | None] | None = None

    def __call__(self, x: mx.array, branch: mx.array) -> mx.array:
        """x and branch `[T, hidden]` of one dtype; the result is of it too."""
        handle = self.handle(x.dtype) if branch.dtype == x.dtype else None
        if handle is not None:
            y: mx.array = handle(x, branch)
            return y
        gpu = device.cuda()
        if gpu is not None and x.dtype == branch.dtype == mx.bfloat16:
            fused = self._cuda(gpu, x, branch)
            if fused is not None:
                return fused
        on_metal = self._metal(x, branch) if device.metal() else None
        return self.graph(x, branch) if on_metal is None else on_metal

    def _cuda(self, gpu: Gpu, x: mx.array, branch: mx.array) -> mx.array | None:
        """The same in two launches for few tokens of a packed network; None for others."""
        *first, down = self._cuda_operands()
        count, joined = x.shape[0], len(first) == 1
        few = [operand for operand in first if fits(operand, gpu, count, gated=joined)]
        if len(few) < len(first) or not fits(down, gpu, count):
            return None
        together = self.activation if joined else None
        made = multiply(gpu, x, few[0], branch=branch, norm=self.before, activation=together)
        if joined:
            inner = made.y
        else:
            inner = gated(self.activation, made.y, multiply(gpu, made.x, few[1], norm=self.before).y)
        if self.after is None:
            return multiply(gpu, inner, down, residual=made.x).y
        return made.x + rms_norm(multiply(gpu, inner, down).y, *self.after)

    def _metal(self, x: mx.array, branch: mx.array) -> mx.array | None:
        """The same in two or three launches for few tokens of a packed network; None for others."""
        joined = len(self.gate_up) == 1 and self.activation != "gelu"
        together = self.activation if joined else None
        made = self.gate_up[0].on_metal(x, branch=branch, norm=self.before, activation=together)
        if made is None:
            return None
        if joined:
            inner = made.y
        elif len(self.gate_up) == 1:
            inner = gated(self.activation, *mx.split(made.y, 2, axis=-1))
        else:
            up = self.gate_up[1].on_metal(made.x, norm=self.before)
            if up is None:
                return None
            inner = gated(self.activation, made.y, up.y)
        last = self.down.on_metal(inner, residual=made.x if self.after is None else None)
        if last is None:
            return None
        return last.y if self.after is None else made.x + rms_norm(last.y, *self.after)

    def few(self) -> tuple[Operand, Operand] | None:
        """The packed matrices of gate and up, and of down; None where gate and up are two, or a norm follows."""
        first, last = self._cuda_operands()[0], self._cuda_operands()[-1]
        if len(self.gate_up) > 1 or self.after is not None or first is None or last is None:
            return None
        return first, last

    def _cuda_operands(self) -> list[Operand | None]:
        if self._operands is None:
            self._operands = [matrix.operand() for matrix in (*self.gate_up, self.down)]
        return self._operands

    def graph(self, x: mx.array, branch: mx.array) -> mx.array:
        """The same, one operation after another."""
        x, normed = add_rms_norm(x, branch, *self.before)
        if len(self.gate_up) == 1:
            inner = gated_rows(self.activation, self.gate_up[0](normed))
        else:
            inner = gated(self.activation, *(matrix(normed) for matrix in self.gate_up))
        if self.after is None:
            return self.down.plus(inner, x)
        return x + rms_norm(self.down(inner), *self.after)

    def handle(self, dtype: mx.Dtype) -> Any:
        """The extension's version, made once; None where there is none for this device or these formats."""
        native = device.native()
        if native is None or self.activation == "gelu":
            return None
        if dtype not in self._handles:
            matrices = [matrix.handle(native, dtype) for matrix in (*self.gate_up, self.down)]
            self._handles[dtype] = None
            if all(matrix is not None for matrix in matrices):
                self._handles[dtype] = native.gated_part(
                    before=self.before,
                    gate_up=matrices[:-1],
                    down=matrices[-1],
                    after=self.after,
                    gelu=self.activation == "gelu_tanh",
                    exact=all(matrix.exact for matrix in (*self.gate_up, self.down)),
                )
        return self._handles[dtype]

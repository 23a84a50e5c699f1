"""A gated delta net of few tokens a row, in three launches on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda.gated_delta import Around, Gates, Heads, Made, Projected, State, step, steps
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, Operand, fits, multiply
from arriero.kernels.matrix import Matrix
from arriero.kernels.rms_norm import rms_norm


@dataclass(eq=False, slots=True)
class DeltaPart:
    """Norm, products, convolution with SiLU, delta rule, gated norm, product; the norm in front may be missing.

    The rows of `inputs`, one matrix after another, are those of q, k, v, z, b and a: in one matrix, or in two, of which
    the second begins with b.
    """

    inputs: Sequence[Matrix]
    out: Matrix
    heads: Heads
    around: Around
    rate: mx.array
    bias: mx.array
    eps: float = 1e-6
    """Added to the squares of a key's and of a query's length."""
    before: Norm | None = None
    _operands: list[Operand | None] = field(default_factory=list)

    def fits(self, dtype: mx.Dtype, lengths: Sequence[int]) -> bool:
        """Whether this is computed here, for activations of `dtype`; else plain operations do it."""
        return (
            device.cuda() is not None
            and len(self.inputs) <= 2
            and dtype == self.around.taps.dtype
            and steps(self.heads, dtype, lengths)
        )

    def __call__(
        self, x: mx.array, *, held: Sequence[State], lengths: Sequence[int], stops: Sequence[Sequence[int]]
    ) -> tuple[mx.array, Made]:
        """x `[T, hidden]` to the result `[T, hidden]` and the new tails and states, for what `fits` has accepted.

        `held[i]` are span i's tail `[1, taps − 1, channels]` and state `[1, heads, width, key_dim]`, which are left as
        they are; `stops` asks for those after so many of its tokens, too.
        """
        gpu = device.cuda()
        if gpu is None:
            raise RuntimeError("a delta net in few launches needs an NVIDIA GPU")
        first, last = self._matrices[0], self._matrices[-1]
        x_rows = self._product(gpu, x, self.inputs[0], first)
        z_at = self.heads.channels
        gates: Gates | Projected = (x_rows, z_at + self.heads.heads * self.heads.width)
        if len(self.inputs) == 2:
            w = self.inputs[1].plain
            if w is not None and w.dtype == mx.bfloat16 and x.shape[1] % 8 == 0:
                gates = Projected(x, w, self.before)
            else:
                gates = (self._product(gpu, x, self.inputs[1], self._matrices[1]), 0)
        made = step(
            self.heads,
            self.around,
            x_rows,
            gates,
            z_at,
            rate=self.rate,
            bias=self.bias,
            held=held,
            lengths=lengths,
            stops=stops,
            eps=self.eps,
        )
        return self._out(gpu, made.y, last), made

    def _product(self, gpu: Gpu, x: mx.array, matrix: Matrix, operand: Operand | None) -> mx.array:
        """With the norm before it."""
        if fits(operand, gpu, x.shape[0]):
            return multiply(gpu, x, operand, norm=self.before).y
        return matrix(x if self.before is None else rms_norm(x, *self.before))

    def _out(self, gpu: Gpu, y: mx.array, operand: Operand | None) -> mx.array:
        return multiply(gpu, y, operand).y if fits(operand, gpu, y.shape[0]) else self.out(y)

    @property
    def _matrices(self) -> list[Operand | None]:
        if not self._operands:
            self._operands = [matrix.operand() for matrix in (*self.inputs, self.out)]
        return self._operands

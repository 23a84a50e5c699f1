"""The experts of a mixture whose choice is made elsewhere: two launches for few tokens on NVIDIA GPUs, few for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.activation import Activation
from arriero.kernels.cuda import grouped, mixture
from arriero.kernels.cuda.product import FEW
from arriero.kernels.matrix import Matrix


@dataclass(eq=False, slots=True)
class ExpertPart:
    """`Σ weight · down(activation(gate(x)) · up(x))` over the experts of each token, biases included.

    Banks hold the matrices of all experts, their biases being `[experts, out]`; gate's rows come before up's in one
    bank, or take turns with them, or each has its own. `clamp` as `mixture.Banks` has it.
    """

    gate_up: Sequence[Matrix]
    down: Matrix
    activation: Activation
    clamp: tuple[float, float] | None = None
    by_turns: bool = False
    _banks: mixture.Banks | None = None
    _asked: bool = False

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array | None:
        """x `[T, hidden]`, experts uint32 `[T, k]` and weights float32 `[T, k]`, to `[T, hidden]`; None where no kernel
        does it.
        """
        gpu = device.cuda()
        banks = None if gpu is None or x.dtype != mx.bfloat16 else self.banks
        if gpu is None or banks is None:
            return None
        if 0 < x.shape[0] <= FEW and chosen.size <= mixture.LINES:
            return mixture.multiply(gpu, banks, x, chosen, weights)
        return grouped.multiply(x, chosen, weights, banks) if grouped.takes(x, banks) else None

    @property
    def banks(self) -> mixture.Banks | None:
        """As the kernels take them, looked for once; None for formats or shapes that they don't."""
        if not self._asked:
            self._asked = True
            found = [matrix.operand(ragged=True) for matrix in self.gate_up]
            gate_up = tuple(operand for operand in found if operand is not None)
            down = self.down.operand(ragged=True)
            if gate_up and down is not None and len(gate_up) == len(found):
                banks = mixture.Banks(
                    gate_up, down, activation=self.activation, clamp=self.clamp, by_turns=self.by_turns
                )
                self._banks = banks if mixture.takes(banks) else None
        return self._banks

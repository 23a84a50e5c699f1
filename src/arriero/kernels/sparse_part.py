"""The feed-forward half of a layer with a mixture of experts, of few tokens: one launch on NVIDIA GPUs, or three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import mixture, router, sparse
from arriero.kernels.cuda.product import FEW, Norm
from arriero.kernels.cuda.router import Choice
from arriero.kernels.expert_part import ExpertPart
from arriero.kernels.matrix import Matrix


@dataclass(eq=False, slots=True)
class SparsePart:
    """`h + Σ weight · expert(n)` with `h = x + branch` and `n = norm(h)`.

    The sum is over the `experts` of a token that `choice` makes of `router`'s logits, and over the network that every
    token takes (`one_gate_up`, `one_down`), if there is one, weighed by the sigmoid of `one_gate`'s product, or as it
    is.
    """

    router: Matrix
    choice: Choice
    experts: ExpertPart | None
    """None: what every token takes has another activation, and no kernel does that."""
    one_gate: Matrix | None = None
    one_gate_up: Sequence[Matrix] = ()
    one_down: Matrix | None = None
    _banks: mixture.Banks | None = None
    _asked: bool = False

    def __call__(self, x: mx.array, branch: mx.array | None = None, norm: Norm | None = None) -> mx.array | None:
        """x and branch `[T, hidden]` to the same; without a branch only what the experts add. None where no kernel
        does it.
        """
        gpu = device.cuda()
        if gpu is None or not 0 < x.shape[0] <= FEW or x.dtype != mx.bfloat16 or len(self.router_and_gate) == 0:
            return None
        banks = self._found()
        scores, *one = self.router_and_gate
        of_one, bias = one[0] if one else None, self.router.bias
        choice = self.choice
        per = choice.top + (of_one is not None or choice.whole)
        if banks is None or x.shape[0] * per > mixture.LINES or not router.fits(gpu, x, scores, choice, of_one, bias):
            return None
        how: dict[str, Any] = {"branch": branch, "norm": norm, "one": of_one, "bias": bias}
        if sparse.fits(gpu, banks, x, scores, choice, of_one, bias):
            return sparse.multiply(gpu, banks, x, scores, choice, **how)
        routed = router.route(gpu, x, scores, choice, **how)
        residual = None if branch is None else routed.total
        return mixture.multiply(gpu, banks, routed.normed, routed.chosen, routed.weights, residual)

    @property
    def router_and_gate(self) -> list[mx.array]:
        """Their numbers; none where one of them is packed, or the gate has a bias."""
        found = [self.router.dense, *([] if self.one_gate is None else [self.one_gate.plain])]
        plain = [array for array in found if array is not None]
        return plain if len(plain) == len(found) else []

    def _found(self) -> mixture.Banks | None:
        """The banks as the kernels take them, looked for once; None for formats or shapes that they don't."""
        if not self._asked:
            self._asked = True
            self._banks = None if self.experts is None else self.experts.banks
            if self._banks is not None and self.one_down is not None:
                found = [matrix.operand(ragged=True) for matrix in self.one_gate_up]
                one = tuple(operand for operand in found if operand is not None)
                # One number stands for the scale of all of its rows.
                scale = self.one_down.global_scale
                whole = len(one) == len(found) and (scale is None or scale.size == 1)
                banks = replace(self._banks, one=one, one_down=self.one_down.operand(ragged=True))
                self._banks = banks if whole and banks.one_down is not None and mixture.takes(banks) else None
        return self._banks

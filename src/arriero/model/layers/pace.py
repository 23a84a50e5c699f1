"""How far the host may be ahead of an NVIDIA GPU within a forward of many tokens.

Products of many rows decode their matrices first, and the host submits a whole forward before the GPU has computed
much of it: all decoded matrices are then in memory together, 13 GB for Qwen3-8B (H200). So layers are submitted in
groups, and the host waits until all but the latest are computed.
"""

from __future__ import annotations

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda.product import FEW
from arriero.model.contract import Batch

TOGETHER = 2
"""Layers of a group: the GPU computes one while the host submits the next."""


class Pace:
    """The groups of one forward."""

    def __init__(self, batch: Batch, layers: int) -> None:
        self._counts = batch.tokens.shape[0] > FEW and cuda.REPLAYED not in batch.memo and device.cuda() is not None
        self._last = layers - 1
        self._before: mx.array | None = None

    def passed(self, index: int, x: mx.array) -> None:
        """Layer `index` gives x."""
        # Of a prompt's last layer only keys and values are wanted, but for its last token's sake.
        if not self._counts or (index + 1) % TOGETHER or index == self._last:
            return
        mx.async_eval(x)  # type: ignore[no-untyped-call]
        if self._before is not None:
            mx.eval(self._before)
        self._before = x

"""Convolutions within a block of a draft, whose kernels depend on the rows."""

from __future__ import annotations

from typing import Self

import mlx.core as mx
import numpy as np

from arriero.kernels import device
from arriero.kernels.cuda import block_conv as cuda
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.drafts.dflash_config import ConvConfig
from arriero.model.layers.linear import Linear, expect_shape


class GroupedDynamicConv:
    """Causal convolution of a part's input and of its output, over the rows of one block.

    With u `[T, hidden]` the normed input, `D = project(u)` `[T, 2, taps, groups]` and s the side (0 input, 1 output):
    `y[t, c] = Σ_j (base[s, j, c] + D[t, s, j, group of c]) · x[t − j, c]`, and x is 0 before the block's first row.
    Source: DFlash 2, the released draft's implementation.
    """

    def __init__(self, config: ConvConfig, base: mx.array, project: Linear) -> None:
        self.config = config
        self.base = base
        self.project = project

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: ConvConfig, hidden: int) -> Self:
        """`base_kernel` `[2, taps, hidden]` and `kernel_projection` under `prefix`."""
        base = checkpoint.tensor(f"{prefix}.base_kernel").astype(dtype)
        expect_shape(f"{prefix}.base_kernel", tuple(base.shape), (2, config.taps, hidden))
        rows = 2 * config.taps * (hidden // config.group)
        project = Linear.load(checkpoint, f"{prefix}.kernel_projection", dtype, bias=False, shape=(rows, hidden))
        return cls(config, base, project)

    def before(self, u: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """The part's input, and what `after` needs for its output."""
        dynamic = self.project(u)
        return self._convolve(0, u, dynamic, batch), dynamic

    def after(self, x: mx.array, y: mx.array, dynamic: mx.array, batch: Batch) -> mx.array:
        """`x` and the part's output y, convolved with the kernels that its input gave."""
        return self._convolve(1, y, dynamic, batch, residual=x)

    def _convolve(
        self, side: int, x: mx.array, dynamic: mx.array, batch: Batch, residual: mx.array | None = None
    ) -> mx.array:
        if len(batch.spans) == 1 and cuda.takes(x, self.base, dynamic, self.config.group) and device.cuda() is not None:
            return cuda.convolve(x, self.base, dynamic, side=side, group=self.config.group, residual=residual)
        taps, group = self.config.taps, self.config.group
        base = self.base.reshape(2, taps, -1, group)[side]
        moving = dynamic.reshape(x.shape[0], 2, taps, -1)[:, side]
        grouped = x.reshape(x.shape[0], -1, group)
        total = mx.zeros_like(grouped)
        for tap in range(taps):
            earlier = grouped if tap == 0 else self._earlier(grouped, tap, batch)
            # The static term and then the dynamic one, each rounded, as the reference sums them.
            total = total + base[tap] * earlier
            total = total + moving[:, tap, :, None] * earlier
        found = total.reshape(x.shape)
        return found if residual is None else residual + found

    def _earlier(self, x: mx.array, tap: int, batch: Batch) -> mx.array:
        """Rows `tap` before each, 0 where that is another block's."""
        shifted = mx.concatenate([mx.zeros_like(x[:tap]), x[:-tap]])[: x.shape[0]] if tap < x.shape[0] else x * 0
        if len(batch.spans) == 1:
            return shifted
        key = ("block starts", tap)
        if key not in batch.memo:
            inside = np.concatenate([np.arange(span.length) >= tap for span in batch.spans])
            batch.memo[key] = mx.array(inside)[:, None, None]
        return mx.where(batch.memo[key], shifted, 0)

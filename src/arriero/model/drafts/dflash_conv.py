"""Convolutions within a block of a draft, whose kernels depend on the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import mlx.core as mx
import numpy as np

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

    def _kernel(self, side: int) -> list[mx.array]:
        """The static term of each tap, `[groups, channels of one]`, of the input (0) or the output (1).

        Divided and not indexed, as everything here: an index is a gather, which GPUs launch each time.
        """
        of_side = mx.split(self.base.reshape(2, self.config.taps, -1, self.config.group), 2)[side]
        return [tap.squeeze((0, 1)) for tap in mx.split(of_side, self.config.taps, axis=1)]

    def before(self, u: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """The part's input, and what `after` needs for its output."""
        before, after = mx.split(self.project(u).reshape(u.shape[0], 2, self.config.taps, -1), 2, axis=1)
        return self._convolve(u, self._kernel(0), before.squeeze(1), batch), after.squeeze(1)

    def after(self, y: mx.array, dynamic: mx.array, batch: Batch) -> mx.array:
        """The part's output, convolved with the kernels that its input gave."""
        return self._convolve(y, self._kernel(1), dynamic, batch)

    def _convolve(self, x: mx.array, base: Sequence[mx.array], dynamic: mx.array, batch: Batch) -> mx.array:
        grouped = x.reshape(x.shape[0], -1, self.config.group)
        total = mx.zeros_like(grouped)
        factors = mx.split(dynamic, self.config.taps, axis=1)
        for tap in range(self.config.taps):
            earlier = grouped if tap == 0 else self._earlier(grouped, tap, batch)
            # The static term and then the dynamic one, each rounded, as the reference sums them.
            total = total + base[tap] * earlier
            total = total + factors[tap].squeeze(1)[..., None] * earlier
        return total.reshape(x.shape)

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

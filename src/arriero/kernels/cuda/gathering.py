"""What launches count in whose blocks wait for one another."""

from __future__ import annotations

import os
from functools import cache

import mlx.core as mx

from arriero.kernels.cuda.source import argument

CHAIN = "ARRIERO_CUDA_CHAIN"
"""The setting: with 0 no blocks wait for one another, and each part is a launch of its own or not divided."""


def wanted() -> bool:
    """Whether blocks may wait: all of a launch must stand on the device at once, which nothing else may keep busy."""
    return os.environ.get(CHAIN) != "0"


@cache
def gathered(blocks: int) -> mx.array:
    """Counts of 64 bits of the blocks that have arrived, for launches of so many that meet up to three times."""
    made = argument(mx.zeros((8,), mx.uint32))
    mx.eval(made)
    return made

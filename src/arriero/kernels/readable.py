"""Tokens for the host to read."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from arriero.kernels import device
from arriero.kernels.cuda.pairs import MOST, pairs


def readable(tokens: mx.array) -> list[mx.array]:
    """Lazy copies of int32 tokens `[n]` that the host reads cheaply; none where it may as well read the tokens."""
    if not 2 < tokens.shape[0] <= MOST or device.cuda() is None:
        return []
    return pairs(tokens.view(mx.uint32))


def read(tokens: mx.array, copies: list[mx.array]) -> list[int]:
    """The tokens on the host, from what `readable` gave; waits for the device."""
    if not copies:
        found: list[int] = np.array(tokens).tolist()
        return found
    return [token for copy in copies for token in np.array(copy).tolist()]

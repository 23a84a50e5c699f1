"""Layers that remember one state instead of every position: the only place where a recurrence looks at the spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from arriero.kernels.depthwise_conv import depthwise_conv
from arriero.kernels.spans import Carried, Stops
from arriero.model.contract import Batch
from arriero.runner.caches.state import RecurrentCache


class Rule(Protocol):
    """A recurrence over packed rows, each span from its own state.

    Takes the convolved rows `[T, channels]`, one state per span, the rows of each span, and after how many of them a
    state is wanted besides the last; `y` of the result is what the layer goes on with, in order.
    """

    def __call__(
        self, x: mx.array, /, *, states: Sequence[mx.array], lengths: Sequence[int], stops: Stops
    ) -> Carried: ...


def recur(
    x: mx.array, batch: Batch, slot: int, *, taps: mx.array, bias: mx.array | None = None, rule: Rule
) -> mx.array:
    """Causal convolution and SiLU, then `rule`, each span from what its `RecurrentCache` of `slot` holds.

    x is `[T, channels]` in the tail's dtype, `taps` `[K, channels]` with the oldest first. The caches advance by their
    spans and get a state at every offset that is planned inside; their tails hold rows of x, before the convolution.
    Returns `rule`'s rows.
    """
    caches: list[RecurrentCache] = batch.caches(slot)
    lengths = [span.length for span in batch.spans]
    stops = [cache.splits(length) for cache, length in zip(caches, lengths, strict=True)]
    held = [cache.get() for cache in caches]
    mixed = depthwise_conv(
        x, taps, bias, tails=[tail.squeeze(0) for tail, _ in held], lengths=lengths, stops=stops, silu=True
    )
    result = rule(mixed.y, states=[state.squeeze(0) for _, state in held], lengths=lengths, stops=stops)
    for i, cache in enumerate(caches):
        tails = [*mixed.interior[i], mixed.ends[i]]
        states = [*result.interior[i], result.ends[i]]
        cache.put([(tail[None], state[None]) for tail, state in zip(tails, states, strict=True)], lengths[i])
    return result.y

"""Log-probabilities of chosen tokens and of the likeliest ones, from raw logits: before penalties and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from arriero.kernels.topk import top_k_values
from arriero.runner.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Lazy log-probabilities of m rows."""

    chosen: mx.array
    """Of the tokens that were drawn, `[m]` float32."""
    top_ids: mx.array | None
    """The likeliest tokens of each row, descending, `[m, k]` int32; None when nobody asked for any."""
    top: mx.array | None
    """Their log-probabilities `[m, k]` float32."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before `to_messages` costs no waiting."""
        return [array for array in (self.chosen, self.top_ids, self.top) if array is not None]


def logprobs(logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
    """For logits `[m, vocab]` and the tokens `[m]` drawn from them; `top` alternatives, cut to the vocabulary."""
    raw = logits.astype(mx.float32)
    total = mx.logsumexp(raw, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(raw, tokens[:, None], axis=-1) - total)[:, 0]
    if top <= 0:
        return Logprobs(chosen, None, None)
    values, ids = top_k_values(raw, min(top, raw.shape[-1]))
    return Logprobs(chosen, ids, values - total)


def to_messages(found: Logprobs, wanted: Sequence[int]) -> list[TokenLogprob]:
    """On the host, one message a row with its `wanted` number of alternatives. Waits for the device.

    A token that the model rules out (−inf) is no alternative and is left out.
    """
    chosen = np.array(found.chosen).tolist()
    if found.top_ids is None or found.top is None:
        return [TokenLogprob(value, []) for value in chosen]
    ids, values = np.array(found.top_ids).tolist(), np.array(found.top).tolist()
    messages = []
    for value, row_ids, row_values, count in zip(chosen, ids, values, wanted, strict=True):
        pairs = zip(row_ids[:count], row_values[:count], strict=True)
        messages.append(TokenLogprob(value, [(token, at) for token, at in pairs if at > -math.inf]))
    return messages

"""Qwen 3.5, 3.6, 3.8 and Qwen3-Next: the inputs of decays keep their precision, a recurrence sums their errors."""

from __future__ import annotations

from arriero.create.policies import default
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import SOURCE

DECAYS = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    return SOURCE if tensor.name.endswith(DECAYS) else default.decide(tensor, asked, model)

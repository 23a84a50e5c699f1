"""gpt-oss: its plain experts are stored with the inputs first, across which no group may run, so they stay plain."""

from __future__ import annotations

from arriero.create.policies import default
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import SOURCE


def decide(tensor: Tensor, asked: str, model: Model) -> str:
    """The tensor's precision."""
    transposed = tensor.routed and not tensor.name.endswith(".weight")
    return SOURCE if transposed else default.decide(tensor, asked, model)

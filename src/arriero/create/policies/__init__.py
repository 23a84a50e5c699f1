"""Which precision each tensor of a model gets when one is asked for: the default, and a file for each that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from arriero.create.policies import cohere2, default, flash_next, gemma4, gpt_oss, laguna, nemotron_h, qwen3_5
from arriero.create.policies.tensor import Model, Tensor
from arriero.create.precisions import DENSE, SOURCE
from arriero.model.architectures import ARCHITECTURES, check_config

__all__ = ["Model", "Policy", "Tensor", "policy_for"]

Policy = Callable[[Tensor, str], str]
"""From a tensor and the precision asked for to the one that it gets, '' for what it has."""

_BY_FILE: dict[str, Callable[[Tensor, str, Model], str]] = {
    "qwen3_5": qwen3_5.decide,
    "qwen4_exp": flash_next.decide,
    "gemma4": gemma4.decide,
    "cohere2": cohere2.decide,
    "laguna": laguna.decide,
    "nemotron_h": nemotron_h.decide,
    "gpt_oss": gpt_oss.decide,
}
"""Policies that are not the default one, by the file of `model/architectures/` that runs the model."""


def policy_for(config: Mapping[str, Any]) -> Policy:
    """The policy of a configuration's architecture; raises UnsupportedArchitecture."""
    file = ARCHITECTURES.get(check_config(config))
    decide = _BY_FILE.get(file or "", default.decide)
    model = Model.read(config)

    def policy(tensor: Tensor, asked: str) -> str:
        if asked in DENSE:
            # Vectors (norms, decays, biases) are no weight of memory, and some must not be rounded.
            return asked if len(tensor.shape) >= 2 else SOURCE
        if file is None and len(tensor.shape) > 2:
            return SOURCE  # which axis is the inputs' is only known of our own architectures
        return decide(tensor, asked, model)

    return policy

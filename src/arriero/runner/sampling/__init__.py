"""From logits to token ids. Refuses to know models and rows."""

from arriero.runner.sampling.distribution import Distribution, stacked
from arriero.runner.sampling.sampler import Sampled, Sampler

__all__ = ["Distribution", "Sampled", "Sampler", "stacked"]

"""A small sampler for tests of the engine: greedy, or drawn with a key of the row's own seed and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from arriero.runner.messages import SamplingOptions, TokenLogprob


@dataclass
class PlainSampled:
    tokens: mx.array

    def arrays(self) -> list[mx.array]:
        return [self.tokens]

    def read_tokens(self) -> list[int]:
        return self.tokens.tolist()

    def read_logprobs(self) -> list[TokenLogprob | None] | None:
        return None


@dataclass
class PlainSampler:
    rows: dict[str, list] = field(default_factory=dict)

    def add(self, row: str, options: SamplingOptions, prompt: Sequence[int]) -> None:
        assert row not in self.rows
        self.rows[row] = [options, 0]

    def remove(self, row: str) -> None:
        del self.rows[row]

    def sample(self, rows: Sequence[str], logits: mx.array) -> PlainSampled:
        if all(self.rows[row][0].temperature <= 0 for row in rows):
            return PlainSampled(mx.argmax(logits, axis=-1).astype(mx.int32))
        chosen = []
        for i, row in enumerate(rows):
            options, step = self.rows[row]
            self.rows[row][1] = step + 1
            if options.temperature <= 0:
                chosen.append(mx.argmax(logits[i]))
            else:
                key = mx.random.key(options.seed * 1_000_003 + step)
                chosen.append(mx.random.categorical(logits[i] / options.temperature, key=key))
        return PlainSampled(mx.stack(chosen).astype(mx.int32))

"""What the engine itself costs: µs of Python for each token, with a model whose forward costs nothing.

    python bench/engine_overhead.py [--tokens 4000]

`loop` is the least that any engine must do a step: one `async_eval`, one `eval`, one read of n tokens. `engine` is a
step of ours with the same arrays, and `ratio` the two divided. `sampler` is a step with our own sampler, greedy on a
vocabulary of two: most of what it adds is MLX's own dispatch of its operations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from arriero.model.contract import Batch, Hidden, ModelFacts, RowCaches
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import SamplingOptions, Submit, TokenLogprob
from arriero.runner.sampling import Sampler

CONTEXT = 1 << 20


class NullModel:
    """Every token is 0, and that is known beforehand."""

    facts = ModelFacts("null", 2, 1, 0, CONTEXT, mx.float32, 0)

    def __init__(self, rows: int) -> None:
        self._states = {n: mx.zeros((n, 1)) for n in range(1, rows + 1)}
        self._logits = {n: mx.zeros((n, 2)) for n in range(1, rows + 1)}
        mx.eval(self._states, self._logits)

    def new_caches(self) -> RowCaches:
        return []

    def forward(self, batch: Batch) -> Hidden:
        return Hidden(self._states[len(batch.spans)])

    def logits(self, hidden: mx.array) -> mx.array:
        return self._logits[hidden.shape[0]]


class NullSampled:
    def __init__(self, tokens: mx.array) -> None:
        self.tokens = tokens

    def arrays(self) -> list[mx.array]:
        return [self.tokens]

    def read_tokens(self) -> list[int]:
        tokens: Any = self.tokens.tolist()
        return list(tokens)

    def read_logprobs(self) -> list[TokenLogprob | None] | None:
        return None


class NullSampler:
    """Gives the same evaluated array for ever."""

    def __init__(self, rows: int) -> None:
        self._sampled = {n: NullSampled(mx.zeros(n, mx.int32)) for n in range(1, rows + 1)}
        mx.eval([sampled.tokens for sampled in self._sampled.values()])

    def add(self, row: str, options: SamplingOptions, prompt: Sequence[int]) -> None:
        pass

    def remove(self, row: str) -> None:
        pass

    def sample(self, rows: Sequence[str], logits: mx.array) -> NullSampled:
        return self._sampled[len(rows)]


def engine_seconds(rows: int, steps: int, sampler: Any) -> float:
    """Seconds for `steps` decode steps of `rows` rows."""
    model: Any = NullModel(rows)
    engine = Engine(model, sampler, Limits(CONTEXT, max_rows=rows))
    for row in range(rows):
        sampling = SamplingOptions(temperature=0.0)
        engine.submit(Submit(id=str(row), tokens=[1], max_tokens=CONTEXT - 1, stop_tokens=[9], sampling=sampling))
    for _ in range(50):
        engine.step()
    engine.drain()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
        engine.drain()
    return time.perf_counter() - started


def loop_seconds(rows: int, steps: int) -> float:
    """Seconds for the calls of MLX alone."""
    tokens = mx.zeros(rows, mx.int32)
    mx.eval(tokens)
    started = time.perf_counter()
    for _ in range(steps):
        mx.async_eval(tokens)  # type: ignore[no-untyped-call]
        mx.eval([tokens])
        tokens.tolist()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    tokens = parser.parse_args().tokens
    print(f"{'rows':>4} {'loop µs/token':>14} {'engine µs/token':>16} {'sampler µs/token':>17} {'ratio':>6}")
    for rows in (1, 2, 4, 8, 16):
        steps = max(tokens // rows, 100)
        per_token = 1e6 / (steps * rows)
        loop = min(loop_seconds(rows, steps) for _ in range(3)) * per_token
        engine = min(engine_seconds(rows, steps, NullSampler(rows)) for _ in range(3)) * per_token
        drawn = min(engine_seconds(rows, steps, Sampler(2, CONTEXT)) for _ in range(3)) * per_token
        print(f"{rows:>4} {loop:>14.1f} {engine:>16.1f} {drawn:>17.1f} {engine / loop:>6.1f}")


if __name__ == "__main__":
    main()

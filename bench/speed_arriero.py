"""Prefill and decode speed of a GGUF file in our engine, without a server: one JSON object on stdout.

    python bench/speed_arriero.py MODEL.gguf [--prompts 512 …] [--rows 1 …] [--tokens 128] [--runs 3]
                                             [--dtype bfloat16] [--prefill exact]

Every prompt length is measured with every number of rows. `decode` is that of one row; `total` is what all rows
together generate per second from the moment when all of them decode until the first of them ends.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from arriero.kernels.device import native
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import Loaded, load, warm_up
from arriero.runner.messages import Finished, SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from arriero.source import GGUFSource


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second, medians."""

    prompt: int
    rows: int
    prefill: float
    decode: float
    total: float


def measure(loaded: Loaded, prompt: int, rows: int, options: argparse.Namespace) -> Speed:
    """`options.runs` times `rows` requests at once."""
    facts = loaded.model.facts
    prompt = min(prompt, facts.context_length - options.tokens)
    limits = Limits(context_length=prompt + options.tokens, max_rows=rows, prefill_chunk=options.chunk)
    engine = Engine(loaded.model, Sampler(facts.vocab_size, limits.context_length), limits)
    warm_up(engine)
    draw = random.Random(prompt)
    prefill, decode, total = [], [], []
    for run in range(options.runs):
        for row in range(rows):
            engine.submit(
                Submit(
                    id=f"{run}-{row}",
                    tokens=[draw.randrange(1000, facts.vocab_size - 1000) for _ in range(prompt)],
                    max_tokens=options.tokens,
                    stop_tokens=[],
                    sampling=SamplingOptions(temperature=0),
                )
            )
        finished, together = _run(engine, rows)
        prefill.append(statistics.median(prompt / (f.prefill_ns / 1e9) for f in finished))
        decode.append(statistics.median(f.generated_tokens / (f.decode_ns / 1e9) for f in finished))
        total.append(together)
    return Speed(prompt, rows, *(statistics.median(figures) for figures in (prefill, decode, total)))


def _run(engine: Engine, rows: int) -> tuple[list[Finished], float]:
    """To the end of all rows; their last messages, and the tokens per second while all of them decoded."""
    finished: list[Finished] = []
    started: set[str] = set()
    generated, since, until = 0, 0.0, 0.0
    while engine.busy:
        engine.step()
        now = time.perf_counter()
        for message in engine.drain():
            if isinstance(message, Finished):
                until = until or now
                finished.append(message)
            elif isinstance(message, Tokens):
                if since and not until:
                    generated += len(message.tokens)
                started.add(message.id)
        if len(started) == rows and not since:
            since = now
    return finished, generated / (until - since)


def read_bytes(loaded: Loaded) -> int:
    """Bytes of the weights that a decode step reads: all but a token table that is not the head, too."""
    model: Any = loaded.model
    tied = model.head.weight is model.embedding.weight
    return loaded.weight_bytes - (0 if tied else int(model.embedding.weight.nbytes))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--prefill", default="")
    options = parser.parse_args()
    started = time.perf_counter()
    loaded = load(GGUFSource((options.model,)), options.dtype, lambda _: None, options.prefill)
    seconds = time.perf_counter() - started
    speeds = [measure(loaded, prompt, rows, options) for prompt in options.prompts for rows in options.rows]
    print(
        json.dumps(
            {
                "speeds": [asdict(speed) for speed in speeds],
                "weight_bytes": loaded.weight_bytes,
                "read_bytes": read_bytes(loaded),
                "load_seconds": round(seconds, 2),
                "kernels": "arriero-cpu" if native() is not None else "plain MLX",
                "dtype": str(loaded.dtype).removeprefix("mlx.core."),
            }
        )
    )


if __name__ == "__main__":
    main()

"""Prefill and decode speed of a GGUF file in our engine, without a server: one JSON object on stdout.

python bench/speed_arriero.py MODEL.gguf [--prompt 512] [--tokens 128] [--rows 1] [--runs 3] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from arriero.kernels.device import native
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import load, warm_up
from arriero.runner.messages import Finished, SamplingOptions, Submit
from arriero.runner.sampling import Sampler
from arriero.source import GGUFSource


def main() -> None:
    """Measure and print medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--dtype", default="")
    options = parser.parse_args()
    loaded = load(GGUFSource((options.model,)), options.dtype, lambda _: None)
    context = min(options.prompt + options.tokens + 16, loaded.model.facts.context_length)
    limits = Limits(context_length=context, max_rows=options.rows, prefill_chunk=options.chunk)
    engine = Engine(loaded.model, Sampler(loaded.model.facts.vocab_size, context), limits)
    warm_up(engine)
    prefill, decode, total = [], [], []
    draw = random.Random(0)
    for run in range(options.runs):
        for row in range(options.rows):
            tokens = [draw.randrange(1000, loaded.model.facts.vocab_size - 1000) for _ in range(options.prompt)]
            engine.submit(
                Submit(
                    id=f"{run}-{row}",
                    tokens=tokens,
                    max_tokens=options.tokens,
                    stop_tokens=[],
                    sampling=SamplingOptions(temperature=0),
                )
            )
        started = time.perf_counter()
        while engine.busy:
            engine.step()
        elapsed = time.perf_counter() - started
        finished = [message for message in engine.drain() if isinstance(message, Finished)]
        prefill.append(statistics.median(options.prompt / (f.prefill_ns / 1e9) for f in finished))
        decode.append(statistics.median(f.generated_tokens / (f.decode_ns / 1e9) for f in finished))
        total.append(sum(f.generated_tokens for f in finished) / elapsed)
    print(
        json.dumps(
            {
                "prefill": statistics.median(prefill),
                "decode": statistics.median(decode),
                "total": statistics.median(total),
                "kernels": "arriero-cpu" if native() is not None else "plain MLX",
                "dtype": str(loaded.dtype),
            }
        )
    )


if __name__ == "__main__":
    main()

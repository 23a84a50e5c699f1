"""A decode step's share of what memory gives, both measured in turn in one process.

    python bench/bandwidth_share.py MODEL.gguf [--prompt 64] [--rows 1] [--rounds 40] [--ahead]

A round is eight decode steps, then one pass of each loop that only reads, with as many threads
(`arriero_cpu.read_bandwidth`: six patterns over large pages, of which the best counts). What memory gives moves by a
third within minutes on a shared machine, so a share of two figures that were taken apart says little. `median` compares
the median round of both, `best` the best of both. A step's bytes are those of the weights, and of keys and values in
layers that keep all of them. With `--ahead` each step is launched before the one before it is read, which the engine
does on GPUs alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

# As a script, this folder is where modules are looked for, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arriero.kernels.device import native
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import Loaded, load, warm_up
from arriero.runner.messages import SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from arriero.source import GGUFSource
from bench.speed_arriero import read_bytes

STEPS = 8
"""Decode steps of a round; the first is not counted, because reading has pushed Python out of the caches."""


def decoding(engine: Engine, rows: int, prompt: int, tokens: int, vocabulary: int) -> None:
    """Submit rows and run until all of them decode."""
    draw = random.Random(prompt)
    for row in range(rows):
        ids = [draw.randrange(vocabulary) for _ in range(prompt)]
        sampling = SamplingOptions(temperature=0)
        engine.submit(Submit(id=str(row), tokens=ids, max_tokens=tokens, stop_tokens=[], sampling=sampling))
    started: set[str] = set()
    while len(started) < rows:
        engine.step()
        started |= {message.id for message in engine.drain() if isinstance(message, Tokens)}


def step_seconds(engine: Engine) -> float:
    """The median of a round's steps but the first."""
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
        engine.drain()
    return statistics.median(times[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ahead", action="store_true")
    options = parser.parse_args()
    if native() is None:
        raise SystemExit("arriero-cpu is not installed, or not for this mlx: there is nothing to measure")
    import arriero_cpu

    loaded = load(GGUFSource((options.model,)), "bfloat16", lambda _: None)
    if not isinstance(loaded, Loaded):
        raise SystemExit(f"{options.model} generates no text")
    vocabulary = loaded.model.facts.vocab_size
    tokens = options.rounds * STEPS + STEPS
    limits = Limits(context_length=options.prompt + tokens, max_rows=options.rows)
    ahead = True if options.ahead else None
    engine = Engine(loaded.model, Sampler(vocabulary, limits.context_length), limits, ahead)
    warm_up(engine)
    decoding(engine, options.rows, options.prompt, tokens, vocabulary)
    steps, reads = [], []
    weights, held = read_bytes(loaded), options.rows * loaded.model.facts.cache_bytes_per_token
    for number in range(options.rounds):
        behind = options.prompt + number * STEPS + STEPS // 2
        steps.append((weights + held * behind) / step_seconds(engine) / 1e9)
        reads.append(arriero_cpu.read_bandwidth(0.0) / 1e9)
    name, threads = Path(options.model).name, arriero_cpu.threads()
    print(f"{name}, {options.rows} rows behind {options.prompt} tokens, {threads} threads")
    for name, pick in (("median", statistics.median), ("best", max)):
        step, read = pick(steps), pick(reads)
        print(f"{name:>7}: a step {step:.1f} GB/s, a loop that only reads {read:.1f} GB/s: {100 * step / read:.0f} %")


if __name__ == "__main__":
    main()

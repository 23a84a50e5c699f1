"""How long the top k of logits takes by `arriero.kernels.topk`, by MLX's argpartition and by a full sort.

    python bench/topk.py [--k 40] [--rows 1] [--seconds 0.25]

Prints the median in milliseconds and the ratios to ours (above 1 = ours is faster) on MLX's default device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from arriero.kernels.topk import top_k

VOCABULARIES = (32_000, 128_256, 151_936, 248_320, 262_144)


def median_ms(function: Callable[[], mx.array], seconds: float) -> float:
    """Median wall time of a call with its evaluation, over at least three calls."""
    mx.eval(function())
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        mx.eval(function())
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=40)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.25, help="for each figure")
    asked = parser.parse_args()
    k = asked.k

    print(f"top {k} of {asked.rows} x vocabulary, {mx.default_device()}, mlx {mx.__version__}; medians in ms")
    print(f"{'vocabulary':>10} {'dtype':>9} {'ours':>8} {'argpartition':>13} {'full sort':>10} {'ratios':>14}")
    for dtype in (mx.bfloat16, mx.float32):
        for vocabulary in VOCABULARIES:
            scores = mx.random.normal((asked.rows, vocabulary), key=mx.random.key(vocabulary)).astype(dtype)
            mx.eval(scores)

            def ours(scores: mx.array = scores) -> mx.array:
                return top_k(scores, k)

            def partition(scores: mx.array = scores) -> mx.array:
                return mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k]

            def sort(scores: mx.array = scores) -> mx.array:
                return mx.argsort(-scores, axis=-1)[..., :k]

            if not np.array_equal(np.array(ours()), np.array(sort())):
                raise SystemExit(f"wrong indices for {vocabulary} {dtype}")
            mine, parted, sorted_ = (median_ms(function, asked.seconds) for function in (ours, partition, sort))
            name = str(dtype).removeprefix("mlx.core.")
            ratios = f"{parted / mine:.1f} / {sorted_ / mine:.1f}"
            print(f"{vocabulary:>10} {name:>9} {mine:>8.3f} {parted:>13.3f} {sorted_:>10.3f} {ratios:>14}")


if __name__ == "__main__":
    main()

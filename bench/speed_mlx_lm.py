"""Prefill and decode speed of an MLX folder in mlx-lm: one JSON object on stdout.

Run it with a Python that has mlx-lm.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def main() -> None:
    """Measure once; mlx-lm on a CPU is too slow for more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4)
    options = parser.parse_args()
    model, _ = load_model(Path(options.folder))
    started = time.perf_counter()
    first = 0.0
    count = 0
    for _ in generate_step(mx.arange(1000, 1000 + options.prompt), model, max_tokens=options.tokens + 1):
        count += 1
        if count == 1:
            first = time.perf_counter()
    ended = time.perf_counter()
    print(json.dumps({"prefill": options.prompt / (first - started), "decode": (count - 1) / (ended - first)}))


if __name__ == "__main__":
    main()

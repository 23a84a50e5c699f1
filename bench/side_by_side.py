"""arriero, llama.cpp and mlx-lm on the same weights, in turn, in one run; prints a table of medians and ratios.

    python bench/side_by_side.py MODEL.gguf --llama-bench BUILD/bin/llama-bench --mlx-python VENV/bin/python

llama.cpp and mlx-lm are optional: what is not given is left out. Each round runs the three one after another, so that a
machine that gets slower slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run(command: list[str], threads: int) -> Any:
    """The JSON that a program prints."""
    environ = {**os.environ, "ARRIERO_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return json.loads(result.stdout)


def ours(options: argparse.Namespace, dtype: str) -> dict[str, float]:
    """One round of arriero."""
    command = [sys.executable, str(HERE / "speed_arriero.py"), options.model, "--runs", "2", "--dtype", dtype]
    result: dict[str, float] = run(
        [*command, "--prompt", str(options.prompt), "--tokens", str(options.tokens)], options.threads
    )
    return result


def llama(options: argparse.Namespace) -> dict[str, float]:
    """One round of llama.cpp."""
    command = [options.llama_bench, "-m", options.model, "-t", str(options.threads), "-o", "json", "-r", "2"]
    rows = run([*command, "-p", str(options.prompt), "-n", str(options.tokens)], options.threads)
    return {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


def mlx_lm(options: argparse.Namespace, folder: str) -> dict[str, float]:
    """One round of mlx-lm, with few tokens."""
    result: dict[str, float] = run([options.mlx_python, str(HERE / "speed_mlx_lm.py"), folder], options.threads)
    return result


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--llama-bench")
    parser.add_argument("--mlx-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.mlx_python:
            subprocess.run(
                [sys.executable, "-m", "tools.export_mlx", options.model, folder], check=True, cwd=HERE.parent
            )
        for _ in range(options.rounds):
            for dtype in options.dtypes:
                results.setdefault(f"arriero {dtype}", []).append(ours(options, dtype))
            if options.llama_bench:
                results.setdefault("llama.cpp", []).append(llama(options))
            if options.mlx_python:
                results.setdefault("mlx-lm", []).append(mlx_lm(options, folder))
    print(f"{options.threads} threads, prompt {options.prompt}, {options.tokens} new tokens, {options.rounds} rounds\n")
    print(f"{'':20}{'prefill tok/s':>16}{'decode tok/s':>16}{'prefill ratio':>16}{'decode ratio':>16}")
    base = results.get("llama.cpp")
    for name, rounds in results.items():
        kinds = ("prefill", "decode")
        cells = [f"{statistics.median(entry[kind] for entry in rounds):>16.1f}" for kind in kinds]
        for kind in kinds:
            # Ratios are taken round by round, then their median: drift of the machine cancels out.
            pairs = [entry[kind] / other[kind] for entry, other in zip(rounds, base, strict=True)] if base else []
            cells.append(f"{statistics.median(pairs):>16.2f}" if pairs else f"{'':>16}")
        print(f"{name:20}{''.join(cells)}")


if __name__ == "__main__":
    main()

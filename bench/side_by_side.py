"""arriero, llama.cpp and mlx-lm on the same weights, in turn, in one run; prints tables of medians and ratios.

    python bench/side_by_side.py MODEL.gguf --llama-bench BUILD/bin/llama-bench [--mlx-python VENV/bin/python]
        [--contexts 64 512 2048 8064] [--rows 1 4 8] [--threads 1] [--busy 2] [--json FILE]

`random-1b` as the model is that of `tools/random_model.py`. llama.cpp and mlx-lm are optional: what is not given is
left out. At each context a prompt of so many tokens is read and new tokens are generated behind it. Each round runs all
programs one after another and measures how fast memory is read, so that a machine that gets slower slows all of them;
ratios and shares are taken round by round. `--busy` lets processes spin beside everything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# As a script, this folder is where modules are looked for, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.machine import busy, facts, read_bandwidth
from bench.peers import ROOT, Figures, arriero, arriero_rows, llama_cpp, mlx_lm
from tools.random_model import made

LLAMA = "llama.cpp"


def main() -> None:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-bench")
    parser.add_argument("--mlx-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2, help="of each program in a round")
    parser.add_argument("--settings", nargs="+", default=["bfloat16", "float32"], help="such as bfloat16:int8")
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="rows at once, in the first setting")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = str(made()) if options.model == "random-1b" else os.path.abspath(options.model)
    machine = facts()
    with tempfile.TemporaryDirectory() as folder, busy(options.busy):
        if options.mlx_python:
            subprocess.run([sys.executable, "-m", "tools.export_mlx", model, folder], check=True, cwd=ROOT)
        rounds = [measure(options, model, folder, number) for number in range(options.rounds)]
    print(
        f"{Path(model).name}, {options.threads} threads, {options.tokens} new tokens, {options.rounds} rounds", end=""
    )
    print(f", {options.busy} processes spinning beside" if options.busy else "", end="")
    print(f"; {machine['processor']}, {machine['processors']} processors, load {machine['load']} at the start")
    print(f"memory is read at {statistics.median(r['bandwidth'] for r in rounds) / 1e9:.1f} GB/s\n")
    results = speeds(rounds) + totals(rounds)
    if options.json:
        how = {
            name: value for name, value in vars(options).items() if name not in ("json", "llama_bench", "mlx_python")
        }
        how["model"] = Path(model).name
        options.json.write_text(json.dumps({"machine": machine, "options": how, "results": results}, indent=2), "utf-8")


def measure(options: argparse.Namespace, model: str, folder: str, number: int) -> dict[str, Any]:
    """One round of everything."""
    threads, how = options.threads, (options.tokens, options.runs, options.threads)
    found: dict[str, Any] = {"bandwidth": read_bandwidth(threads), "speeds": {}}
    for context in options.contexts:
        print(f"round {number + 1} of {options.rounds}, context {context}", file=sys.stderr)
        for setting in options.settings:
            found["speeds"][f"arriero {setting}", context] = arriero(model, setting, context, *how)
        if options.llama_bench:
            found["speeds"][LLAMA, context] = llama_cpp(options.llama_bench, model, context, *how)
    if options.mlx_python:
        found["speeds"]["mlx-lm (8 and 4 tokens)", options.contexts[0]] = mlx_lm(options.mlx_python, folder, threads)
    if options.rows:
        rows = sorted({1, *options.rows})
        found["rows"] = arriero_rows(model, options.settings[0], rows, *how)
    return found


def speeds(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print one line for each program and context; the same as data."""
    header = ("context", "prefill tok/s", "decode tok/s", "prefill ratio", "decode ratio", "of bandwidth")
    print(f"{'':26}" + "".join(f"{title:>15}" for title in header))
    results = []
    for name, context in sorted(rounds[0]["speeds"], key=lambda key: key[1]):
        own: list[Figures] = [found["speeds"][name, context] for found in rounds]
        base = [found["speeds"].get((LLAMA, context)) for found in rounds]
        line: dict[str, Any] = {"program": name, "context": context}
        for kind in ("prefill", "decode"):
            line[kind] = statistics.median(getattr(figures, kind) for figures in own)
            pairs = [getattr(a, kind) / getattr(b, kind) for a, b in zip(own, base, strict=True) if b is not None]
            line[f"{kind}_ratio"] = statistics.median(pairs) if pairs else None
        shares = [f.decode * f.read_bytes / found["bandwidth"] for f, found in zip(own, rounds, strict=True)]
        line["share"] = statistics.median(shares) if own[0].read_bytes else None
        cells = [f"{context:>15}", f"{line['prefill']:>15.1f}", f"{line['decode']:>15.1f}"]
        cells += [f"{r:>15.2f}" if (r := line[f"{kind}_ratio"]) else f"{'':>15}" for kind in ("prefill", "decode")]
        cells.append(f"{100 * line['share']:>13.0f} %" if line["share"] else "")
        print(f"{name:26}" + "".join(cells))
        results.append({**line, "bytes": own[0].read_bytes})
    return results


def totals(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print what several rows generate together, if that was asked for; the same as data."""
    if "rows" not in rounds[0]:
        return []
    print(f"\n{'rows':>4}{'total tok/s':>15}{'÷ one row':>15}")
    results = []
    for rows in rounds[0]["rows"]:
        total = statistics.median(found["rows"][rows] for found in rounds)
        ratio = statistics.median(found["rows"][rows] / found["rows"][1] for found in rounds)
        print(f"{rows:>4}{total:>15.1f}{ratio:>15.2f}")
        results.append({"rows": rows, "total": total, "ratio": ratio})
    return results


if __name__ == "__main__":
    main()

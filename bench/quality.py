"""Perplexity and per-token divergence of one setting of a model against another, over a text.

    python bench/quality.py MODEL.gguf [--reference bfloat16:exact] [--candidate bfloat16:int8] [--text FILE …]

A setting is a type of activations and a kind of prefill. Without `--text` the two texts of this repository are read,
some 4,300 tokens. The text goes through the products as a prompt does; logits are computed as decoding does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from arriero.bench.compared import DEFAULT_TEXT
from arriero.bench.quality import Quality, compare
from arriero.chat.tokenizer import Tokenizer
from arriero.model.contract import Model
from arriero.runner.load import load
from arriero.source import GGUFSource

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [DEFAULT_TEXT, ROOT / "tests" / "real" / "text.txt"]


def opened(source: GGUFSource, setting: str) -> Model:
    """The model with a setting such as `bfloat16:int8`."""
    dtype, _, prefill = setting.partition(":")
    return load(source, dtype, lambda _: None, prefill).model


def line(name: str, found: Quality) -> str:
    """The figures as one row of a table."""
    return (
        f"{name:40}{found.tokens:>8}{found.reference_perplexity:>12.4f}{found.perplexity:>12.4f}"
        f"{100 * (found.ratio - 1):>+10.3f} %{found.mean_divergence:>12.2e}{found.high_divergence:>12.2e}"
        f"{found.largest_divergence:>12.2e}{100 * found.same_likeliest:>9.2f} %"
    )


def main() -> None:
    """Measure each model and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--reference", default="bfloat16:exact")
    parser.add_argument("--candidate", default="bfloat16:int8")
    parser.add_argument("--text", nargs="+", type=Path, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=0, help="read no more than these")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = "\n".join(path.read_text("utf-8") for path in options.text)
    results = []
    print(f"{options.candidate} against {options.reference}, windows of {options.window} tokens")
    print(f"{'':40}{'tokens':>8}{'reference':>12}{'perplexity':>12}{'change':>12}", end="")
    print(f"{'mean KL':>12}{'99 % KL':>12}{'max KL':>12}{'same top':>11}")
    for path in options.models:
        source = GGUFSource((path,))
        tokenizer = Tokenizer.open(source)
        begin = tokenizer.encode("")
        ids = tokenizer.encode(text)[len(begin) :][: options.tokens or None]
        (found,) = compare(
            opened(source, options.reference),
            [opened(source, options.candidate)],
            ids,
            begin=begin,
            window=options.window,
            progress=lambda done: print(f"\r{done}", end="", file=sys.stderr, flush=True),
        )
        print(end="\r      \r", file=sys.stderr)
        print(line(Path(path).name, found), flush=True)
        results.append({"model": Path(path).name, **found.figures()})
    if options.json:
        settings = {"reference": options.reference, "candidate": options.candidate, "window": options.window}
        options.json.write_text(json.dumps({**settings, "results": results}, indent=2), "utf-8")


if __name__ == "__main__":
    main()

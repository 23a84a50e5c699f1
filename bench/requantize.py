"""What each precision of `create --quantize` costs and gains on a real model: the table of docs/quantization.md.

    python -m bench.requantize MODEL.gguf [--precisions nvfp4 int4 …] [--no-scale-search] [--no-quality] [--speed]
                               [--rounds 5] [--text FILE …] [--folder DIR] [--json FILE]

The model becomes a folder of bfloat16 matrices first, which is created as it is and at each precision; all are measured
against the former. Sizes, perplexities and divergences do not depend on what else the machine does; `--speed` does:
each round loads and measures every precision once, in turn, and the medians over the rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from arriero.bench.quality import compare
from arriero.bench.weights import weight_errors
from arriero.chat.tokenizer import Tokenizer
from arriero.create.create import create
from arriero.create.precisions import DENSE, PACKED
from arriero.create.request import CreateRequest
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.runner.load import Loaded, load
from arriero.store import manifests
from arriero.store.model import StoredModel
from arriero.store.store import Store
from bench.machine import facts
from bench.quality import TEXTS
from bench.speed_arriero import measure
from tests.helpers.checkpoint_folder import upload
from tools.export_folder import export

REFERENCE = "bf16"
KINDS = [kind for kind in (*PACKED, *DENSE) if kind != REFERENCE]


def tell(words: object) -> None:
    """A step, on standard error."""
    print(words, file=sys.stderr, flush=True)


def created(store: Store, folder: Path, kind: str, search: bool) -> StoredModel:
    """The folder as a stored model at a precision; the reference keeps what it has."""
    asked = {} if kind == REFERENCE else {"quantize": kind, "scale_search": search}
    request = CreateRequest(model=kind, files=upload(store, folder), **asked)
    return create(store, request, lambda status: tell(status["status"]) if "error" in status["status"] else None)


def qualities(stored: dict[str, StoredModel], text: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each precision costs against the reference, which reads the text once for all."""
    tokenizer = Tokenizer.open(stored[REFERENCE].source())
    begin = tokenizer.encode("")
    ids = tokenizer.encode(text)[len(begin) :][: options.most or None]
    models = {kind: opened(model, options) for kind, model in stored.items()}
    others = [kind for kind in stored if kind != REFERENCE]
    found = compare(
        models[REFERENCE],
        [models[kind] for kind in others],
        ids,
        begin=begin,
        window=options.window,
        progress=lambda done: tell(f"{done} of {len(ids)} tokens"),
    )
    errors = {kind: weight_errors(*(Checkpoint.open(stored[k].source()) for k in (REFERENCE, kind))) for kind in others}
    return {kind: {"weight_error": errors[kind].error} | one.figures() for kind, one in zip(others, found, strict=True)}


def opened(model: StoredModel, options: argparse.Namespace) -> Model:
    """The model, loaded."""
    loaded = load(model.source(), options.dtype, lambda _: None)
    assert isinstance(loaded, Loaded)
    return loaded.model


def speeds(stored: dict[str, StoredModel], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of prefill and decode speed by precision."""
    settings = argparse.Namespace(tokens=options.tokens, runs=1, chunk=512)
    found: dict[str, list[Any]] = {kind: [] for kind in stored}
    for turn in range(options.rounds):
        for kind, model in stored.items():
            loaded = load(model.source(), options.dtype, lambda _: None)
            assert isinstance(loaded, Loaded)
            found[kind].append(measure(loaded, options.prompt, 1, settings))
            tell(f"round {turn + 1}, {kind}: {found[kind][-1].decode:.1f} tokens/s")
    return {
        kind: {name: statistics.median(getattr(one, name) for one in all_) for name in ("prefill", "decode")}
        for kind, all_ in found.items()
    }


def line(found: dict[str, Any], reference: dict[str, Any], speed: dict[str, dict[str, float]]) -> str:
    """One row of the table, as Markdown."""
    kind = found["precision"]
    cells = [kind, f"{found['bytes'] / 1e6:.1f}", f"{found['bytes'] / reference['bytes']:.3f}"]
    if "perplexity" in found:
        cells += [
            f"{100 * found['weight_error']:.2f} %",
            f"{found['perplexity']:.3f}",
            f"{100 * (found['ratio'] - 1):+.2f} %",
            f"{found['mean_divergence']:.4f}",
            f"{found['high_divergence']:.3f}",
            f"{100 * found['same_likeliest']:.1f} %",
        ]
    else:
        perplexity = reference.get("reference_perplexity")
        cells += ["", f"{perplexity:.3f}" if perplexity and kind == REFERENCE else "", "", "", "", ""]
    if speed:
        cells += [f"{speed[kind]['prefill']:.0f}", f"{speed[kind]['decode']:.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Create, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precisions", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--no-scale-search", action="store_true")
    parser.add_argument("--no-quality", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--text", nargs="+", type=Path, default=TEXTS)
    parser.add_argument("--most", type=int, default=0, help="read no more tokens than these")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = "\n".join(path.read_text("utf-8") for path in options.text)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = export(options.model, Path(place) / "model")
        store = Store(Path(place) / "store")
        kinds = [REFERENCE, *options.precisions]
        stored = {kind: created(store, folder, kind, not options.no_scale_search) for kind in kinds}
        sizes = {kind: sum(one.size for one in stored[kind].manifest.of(manifests.TENSOR)) for kind in kinds}
        found = {} if options.no_quality else qualities(stored, text, options)
        results = [{"precision": kind, "bytes": sizes[kind]} | found.get(kind, {}) for kind in kinds]
        reference = results[0] | {"reference_perplexity": results[-1].get("reference_perplexity")}
        speed = speeds(stored, options) if options.speed else {}
    print(json.dumps(facts()))
    print(f"{options.model.name}, activations {options.dtype}, windows of {options.window}")
    for result in results:
        print(line(result, reference, speed))
    if options.json:
        options.json.write_text(json.dumps({"results": results, "speed": speed}, indent=2), "utf-8")


if __name__ == "__main__":
    main()

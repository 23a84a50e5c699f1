"""What one decode step of each architecture costs: operations, Python to build them, MLX to run them.

    python bench/step_cost.py                                    # the tiny checkpoints of the tests
    python bench/step_cost.py --four-bit FOLDER ...              # others, their matrices packed to 4 bits first
    ARRIERO_KERNELS=graph python bench/step_cost.py              # plain MLX

One row after a prompt of 64 tokens. `operations` are the nodes of the graph from the token to the next one, views (a
reshape, a transposition) among them; `build` is Python's time to make that graph, `run` that of one `mx.eval` of it.
`work` is the processor's time for both, of all threads: other work on the machine hardly changes it, but waiting
threads spin, so take it with ARRIERO_THREADS=1. All are the least of all steps. Flash Next sends its first layers off
while it builds: `build` includes that, and `run` does not. `--primitives` lists how often each operation is in the
graph. The second line says what one small operation costs by itself, in a chain of them. On the CPU plain MLX takes
`mx.fast` and compiled functions apart; a GPU counts each as one operation.

Wide checkpoints with random weights: `python tools/make_wide.py FOLDER [NAME ...]`, with torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx

from arriero.kernels.device import native
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Model, RowCaches, Span
from arriero.source import FolderSource

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "model" / "goldens"
PROMPT = 64
GROUP = 64
NODE = re.compile(r'label ="([^"]+)"')
# Tables of rows and what is no matrix product stay as they are.
KEPT = re.compile(r"embed|conv1d|ngram|norm|router|\.gate\.weight$")


@dataclass(frozen=True)
class Cost:
    """One decode step: `build`, `run` and `work` in seconds, `weight_bytes` of the whole model."""

    layers: int
    primitives: Counter[str]
    build: float
    run: float
    work: float
    weight_bytes: int

    @property
    def operations(self) -> int:
        return self.primitives.total()


class Row:
    """A row that decodes greedily."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.caches: RowCaches = model.new_caches()
        self.position = 0

    def step(self, tokens: mx.array) -> list[mx.array]:
        """The graph of one forward: the next token, then the states."""
        span = Span(0, tokens.shape[0], self.position, self.caches)
        hidden = self.model.forward(Batch(tokens, [span])).final
        self.position += tokens.shape[0]
        token = mx.argmax(self.model.logits(hidden[-1:]), axis=-1)
        return [token, *(array for cache in self.caches if cache is not None for array in cache.state())]


def measure(folder: Path, dtype: mx.Dtype, steps: int) -> Cost:
    """Load a checkpoint and let it decode."""
    model = load_model(Checkpoint.open(FolderSource(str(folder))), dtype)
    weights = list(model.parameters())
    mx.eval(weights)
    row = Row(model)
    outputs = row.step(mx.arange(PROMPT, dtype=mx.int32) % model.facts.vocab_size)
    mx.eval(outputs)
    builds, runs, works = [], [], []
    for _ in range(steps):
        token = outputs[0]
        del outputs
        worked = time.process_time()
        started = time.perf_counter()
        outputs = row.step(token)
        built = time.perf_counter()
        mx.eval(outputs)
        runs.append(time.perf_counter() - built)
        builds.append(built - started)
        works.append(time.process_time() - worked)
    return Cost(
        layers=model.facts.layers,
        primitives=primitives(row, outputs[0]),
        build=min(builds),
        run=min(runs),
        work=min(works),
        weight_bytes=sum(array.nbytes for array in weights),
    )


def primitives(row: Row, token: mx.array) -> Counter[str]:
    """How often each operation is in the graph of one step."""
    with tempfile.NamedTemporaryFile("r", suffix=".dot") as file, patch.object(mx, "async_eval"):
        mx.export_to_dot(file.name, *row.step(token))
        found = Counter(NODE.findall(file.read()))
    if not found:
        raise SystemExit("no operations are in MLX's export of the graph: its format has changed")
    return found


def chain(length: int = 300, times: int = 50) -> tuple[float, float]:
    """Seconds that one addition of 2048 numbers takes to build and to run, in a chain of them."""
    x = mx.ones((1, 2048))
    builds, runs = [], []
    for _ in range(times):
        started = time.perf_counter()
        y = x
        for _ in range(length):
            y = y + x
        built = time.perf_counter()
        mx.eval(y)
        runs.append(time.perf_counter() - built)
        builds.append(built - started)
    return min(builds) / length, min(runs) / length


def four_bit(folder: Path, out: Path) -> Path:
    """The same checkpoint with its matrices in MLX's 4-bit layout."""
    out.mkdir(parents=True, exist_ok=True)
    packed: dict[str, mx.array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in mx.load(str(path)).items():  # type: ignore[union-attr]
            fits = name.endswith(".weight") and value.ndim == 2 and value.shape[1] % GROUP == 0
            if not fits or KEPT.search(name):
                packed[name] = value
                continue
            owner = name.removesuffix(".weight")
            packed[name], packed[f"{owner}.scales"], packed[f"{owner}.biases"] = mx.quantize(value, GROUP, 4)
            mx.eval(packed[name], packed[f"{owner}.scales"], packed[f"{owner}.biases"])
    mx.save_safetensors(str(out / "model.safetensors"), packed, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("quantization_config", {"group_size": GROUP, "bits": 4})
    (out / "config.json").write_text(json.dumps(config))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--four-bit", action="store_true")
    parser.add_argument("--primitives", action="store_true")
    options = parser.parse_args()
    folders = options.folders or sorted(path.parent for path in GOLDENS.glob("*/config.json"))
    build, run = chain()
    print(f"kernels: {'arriero-cpu' if native() is not None else 'plain MLX'}, {options.dtype}, {mx.default_device()}")
    print(f"one addition: build {build * 1e6:.2f} µs, run {run * 1e6:.2f} µs\n")
    print("| | layers | operations | a layer | build µs | run ms | work ms | weights MB |")
    print("|---|---|---|---|---|---|---|---|")
    for folder in folders:
        with tempfile.TemporaryDirectory() as scratch:
            source = four_bit(folder, Path(scratch)) if options.four_bit else folder
            cost = measure(source, getattr(mx, options.dtype), options.steps)
        print(
            f"| {folder.name} | {cost.layers} | {cost.operations} | {cost.operations / cost.layers:.0f} "
            f"| {cost.build * 1e6:.0f} | {cost.run * 1e3:.2f} | {cost.work * 1e3:.2f} "
            f"| {cost.weight_bytes / 1e6:.0f} |",
            flush=True,
        )
        if options.primitives:
            print("  " + ", ".join(f"{name} {count}" for name, count in cost.primitives.most_common()))


if __name__ == "__main__":
    main()

"""What a decode step of each architecture launches on an NVIDIA GPU, counted without one: our kernels, and MLX's.

    python bench/launches.py [--rows 8] [--tokens 8] [NAME ...] [--primitives]

Models of published widths with one or two periods of their layers (small tables of tokens, few experts) are built, and
the third of three decode forwards is counted, largest logit included: as replayed where steps are replayed, layer by
layer else. Kernels stand as empty operations in the graph and nothing is computed, so numbers need no GPU and mean
nothing but their count. What a whole model launches follows from the two. `operations` are the nodes of the graph that
MLX walks each step; `MLX` are those of them that run something of MLX's own (no views).
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from arriero.kernels import device

# Before anything binds the name: plain MLX takes other forms on the CPU.
device.on_cpu = lambda: False

from other_shapes import GLM, GPT_OSS, OtherCheckpoint  # noqa: E402

from arriero.bench.gpu_flash_next import checkpoint as flash_next  # noqa: E402
from arriero.bench.gpu_flash_next import config as flash_next_config  # noqa: E402
from arriero.bench.gpu_models import RandomCheckpoint  # noqa: E402
from arriero.bench.gpu_shapes import CONFIGS  # noqa: E402
from arriero.kernels.cuda.gpu import Gpu  # noqa: E402
from arriero.kernels.cuda.source import Kernel  # noqa: E402
from arriero.kernels.topk import argmax  # noqa: E402
from arriero.model.architectures import load_model  # noqa: E402
from arriero.model.contract import Batch, Model, Span  # noqa: E402
from arriero.model.quantization import Quantization  # noqa: E402

H200 = Gpu(multiprocessors=132, shared_memory=227 << 10, capability=(9, 0), in_place=True)
NVFP4 = Quantization("nvfp4", 4, 16)
NODE = re.compile(r'label ="([^"]+)"')
VIEWS = {
    *("Reshape", "Split", "Slice", "Squeeze", "ExpandDims", "Transpose", "Broadcast", "BroadcastAxes", "Depends"),
    *("Flatten", "Unflatten", "AsStrided", "View", "StopGradient", "Contiguous", "NumberOfElements", "Full"),
}
"""Operations that run nothing, or nothing where what they take is contiguous; `Full` is how kernels' results stand."""
FAST = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
"""Of `mx.fast`: one kernel each on a GPU, many operations where there is none."""

LLAMA = CONFIGS["Qwen3-8B"] | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-8B": (LLAMA, 1),
    "Qwen3-8B": (CONFIGS["Qwen3-8B"], 1),
    "Qwen3-30B-A3B": (CONFIGS["Qwen3-30B-A3B"], 1),
    "Qwen3.8-27B": (CONFIGS["Qwen3.8-27B"], 4),
    "Qwen3.5-35B-A3B": (CONFIGS["Qwen3.5-35B-A3B"], 4),
    "Gemma-4-31B": (CONFIGS["Gemma-4-31B"], 6),
    "Flash-Next": (flash_next_config(), 4),
    "gpt-oss-20b": (GPT_OSS, 2),
    "GLM-4.7-Flash": (GLM | {"first_k_dense_replace": 0}, 1),
}
"""Configurations, and after how many layers their kinds repeat. The last has one dense layer less than in truth."""


@dataclass(frozen=True)
class Count:
    """A step."""

    kernels: Counter[str]
    primitives: Counter[str]
    replayed: bool

    @property
    def operations(self) -> int:
        return sum(self.primitives.values())

    @property
    def ours(self) -> int:
        """Launches of our kernels."""
        return sum(n for name, n in self.kernels.items() if name not in FAST)

    @property
    def others(self) -> int:
        """Launches of MLX's own."""
        fast = sum(self.kernels[name] for name in FAST)
        return fast + sum(n for name, n in self.primitives.items() if name not in VIEWS)

    @property
    def launches(self) -> int:
        return self.ours + self.others


def kernels_of(run: Any) -> tuple[Counter[str], Any]:
    """The kernels that `run` launches, and what it gives; nothing is computed."""
    launched: Counter[str] = Counter()

    def stand_in(kernel: Kernel, inputs: Sequence[mx.array], template: Mapping[str, Any], **how: Any) -> list[mx.array]:
        launched[kernel.name] += 1
        made = [mx.zeros(shape, dtype) for shape, dtype in zip(how["shapes"], how["dtypes"], strict=True)]
        return mx.depends(made, list(inputs))

    def fast(name: str) -> Any:
        def stand_in(x: mx.array, *args: Any, **how: Any) -> mx.array:
            launched[name] += 1
            given = [x, *(value for value in (*args, *how.values()) if isinstance(value, mx.array))]
            shape = (*x.shape[:-1], args[1].shape[-1]) if name == "scaled_dot_product_attention" else x.shape
            made: mx.array = mx.depends([mx.zeros(shape, x.dtype)], given)[0]
            return made

        return stand_in

    with ExitStack() as stack:
        stack.enter_context(patch.object(Kernel, "__call__", stand_in))
        for name in FAST:
            stack.enter_context(patch.object(mx.fast, name, fast(name)))
        return launched, run()


def primitives_of(outputs: Sequence[mx.array]) -> Counter[str]:
    """The operations of a graph by their names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.dot"
        mx.export_to_dot(str(path), *outputs)
        return Counter(NODE.findall(path.read_text(encoding="utf-8")))


def counted(model: Model, rows: int, tokens: int) -> Count:
    """The third of forwards of `tokens` tokens for each of `rows`, and the choice of the likeliest."""
    caches = [model.new_caches() for _ in range(rows)]
    recorded: Counter[str] = Counter()
    compiled = mx.compile

    def compile_counted(function: Any, **how: Any) -> Any:
        def traced(*args: Any) -> Any:
            # What a recording launches is known when it is made; replaying it calls nothing here.
            nonlocal recorded
            recorded, made = kernels_of(lambda: function(*args))
            return made

        return compiled(traced, **how)

    replay = getattr(model, "_replay", None)
    for step in range(6):
        at = step * tokens
        spans = [Span(row * tokens, tokens, at, caches[row]) for row in range(rows)]
        batch = Batch(mx.zeros((rows * tokens,), mx.int32), spans)
        for of_row in caches:
            for cache in of_row:
                if cache is not None:
                    for array in cache.state():
                        mx.eval(array)

        def run(batch: Batch = batch) -> list[mx.array]:
            mx.compile = compile_counted
            try:
                final = model.forward(batch).final
            finally:
                mx.compile = compiled
            best = argmax(model.logits(final))
            return [best, *(array for of in caches for cache in of if cache is not None for array in cache.state())]

        launched, outputs = kernels_of(run)
    replayed = replay is not None and not replay._refused and any(s.run for s in replay._forms.values())
    return Count(launched + recorded if replayed else launched, primitives_of(outputs), replayed)


def small(config: Mapping[str, Any], layers: int) -> Model:
    """The model with a small table and few experts."""
    values = {**config, "vocab_size": 1024, "num_hidden_layers": layers}
    values |= {name: 16 for name in ("num_local_experts", "n_routed_experts") if name in values}
    if values["model_type"] in ("gpt_oss", "glm4_moe_lite"):
        return load_model(OtherCheckpoint(values), mx.bfloat16)  # type: ignore[return-value]
    if "num_experts" in values:
        values["num_experts"] = 16
    if values["model_type"] == "qwen4_exp":
        values["ngram_vocab_size_base"] = 20_000
        return load_model(flash_next(values), mx.bfloat16)  # type: ignore[return-value]
    return load_model(RandomCheckpoint(values, NVFP4), mx.bfloat16)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="of each row")
    parser.add_argument("--primitives", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    device.cuda = lambda: H200
    device.native = lambda: None
    print("| model | layers | our kernels | MLX's launches | launches a layer | operations | replayed |")
    print("|---|---|---|---|---|---|---|")
    for name in given.names:
        config, period = MODELS[name]
        layers = config["num_hidden_layers"]
        one, two = (counted(small(config, n * period), given.rows, given.tokens) for n in (1, 2))
        whole = [
            first + (second - first) * (layers // period - 1)
            for first, second in (
                (one.ours, two.ours),
                (one.others, two.others),
                (one.operations, two.operations),
            )
        ]
        each = (two.launches - one.launches) / period
        print(
            f"| {name} | {layers} | {whole[0]} | {whole[1]} | {each:.1f} | {whole[2]} | "
            f"{'yes' if two.replayed else 'no'} |",
            flush=True,
        )
        if given.primitives:
            print({k: n - one.kernels[k] for k, n in two.kernels.items()})
            print({k: n - one.primitives[k] for k, n in two.primitives.most_common() if n != one.primitives[k]})


if __name__ == "__main__":
    main()

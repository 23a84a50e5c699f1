"""mlx-lm on the same GPU in the same run, with random weights of the same shapes and formats.

A process of its own, without any of our kernels and settings: `python -m arriero.bench.gpu_mlx_lm SHAPE`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from arriero.bench.gpu_shapes import CONFIGS, packing
from arriero.model.quantization import Quantization

CHUNK = 2048
"""Prompt tokens of one forward, as in mlx-lm's own generation."""
PATIENCE = 240.0
"""Seconds for the whole process: its kernels may have to be compiled."""
LONG = 6.0
"""Seconds of a prompt's reading that are not spent twice."""


@dataclass(frozen=True, slots=True)
class MlxLm:
    """Medians of one row."""

    step: float
    """Seconds from one token to the next."""
    prefill: float
    """Prompt tokens a second."""
    prompt: int
    """Tokens of that prompt: as many as ours has, or fewer where mlx-lm would read them for long."""


def beside(name: str, how: Quantization, *, context: int, prompt: int) -> MlxLm | str:
    """What mlx-lm reaches, or why there is nothing to say."""
    if importlib.util.find_spec("mlx_lm") is None:
        return "mlx-lm is not installed"
    from arriero.kernels.cuda.gpu import COMMAND_GRAPHS

    # What our kernels ask of MLX is not what mlx-lm would run with.
    environ = {key: value for key, value in os.environ.items() if key != COMMAND_GRAPHS}
    asked = {"how": [how.mode, how.bits, how.group_size], "context": context, "prompt": prompt}
    with subprocess.Popen(
        [sys.executable, "-m", __name__, name, json.dumps(asked)],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, complained = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return f"mlx-lm took longer than {PATIENCE:.0f} s"
        finally:
            # Whatever it started ends with it: the next measurement needs the whole GPU.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return f"mlx-lm failed: {(complained.strip().splitlines() or ['no message'])[-1][:200]}"
    return MlxLm(**json.loads(said.strip().splitlines()[-1]))


def _mlx() -> tuple[Any, Any]:
    """`mlx.core` and `mlx.nn`, which only this process of its own loads."""
    return importlib.import_module("mlx.core"), importlib.import_module("mlx.nn")


def random_mlx_lm(config: dict[str, Any], how: Quantization) -> Any:
    """mlx-lm's model of a configuration, packed as ours is."""
    mx, nn = _mlx()
    family = config["model_type"].removesuffix("_text") if "qwen" in config["model_type"] else config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{family}")
    # Of Qwen 3.5 it knows the form with a part for text in it.
    nested = hasattr(module, "TextModelArgs") or family.endswith("_5_moe")
    values = {"model_type": family, "text_config": config} if nested else config
    model = module.Model(module.ModelArgs.from_dict(values))
    model.set_dtype(mx.bfloat16)

    def chosen(path: str, layer: Any) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized"):
            return False
        found = packing(f"{path}.weight", tuple(layer.weight.shape), config, how)
        return False if found is None else {"group_size": found.group_size, "bits": found.bits, "mode": found.mode}

    nn.quantize(model, class_predicate=chosen)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


def measured(model: Any, *, vocab: int, context: int, prompt: int, steps: int = 100) -> MlxLm:
    """As mlx-lm generates: a prompt in chunks, and each step submitted before the one before it is read."""
    mx, _ = _mlx()
    make_prompt_cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache

    def read(count: int) -> tuple[Any, Any, float]:
        cache = make_prompt_cache(model)
        ids = mx.arange(count) % vocab
        mx.eval(ids)
        started = time.perf_counter()
        for at in range(0, count - 1, CHUNK):
            model(ids[None, at : min(at + CHUNK, count - 1)], cache=cache)
            mx.eval([entry.state for entry in cache])
        token = mx.argmax(model(ids[None, -1:], cache=cache)[:, -1], axis=-1)
        mx.eval(token)
        return cache, token, time.perf_counter() - started

    read(context)
    cache, token, taken = read(context)
    if taken * prompt / context > LONG:
        prompt, spent = context, taken
    else:
        read(prompt)
        spent = min(read(prompt)[2] for _ in range(2))
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        following = mx.argmax(model(token[None], cache=cache)[:, -1], axis=-1)
        mx.async_eval(following)
        token.item()
        token = following
        times.append(time.perf_counter() - started)
    return MlxLm(statistics.median(times[steps // 5 :]), prompt / spent, prompt)


def main(arguments: list[str]) -> int:
    """One shape, measured and printed as JSON."""
    name, asked = arguments[0], json.loads(arguments[1])
    config = CONFIGS[name]
    model = random_mlx_lm(config, Quantization(*asked["how"]))
    found = measured(model, vocab=config["vocab_size"], context=asked["context"], prompt=asked["prompt"])
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

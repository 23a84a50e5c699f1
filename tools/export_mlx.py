"""Writes any checkpoint that we open as an MLX folder, codes unchanged, so that mlx-lm reads the same weights.

Development only (the benchmarks compare with mlx-lm).

    python -m tools.export_mlx MODEL.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from arriero.model.checkpoint import Checkpoint
from arriero.source import GGUFSource


def export(model: Path, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`; scales become float16, the type that mlx-lm computes in."""
    checkpoint = Checkpoint.open(GGUFSource((str(model),)))
    arrays: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {}
    for name in checkpoint.names():
        weight = checkpoint.weight(name)
        if weight.quantization is None:
            arrays[name] = weight.data.astype(mx.float16)
            continue
        module = name.removesuffix(".weight")
        kind = weight.quantization
        quantization[module] = {"group_size": kind.group_size, "bits": kind.bits, "mode": kind.mode}
        arrays[name] = weight.data
        for suffix, part in (("scales", weight.scales), ("biases", weight.biases)):
            if part is not None:
                arrays[f"{module}.{suffix}"] = part if part.dtype == mx.uint8 else part.astype(mx.float16)
    default = next(iter(quantization.values()), None)
    config = {**checkpoint.config, "torch_dtype": "float16"}
    if default:
        config["quantization"] = {**default, **quantization}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))

"""A checkpoint with Llama's names and random weights, of any size: written without holding more than one block."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

BLOCK = 1 << 22


def write_synthetic(folder: Path, layers: int, hidden: int, tensor_rows: int) -> int:
    """`config.json` and one safetensors file: two bfloat16 matrices `[tensor_rows, hidden]` a layer; its bytes.

    One block of normal numbers is written again and again, since what matters is their amount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model.layers.{i}.mlp.{name}.weight" for i in range(layers) for name in ("gate_proj", "up_proj")]
    each = 2 * tensor_rows * hidden
    header = {
        name: {"dtype": "BF16", "shape": [tensor_rows, hidden], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(0).normal(0, 0.02, BLOCK // 2).astype(np.float32)
    block = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    total = each * len(names)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for at in range(0, total, len(block)):
            file.write(block[: min(len(block), total - at)])
    return total

"""What the makers of draft goldens share: golden targets as the reference opens them, and how a draft is written."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

TARGETS = Path(__file__).parent.parent / "tests" / "model" / "goldens"
Tensors = dict[str, torch.Tensor]


def open_target(name: str) -> Any:
    """A golden model in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGETS / name, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    return model.eval()


def golden_ids(name: str) -> torch.Tensor:
    """Its tokens `[1, T]`."""
    with np.load(TARGETS / name / "golden.npz") as file:
        return torch.tensor(file["ids"].astype(np.int64))[None]


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode()) % 1000


def save(folder: Path, config: dict[str, Any], tensors: Tensors, golden: dict[str, Any]) -> None:
    """Tensors are stored in bfloat16, which `randomise` has rounded them to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    stored = {
        name: value.detach().clone().contiguous().to(value.dtype if value.dtype == torch.int64 else torch.bfloat16)
        for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez(folder / "golden.npz", **golden)

"""A trained draft as a folder that can be loaded: config.json and model.safetensors, in 16 bit."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.train_dflash2_network import Draft


def write(draft: Draft, folder: Path) -> int:
    """Write it, and return the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in draft.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(draft.shape.config(), indent=1) + "\n", "utf-8")
    return sum(value.nbytes for value in tensors.values())

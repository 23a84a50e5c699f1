"""A trained draft as a folder that the engine and the trainer load: config.json and model.safetensors, in 16 bit."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def read(draft: Draft, folder: Path) -> None:
    """Take over the weights of a stored one; ValueError when it has other sizes or was made for another model."""
    stored, own = json.loads((folder / "config.json").read_text("utf-8")), draft.shape.config()
    wrong = [f"{name} is {stored.get(name)}, not {value}" for name, value in own.items() if stored.get(name) != value]
    if wrong:
        raise ValueError(f"the draft in {folder} can't be trained on: {'; '.join(wrong)}")
    draft.load_state_dict(load_file(folder / "model.safetensors"))

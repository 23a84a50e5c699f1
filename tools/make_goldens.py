"""Make the tiny checkpoints and golden logits of `tests/model/goldens` with the reference implementation.

    python tools/make_goldens.py [FOLDER] [NAME ...]

Needs torch, transformers and safetensors. Every parameter is re-drawn, because the library's own initial values hide
bugs (gains of one, biases of zero), and rounded to bfloat16, so that files are small and exact in float32.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import golden_hybrids
from tools.golden_models import FIRST, MODELS, SEEDS, SHAPE

TOKENS = 40


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter: gains around their neutral value, matrices so that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                value = 2 * torch.rand(parameter.shape, generator=generator)
            elif parameter.dim() == 1:
                neutral = 0.0 if name.endswith("bias") or not parameter.any() else 1.0
                value = neutral + 0.3 * noise
            elif "embed_tokens" in name:
                value = noise
            else:
                value = 1.5 * parameter.shape[-1] ** -0.5 * noise
            parameter.copy_(value.to(torch.bfloat16))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_((0.5 + torch.rand(buffer.shape, generator=generator)).to(torch.bfloat16))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape, generator=generator)).to(torch.bfloat16))


def make(name: str, folder: Path) -> None:
    """Write `config.json`, `model.safetensors` and `golden.npz` (ids `[T]`, float32 logits `[T, vocab]`)."""
    config_class, model_class, fields = MODELS[name]
    config = getattr(transformers, config_class)(**{**SHAPE, **fields})
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).eval()
    seed = SEEDS.get(name, FIRST.index(name) if name in FIRST else zlib.crc32(name.encode()) % 1000)
    randomise(model, seed)
    ids = torch.randint(3, config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(100 + seed))
    with torch.no_grad():
        logits = model(ids).logits[0]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "golden.npz", ids=ids[0].numpy().astype(np.int32), logits=logits.numpy().astype(np.float32))
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name.endswith("mxfp4"):
        golden_hybrids.pack_experts(folder)
        logits = golden_hybrids.logits_of(folder, ids)
        np.savez(folder / "golden.npz", ids=ids[0].numpy().astype(np.int32), logits=logits)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True) + "\n")


def main(arguments: list[str]) -> None:
    root = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "tests" / "model" / "goldens"
    names = arguments[1:] or list(MODELS)
    for name in names:
        make(name, root / name)
        size = sum(file.stat().st_size for file in (root / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

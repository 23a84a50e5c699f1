"""Make the tiny checkpoints with towers for images, and their golden logits, in `tests/model/vision/goldens`.

    python tools/make_vision_goldens.py [FOLDER] [NAME ...]

Needs torch, transformers and safetensors. As `make_goldens.py`; a name is its own seed.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.make_goldens import QWEN35, QWEN35_MOE, SHAPE, randomise

IMAGE = 120
"""The placeholder's id in every tiny model."""

QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
}
GRIDS: dict[str, list[tuple[int, int]]] = {"one": [(6, 10)], "two": [(4, 8), (10, 2)]}
"""Patches down and across of the images of each prompt."""


def qwen(class_name: str, text: dict[str, Any]) -> Any:
    config = getattr(transformers, class_name)(
        text_config={**SHAPE, **text},
        vision_config={**QWEN_VISION, "out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    config.text_config._attn_implementation = config.vision_config._attn_implementation = "eager"
    return config


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", QWEN35),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", QWEN35_MOE),
}


def prompts(seed: int, sizes: dict[str, list[int]]) -> dict[str, tuple[list[int], list[int]]]:
    """Ids with placeholders, and the offsets of the images: first, between texts, last but one token, and two."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, IMAGE, (count,), generator=generator).tolist()

    (one,), (first, second) = sizes["one"], sizes["two"]
    image, images = [IMAGE] * one, ([IMAGE] * first, [IMAGE] * second)
    before = images[0] + text(3) + images[1] + text(9)
    return {
        "first": (image + text(11), [0]),
        "between": (text(7) + image + text(8), [7]),
        "last": (text(9) + image + text(1), [9]),
        "two": (text(4) + before, [4, 4 + first + 3]),
    }


def make_qwen(name: str, folder: Path) -> None:
    """`golden.npz` holds, for each prompt p: `p.ids`, `p.offsets`, `p.grids`, `p.logits`; and `pixels.n` of image n.

    Pixels are 8-bit, `[patches, channels · patch · patch]`; the model sees `(v / 255 − 0.5) / 0.5`, each frame twice.
    """
    config_class, model_class, text = MODELS[name]
    config = qwen(config_class, text)
    model = getattr(transformers, model_class)(config).eval()
    seed = zlib.crc32(f"vision {name}".encode()) % 1000
    randomise(model, seed)
    p, merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size
    sizes = {kind: [r * c // merge**2 for r, c in grids] for kind, grids in GRIDS.items()}
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for kind, (ids, offsets) in prompts(seed, sizes).items():
        grids = GRIDS["two" if kind == "two" else "one"]
        pixels = [rng.integers(0, 256, (r * c, 3, p * p), dtype=np.uint8) for r, c in grids]
        frames = [np.repeat(((v.astype(np.float32) / 255 - 0.5) / 0.5)[:, :, None], 2, axis=2) for v in pixels]
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logits = model(
                input_ids=tokens,
                mm_token_type_ids=(tokens == IMAGE).int(),
                pixel_values=torch.tensor(np.concatenate([f.reshape(len(f), -1) for f in frames])),
                image_grid_thw=torch.tensor([[1, r, c] for r, c in grids]),
            ).logits[0]
            more = torch.tensor([[5, 9, 17]])
            cached = model(
                input_ids=torch.cat([tokens, more], dim=1),
                mm_token_type_ids=(torch.cat([tokens, more], dim=1) == IMAGE).int(),
                pixel_values=torch.tensor(np.concatenate([f.reshape(len(f), -1) for f in frames])),
                image_grid_thw=torch.tensor([[1, r, c] for r, c in grids]),
            ).logits[0]
        arrays |= {
            f"{kind}.ids": np.array(ids, np.int32),
            f"{kind}.offsets": np.array(offsets, np.int32),
            f"{kind}.grids": np.array(grids, np.int32),
            f"{kind}.logits": logits.numpy().astype(np.float32),
            f"{kind}.after": cached[len(ids) :].numpy().astype(np.float32),
        }
        arrays |= {f"{kind}.pixels.{n}": v.reshape(len(v), -1) for n, v in enumerate(pixels)}
    save(model, folder, arrays)


def save(model: Any, folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write `config.json`, `model.safetensors` (bfloat16) and `golden.npz`."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "golden.npz", **arrays)  # type: ignore[arg-type]
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True) + "\n")


def main(arguments: list[str]) -> None:
    default = Path(__file__).parents[1] / "tests" / "model" / "vision" / "goldens"
    root = Path(arguments[0]) if arguments else default
    for name in arguments[1:] or list(MODELS):
        make_qwen(name, root / name)
        size = sum(file.stat().st_size for file in (root / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

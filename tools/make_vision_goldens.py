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

from tools.golden_models import GEMMA, GEMMA4, QWEN4, QWEN35, QWEN35_MOE, SHAPE
from tools.golden_windowed import FULL, SLIDING
from tools.make_goldens import randomise

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
GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
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


def gemma4(class_name: str, fields: dict[str, Any]) -> Any:
    text, vision = {**SHAPE, **GEMMA4, **fields["text"]}, {**GEMMA4_VISION, **fields["vision"]}
    if "Unified" in class_name:
        text = {name: value for name, value in text.items() if "per_layer_input" not in name}
        vision = {"patch_size": 4} | fields["vision"]
    config = getattr(transformers, class_name)(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=121,
        boi_token_id=122,
        eoi_token_id=123,
        audio_token_id=124,
        boa_token_id=125,
        eoa_token_id=126,
    )
    config.text_config._attn_implementation = config.vision_config._attn_implementation = "eager"
    return config


def gemma3(class_name: str, fields: dict[str, Any]) -> Any:
    config = getattr(transformers, class_name)(
        text_config={**SHAPE, **GEMMA, **fields},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 24,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=122,
        eoi_token_index=123,
    )
    config.text_config._attn_implementation = config.vision_config._attn_implementation = "eager"
    return config


# name: (configuration class, model class, fields)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", QWEN35),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", QWEN35_MOE),
    "qwen4_exp": ("Qwen4ExpConfig", "Qwen4ExpForConditionalGeneration", QWEN4),
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "query_pre_attn_scalar": 64},
    ),
    "gemma4_e2b": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text": {
                "num_hidden_layers": 5,
                "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
                "num_kv_shared_layers": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 32,
                "hidden_size_per_layer_input": 16,
            },
            "vision": {"use_clipped_linears": True},
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        "Gemma4UnifiedForConditionalGeneration",
        {
            # Wider than an image has tokens: what a narrower one hides, this model's reference shows.
            "text": {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 20},
            "vision": {"pooling_kernel_size": 1, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        },
    ),
    "gemma4_31b": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {
            "text": {
                "layer_types": [SLIDING, SLIDING, FULL],
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "use_bidirectional_attention": "vision",
            },
            "vision": {"standardize": True, "num_key_value_heads": 1},
        },
    ),
}
CONFIGS = {"qwen": qwen, "gemma3": gemma3, "gemma4": gemma4}


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


def qwen_inputs(pixels: list[np.ndarray], grids: list[tuple[int, int]], side: int) -> dict[str, torch.Tensor]:
    """Pixels `[patches, 3, side²]` as the model takes them: `(v / 255 − 0.5) / 0.5`, each frame twice."""
    frames = [np.repeat(((v.astype(np.float32) / 255 - 0.5) / 0.5)[:, :, None], 2, axis=2) for v in pixels]
    return {
        "pixel_values": torch.tensor(np.concatenate([f.reshape(len(f), -1) for f in frames])),
        "image_grid_thw": torch.tensor([[1, r, c] for r, c in grids]),
    }


def gemma4_inputs(pixels: list[np.ndarray], grids: list[tuple[int, int]], side: int) -> dict[str, torch.Tensor]:
    """Pixels `[patches, side², 3]` as the model takes them: `v / 255`, filled up to one number of patches."""
    most = max(len(v) for v in pixels)
    values = np.zeros((len(pixels), most, 3 * side**2), np.float32)
    places = np.full((len(pixels), most, 2), -1)
    for index, (v, (rows, columns)) in enumerate(zip(pixels, grids, strict=True)):
        values[index, : len(v)] = v.reshape(len(v), -1).astype(np.float32) / 255
        places[index, : len(v)] = [(x, y) for y in range(rows) for x in range(columns)]
    return {"pixel_values": torch.tensor(values), "image_position_ids": torch.tensor(places)}


def gemma3_inputs(pixels: list[np.ndarray], grids: list[tuple[int, int]], side: int) -> dict[str, torch.Tensor]:
    """Pixels `[patches, 3, side²]` as whole pictures, `(v / 255 − 0.5) / 0.5`."""
    pictures = [
        ((v.astype(np.float32) / 255 - 0.5) / 0.5)
        .reshape(rows, columns, 3, side, side)
        .transpose(2, 0, 3, 1, 4)
        .reshape(3, rows * side, columns * side)
        for v, (rows, columns) in zip(pixels, grids, strict=True)
    ]
    return {"pixel_values": torch.tensor(np.stack(pictures))}


INPUTS = {"qwen": qwen_inputs, "gemma3": gemma3_inputs, "gemma4": gemma4_inputs}


TYPES = {"gemma3": "token_type_ids"}


def soften(model: torch.nn.Module) -> None:
    """Make attention less sharp where its scale is 1: else the reference's own rounding is above the tolerance."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(0.25)


def set_bounds(model: torch.nn.Module, seed: int) -> None:
    """Give the buffers of a tower values that matter: bounds within what is clipped, a mean and a deviation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                value = (1 + noise) * (-1 if name.endswith("_min") else 1)
            elif name.endswith(("std_bias", "std_scale")):
                value = 0.5 + noise
            else:
                continue
            buffer.copy_(value.to(torch.bfloat16))


def make(name: str, folder: Path) -> None:
    """`golden.npz` holds, for each prompt p: `p.ids`, `p.offsets`, `p.grids`, `p.logits`; `p.pixels.n` of image n (8
    bits, `[patches, values]`); and `p.after`, the logits of three more tokens.
    """
    config_class, model_class, fields = MODELS[name]
    family = name.partition("_")[0] if name.startswith("gemma") else "qwen"
    config = CONFIGS[family](config_class, fields)
    model = getattr(transformers, model_class)(config).eval()
    seed = zlib.crc32(f"vision {name}".encode()) % 1000
    randomise(model, seed)
    set_bounds(model, seed)
    if family == "gemma4":
        soften(model)
    p = config.vision_config.patch_size
    every = {"one": [(6, 6)], "two": [(6, 6), (6, 6)]} if family == "gemma3" else GRIDS
    every = {"one": [(3, 5)], "two": [(2, 4), (5, 1)]} if name == "gemma4_unified" else every
    # In all tiny models but the unified one squares of 2 × 2 patches become a token.
    sizes = {kind: [r * c // (1 if name == "gemma4_unified" else 4) for r, c in g] for kind, g in every.items()}
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for kind, (ids, offsets) in prompts(seed, sizes).items():
        grids = every["two" if kind == "two" else "one"]
        shape = (p * p, 3) if family == "gemma4" else (3, p * p)
        pixels = [rng.integers(0, 256, (r * c, *shape), dtype=np.uint8) for r, c in grids]
        inputs = INPUTS[family](pixels, grids, p)

        def run(tokens: list[int], inputs: dict[str, torch.Tensor] = inputs) -> np.ndarray:
            given = torch.tensor([tokens])
            types = {TYPES.get(family, "mm_token_type_ids"): (given == IMAGE).int()}
            with torch.no_grad():
                found = model(input_ids=given, **types, **inputs).logits[0]
            return np.asarray(found.numpy(), np.float32)

        arrays |= {
            f"{kind}.ids": np.array(ids, np.int32),
            f"{kind}.offsets": np.array(offsets, np.int32),
            f"{kind}.grids": np.array(grids, np.int32),
            f"{kind}.logits": run(ids),
            f"{kind}.after": run([*ids, 5, 9, 17])[len(ids) :],
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
        make(name, root / name)
        size = sum(file.stat().st_size for file in (root / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

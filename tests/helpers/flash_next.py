"""A tiny Qwen3.8 Flash Next in the layouts that are published, each with the dense weights that it means.

Everything is made from a golden model, in NumPy, so that what the loader decodes is compared with something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from arriero.formats.codes import E2M1, E4M3
from arriero.formats.safetensors import write
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource

GOLDEN = Path(__file__).parents[1] / "model" / "goldens" / "qwen4_exp"
ROOT = "model.language_model."
TABLE = f"{ROOT}layers.1.ple.ple_embedding.ngram_embedding"
Tensors = dict[str, np.ndarray]


def golden_ids() -> list[int]:
    with np.load(GOLDEN / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


def golden_tensors() -> Tensors:
    """The golden model's tensors: float32, and int64 for the hash."""
    found: Tensors = {}
    for name, value in dict(mx.load(str(GOLDEN / "model.safetensors"))).items():
        found[name] = np.array(value if value.dtype == mx.int64 else value.astype(mx.float32))
    return found


def published(tensors: Tensors) -> Tensors:
    """Names of the multimodal model: `lm_head` outside, everything else under its root."""
    return {n if n.startswith("lm_head") else ROOT + n.removeprefix("model."): v for n, v in tensors.items()}


def with_other_parts(tensors: Tensors) -> Tensors:
    """A head for drafts and a vision tower beside the text, as published files have them."""
    extra = {"mtp.fc_hidden.weight": (4, 4), "mtp.layers.0.mlp.gate.weight": (4, 32), "model.visual.pos_embed": (2, 4)}
    return tensors | {name: np.zeros(shape, np.float32) for name, shape in extra.items()}


def packed_experts(tensors: Tensors) -> Tensors:
    """Experts of a layer in two tensors, gate's rows before up's."""
    found = {n: v for n, v in tensors.items() if ".experts." not in n}
    prefixes = {n.partition(".experts.")[0] for n in tensors if ".experts." in n}
    for prefix in prefixes:
        count = sum(n.startswith(f"{prefix}.experts.") and n.endswith(".up_proj.weight") for n in tensors)
        banks = {
            part: np.stack([tensors[f"{prefix}.experts.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        }
        found[f"{prefix}.experts.gate_up_proj"] = np.concatenate([banks["gate"], banks["up"]], axis=1)
        found[f"{prefix}.experts.down_proj"] = banks["down"]
    return found


def config(**changes: Any) -> dict[str, Any]:
    """The published form of the golden model's configuration; None removes a field of the text model."""
    text = json.loads((GOLDEN / "config.json").read_text())
    text.pop("architectures")
    text["layer_types"] = ["linear_attention", "linear_attention", "full_attention"]
    text = {k: v for k, v in {**text, **changes}.items() if v is not None}
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": text,
        "tie_word_embeddings": False,
    }


def folder(path: Path, tensors: Tensors, settings: dict[str, Any] | None = None) -> Checkpoint:
    """Write a folder of one file, float32 as it is, and open it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config() if settings is None else settings))
    write(path / "model.safetensors", tensors)
    return Checkpoint.open(FolderSource(str(path)))


def e4m3(values: np.ndarray) -> np.ndarray:
    """Codes, typed as the file types them."""
    return np.asarray(values, np.float32).astype(ml_dtypes.float8_e4m3fn)


def nvfp4(values: np.ndarray, multiplier: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed bytes `[n, k / 2]`, E4M3 scales `[n, k / 16]`, and the values float32 that they mean."""
    groups = values.reshape(values.shape[0], -1, 16)
    scales = e4m3(np.abs(groups).max(-1) / (6 * multiplier))
    steps = E4M3[scales.view(np.uint8)][..., None] * np.float32(multiplier)
    scaled = groups / np.where(steps == 0, 1, steps)
    codes = np.abs(scaled[..., None] - E2M1).argmin(-1).astype(np.uint8)
    meant = (E2M1[codes] * E4M3[scales.view(np.uint8)][..., None] * np.float32(multiplier)).reshape(values.shape)
    codes = codes.reshape(values.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, meant.astype(np.float32)


def nvfp4_experts(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """ModelOpt's layout: each matrix of each expert with a global scale of its own. Stored, and meant."""
    stored, meant = dict(tensors), dict(tensors)
    for i, name in enumerate(n for n in tensors if ".mlp.experts." in n):
        module = name.removesuffix(".weight")
        multiplier = float(np.float32(np.abs(tensors[name]).max() / 2688 * 2.0 ** (i % 5)))
        stored[name], stored[f"{module}.weight_scale"], meant[name] = nvfp4(tensors[name], multiplier)
        stored[f"{module}.weight_scale_2"] = np.float32(multiplier).reshape(())
        stored[f"{module}.input_scale"] = np.float32(1e-3).reshape(())
    return stored, meant


def fp8_experts(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Block FP8: E4M3 codes with bfloat16 scales."""
    stored, meant = dict(tensors), dict(tensors)
    for name in [n for n in tensors if ".mlp.experts." in n]:
        scale = np.asarray(np.abs(tensors[name]).max() / 448, ml_dtypes.bfloat16).reshape(1, 1)
        codes = e4m3(tensors[name] / scale.astype(np.float32))
        stored[name], stored[f"{name}_scale_inv"] = codes, scale
        meant[name] = codes.astype(np.float32) * scale.astype(np.float32)
    return stored, meant


def each_shard(
    change: Callable[[int, np.ndarray], tuple[Tensors, np.ndarray]],
) -> Callable[..., tuple[Tensors, Tensors]]:
    """What stores the table's shards: `change` gives a shard's tensors by suffix, and what they mean."""

    def table(stored: Tensors, meant: Tensors) -> tuple[Tensors, Tensors]:
        stored, meant = dict(stored), dict(meant)
        for i in range(4):
            name = f"{TABLE}.shard_{i}.weight"
            tensors, meant[name] = change(i, stored.pop(name))
            stored |= {f"{TABLE}.shard_{i}.{suffix}": value for suffix, value in tensors.items()}
        return stored, meant

    return table


def fp8_table(stored: Tensors, meant: Tensors) -> tuple[Tensors, Tensors]:
    """E4M3 shards and one bfloat16 factor for all of them."""
    scale = np.asarray([0.03125], ml_dtypes.bfloat16)

    def change(_: int, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        codes = e4m3(values / 0.03125)
        return {"weight": codes}, codes.astype(np.float32) * np.float32(0.03125)

    stored, meant = each_shard(change)(stored, meant)
    return stored | {f"{TABLE}.weight_scale": scale}, meant


def nvfp4_table(stored: Tensors, meant: Tensors) -> tuple[Tensors, Tensors]:
    """NVFP4 shards, each with a global scale of its own."""

    def change(i: int, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        multiplier = float(np.float32(np.abs(values).max() / 2688 * 3.0**i))
        packed, scales, decoded = nvfp4(values, multiplier)
        scale = np.float32(multiplier).reshape(())
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": scale}, decoded

    return each_shard(change)(stored, meant)


def nvfp4_table_of_one_scale(stored: Tensors, meant: Tensors) -> tuple[Tensors, Tensors]:
    """NVFP4 shards with one global scale for the table."""

    def change(_: int, values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        packed, scales, decoded = nvfp4(values, 0.001)
        return {"weight": packed, "weight_scale": scales}, decoded

    stored, meant = each_shard(change)(stored, meant)
    return stored | {f"{TABLE}.weight_scale_2": np.float32(0.001).reshape(())}, meant


def bf16_table(stored: Tensors, meant: Tensors) -> tuple[Tensors, Tensors]:
    """Sixteen-bit shards, which the golden values fit."""
    return each_shard(lambda _, values: ({"weight": values.astype(ml_dtypes.bfloat16)}, values))(stored, meant)


TABLES = {
    "bf16": bf16_table,
    "float32": lambda stored, meant: (dict(stored), dict(meant)),
    "fp8": fp8_table,
    "nvfp4 per shard": nvfp4_table,
    "nvfp4 of one scale": nvfp4_table_of_one_scale,
}
"""How the table of n-grams is stored, by name: from stored and meant tensors to the same."""

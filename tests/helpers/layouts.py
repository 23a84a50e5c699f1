"""The layouts in which Flash Next and its relatives are published, written from golden models.

A layout is what a folder holds (configuration, tensors by name, other JSON files) and the plain weights that it means.
Nothing of the loader is used to make them. The logits of those weights by the reference implementation are in
`tests/model/goldens/layouts.npz`, which `tools/make_layouts.py` makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from arriero.formats.safetensors import write
from tests.helpers import flash_next as fn
from tests.helpers.flash_next import Tensors

GOLDENS = Path(__file__).parents[1] / "model" / "goldens"
REFERENCE = GOLDENS / "layouts.npz"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "mtp*"]}


@dataclass
class Layout:
    """One published folder. `meant` is None where the stored numbers are those of the golden model."""

    golden: str
    config: dict[str, Any]
    stored: Tensors
    meant: Tensors | None = None
    files: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The folder: neighbours in the order of names are in different files, as an index allows."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, value in self.files.items():
            (folder / name).write_text(json.dumps(value))
        index: dict[str, str] = {}
        for part in (0, 1):
            names = sorted(self.stored)[part::2]
            file = f"model-0000{part + 1}-of-00002.safetensors"
            write(folder / file, {name: self.stored[name] for name in names}, {"format": "pt"})
            index |= dict.fromkeys(names, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder

    def plain(self) -> Tensors:
        """The meant weights by the golden model's own names."""
        assert self.meant is not None
        return {name.replace(fn.ROOT, "model.", 1): value for name, value in self.meant.items()}


def golden_config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDENS / name / "config.json").read_text())
    return found


def golden_tensors(name: str) -> Tensors:
    """Float32, and int64 where it is stored."""
    loaded = dict(mx.load(str(GOLDENS / name / "model.safetensors")))
    return {n: np.array(v if v.dtype == mx.int64 else v.astype(mx.float32)) for n, v in loaded.items()}


def bf16(tensors: Tensors) -> Tensors:
    """Floats in sixteen bits, which golden values fit; factors and codes as they are."""
    return {
        name: value.astype(ml_dtypes.bfloat16) if value.dtype == np.float32 and value.ndim else value
        for name, value in tensors.items()
    }


def flash_next_bf16() -> Layout:
    tensors = fn.packed_experts(fn.published(fn.golden_tensors()))
    return Layout("qwen4_exp", fn.config(), bf16(tensors))


def _shared_scales(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Experts as ModelOpt writes them: gate and up of one expert share a factor, experts differ."""
    stored, meant = dict(tensors), dict(tensors)
    for name in [n for n in tensors if ".mlp.experts." in n]:
        module = name.removesuffix(".weight")
        mates = [name, name.replace(".gate_proj", ".up_proj"), name.replace(".up_proj", ".gate_proj")]
        factor = np.float32(max(np.abs(tensors[mate]).max() for mate in mates) / 2688)
        stored[name], stored[f"{module}.weight_scale"], meant[name] = fn.nvfp4(tensors[name], float(factor))
        stored[f"{module}.weight_scale_2"] = factor.reshape(())
        stored[f"{module}.input_scale"] = np.float32(1e-3).reshape(())
    return stored, meant


def flash_next_radixark() -> Layout:
    """One entry for each expert, FP8 table with one factor."""
    stored, meant = fn.fp8_table(*_shared_scales(fn.published(fn.golden_tensors())))
    config = fn.config(ple_embedding_dtype="float8_e4m3fn") | {"quantization_config": MODELOPT}
    return Layout("qwen4_exp", config, bf16(stored), meant)


def flash_next_nvidia() -> Layout:
    """Mixed precision by module, and the head for drafts in block FP8; facts also in a file of their own."""
    layout = flash_next_radixark()
    config = fn.config()
    modules = {f"{fn.ROOT}layers.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(3)} | {
        fn.TABLE: {"quant_algo": "FP8"},
        "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES"},
    }
    facts = {"quant_algo": "MIXED_PRECISION", "quantized_layers": modules}
    config["quantization_config"] = {"quant_method": "modelopt", **facts, "ignore": ["*.self_attn*", "model.visual*"]}
    head = {
        "mtp.layers.0.mlp.experts.0.up_proj.weight": fn.e4m3(np.ones((32, 32), np.float32)),
        "mtp.layers.0.mlp.experts.0.up_proj.weight_scale_inv": np.ones((1, 1), ml_dtypes.bfloat16),
    }
    return Layout(
        "qwen4_exp", config, layout.stored | head, layout.meant, {"hf_quant_config.json": {"quantization": facts}}
    )


def flash_next_nvfp4_table() -> Layout:
    """The table in NVFP4 too, with a factor for each shard."""
    stored, meant = fn.nvfp4_table(*_shared_scales(fn.published(fn.golden_tensors())))
    return Layout("qwen4_exp", fn.config() | {"quantization_config": MODELOPT}, bf16(stored), meant)


def flash_next_mxfp8_attention() -> Layout:
    """The table in NVFP4 with one factor, attention in MXFP8 (scales are exponents)."""
    stored, meant = fn.nvfp4_table_of_one_scale(*_shared_scales(fn.published(fn.golden_tensors())))
    for name in [n for n in stored if ".self_attn." in n and n.endswith("_proj.weight")]:
        stored[name], stored[f"{name}_scale"], meant[name] = mxfp8(stored[name])
    return Layout("qwen4_exp", fn.config() | {"quantization_config": MODELOPT}, bf16(stored), meant)


def flash_next_compressed() -> Layout:
    """compressed-tensors: `weight_packed`, and one over the factor."""
    tensors = fn.published(fn.golden_tensors())
    stored, meant = dict(tensors), dict(tensors)
    for i, name in enumerate(n for n in tensors if ".mlp.experts." in n):
        factor = 2.0 ** -(9 + i % 3)
        codes, scales, meant[name] = fn.nvfp4(tensors[name], factor)
        del stored[name]
        stored |= {f"{name}_packed": codes, f"{name}_scale": scales}
        stored[f"{name}_global_scale"] = np.array([1 / factor], np.float32)
        stored[f"{name.removesuffix('.weight')}.input_global_scale"] = np.array([100.0], np.float32)
    method = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    kept = {n: v for n, v in stored.items() if n.endswith("global_scale")}
    return Layout("qwen4_exp", fn.config() | {"quantization_config": method}, bf16(stored) | kept, meant)


def block_fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, bfloat16 scales by block of 128 × 128 (the last ones smaller), and the float32 values that they mean."""
    rows, columns = values.shape
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), ml_dtypes.bfloat16)
    codes, meant = np.zeros(values.shape, ml_dtypes.float8_e4m3fn), np.zeros(values.shape, np.float32)
    for i, j in np.ndindex(scales.shape):
        block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        scales[i, j] = np.abs(values[block]).max() / 448
        codes[block] = fn.e4m3(values[block] / np.float32(scales[i, j]))
        meant[block] = codes[block].astype(np.float32) * np.float32(scales[i, j])
    return codes, scales, meant


def mxfp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, exponents uint8 by group of 32, and the values that they mean."""
    groups = values.reshape(values.shape[0], -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 448)).astype(np.int32)
    steps = np.exp2(exponents.astype(np.float32))[..., None]
    codes = fn.e4m3(groups / steps)
    meant = (codes.astype(np.float32) * steps).reshape(values.shape)
    return codes.reshape(values.shape), (exponents + 127).astype(np.uint8), meant


def _flash_next_fp8(more: Callable[[str], bool]) -> Layout:
    tensors = fn.published(fn.golden_tensors())
    stored, meant = fn.fp8_table(dict(tensors), dict(tensors))
    for name in [n for n in tensors if ".mlp.experts." in n or more(n)]:
        stored[name], stored[f"{name}_scale_inv"], meant[name] = block_fp8(tensors[name])
    facts = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return Layout("qwen4_exp", fn.config() | {"quantization_config": facts}, bf16(stored), meant)


def flash_next_fp8() -> Layout:
    """Routed experts in block FP8, the table in FP8 with one factor."""
    return _flash_next_fp8(lambda name: False)


def flash_next_fp8_everywhere() -> Layout:
    """Dense projections as well, some of more than one block."""
    kept = (".in_proj_a", ".in_proj_b", "index_qk_proj", ".ple.")
    return _flash_next_fp8(lambda name: name.endswith("proj.weight") and not any(part in name for part in kept))


def qwen3_5() -> Layout:
    """The text model in a wrapper, the head outside."""
    text = golden_config("qwen3_5")
    text.pop("architectures")
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    return Layout("qwen3_5", config, bf16(fn.published(golden_tensors("qwen3_5"))))


def qwen3_5_moe() -> Layout:
    """As above, experts of a layer in two tensors."""
    text = golden_config("qwen3_5_moe")
    text.pop("architectures")
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    return Layout("qwen3_5_moe", config, bf16(fn.packed_experts(fn.published(golden_tensors("qwen3_5_moe")))))


def qwen3_5_moe_by_mlx() -> Layout:
    """MLX's dialect: gains with their 1, kernels turned, experts stacked by projection, other prefixes."""
    stored: Tensors = {}
    for name, value in fn.packed_experts(golden_tensors("qwen3_5_moe")).items():
        if "conv1d" in name:
            value = value.swapaxes(1, 2)
        elif name.endswith("norm.weight") and ".linear_attn." not in name:
            value = value + 1
        if name.endswith("experts.gate_up_proj"):
            prefix = "language_model." + name.removesuffix("experts.gate_up_proj") + "switch_mlp."
            gate, up = np.split(value, 2, axis=1)
            stored |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            stored["language_model." + name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = value
    config = qwen3_5_moe().config
    # A gain with its 1 does not fit sixteen bits.
    narrow = bf16({name: np.ascontiguousarray(value) for name, value in stored.items()})
    lossless = {n: np.array_equal(v.astype(np.float32), stored[n]) for n, v in narrow.items()}
    return Layout("qwen3_5_moe", config, {n: v if lossless[n] else stored[n] for n, v in narrow.items()})


def gemma4(name: str) -> Layout:
    """The text model in a wrapper; the head is that of the embeddings; full layers by fields of their own."""
    text = golden_config(name)
    full = text.pop("per_layer_config")[str(text["layer_types"].index("full_attention"))]
    text["global_head_dim"] = full["head_dim"]
    if "num_key_value_heads" in full:
        text["num_global_key_value_heads"] = full["num_key_value_heads"]
    text.pop("architectures")
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    return Layout(name, config, bf16(fn.published(golden_tensors(name))))


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "flash next, bf16": flash_next_bf16,
    "flash next, nvfp4 by radixark": flash_next_radixark,
    "flash next, nvfp4 by nvidia": flash_next_nvidia,
    "flash next, nvfp4 with its table": flash_next_nvfp4_table,
    "flash next, nvfp4 and mxfp8": flash_next_mxfp8_attention,
    "flash next, nvfp4 by compressed-tensors": flash_next_compressed,
    "flash next, fp8": flash_next_fp8,
    "flash next, fp8 everywhere": flash_next_fp8_everywhere,
    "qwen 3.5": qwen3_5,
    "qwen 3.5 moe": qwen3_5_moe,
    "qwen 3.5 moe by mlx": qwen3_5_moe_by_mlx,
    "gemma 4 e2b": lambda: gemma4("gemma4_e2b"),
    "gemma 4 31b": lambda: gemma4("gemma4_31b"),
    "gemma 4 26b a4b": lambda: gemma4("gemma4_26b_a4b"),
}


def reference(name: str, layout: Layout) -> tuple[list[int], np.ndarray]:
    """Ids, and the logits float32 that the reference implementation gives them."""
    with np.load(GOLDENS / layout.golden / "golden.npz") as golden:
        ids, logits = golden["ids"].tolist(), golden["logits"]
    if layout.meant is not None:
        with np.load(REFERENCE) as file:
            logits = file[name]
    return ids, logits

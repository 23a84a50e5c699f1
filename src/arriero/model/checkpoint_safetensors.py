"""Opening safetensors models: Hugging Face and MLX folders, and stored tensor layers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.blockfp8 import scale_fits
from arriero.formats.mapped import REPAIR
from arriero.formats.safetensors import SafetensorsFile
from arriero.formats.safetensors_folder import open_folder
from arriero.model.companions import Bundle, Part, bundle
from arriero.model.fp8 import decode_fp8
from arriero.model.lazy_files import LazyFiles
from arriero.model.packing import affine_layout, blob_layout, configured, float_layout, labelled
from arriero.model.stored import HostWeight, Stored, TensorInfo
from arriero.model.weight import Quantization, Weight
from arriero.source import FolderSource, LayersSource

Parts = tuple[str, dict[str, Stored], dict[str, Any], dict[str, Any], Literal["hf", "mlx", "gguf"]]

NVFP4_LARGEST = np.float32(2688)
"""6 (largest E2M1) · 448 (largest E4M3): MLX states a global scale as the largest value of the tensor."""


def read_folder(source: FolderSource) -> Parts:
    """Label, tensors, configuration, generation configuration and dialect; raises CheckpointError."""
    folder = Path(source.path)
    files = open_folder(folder)
    config = _json(folder / "config.json")
    generation = folder / "generation_config.json"
    hints = configured(config)

    def layout(found: Bundle, words: int, groups: int) -> Quantization:
        module = found.name.removesuffix(".weight")
        declared = [hints[path] for path in (module, "") if path in hints]
        return affine_layout(_where(found), words, groups, declared)

    bundles = bundle(files)
    converted = any(file.metadata.get("format") == "mlx" for file in files.values())
    mlx = converted or "quantization" in config or any(_spelled_by_mlx(found) for found in bundles)
    stored = _store(bundles, layout, LazyFiles())
    generation_config = _json(generation) if generation.exists() else {}
    return str(folder), stored, config, generation_config, "mlx" if mlx else "hf"


DRAFT = "draft."
"""What the names of a draft's tensors begin with in a stored model that has one; its files are under `draft/`."""


def has_draft(source: LayersSource) -> bool:
    """Whether a stored model has a draft beside it."""
    return any(layer.startswith(DRAFT) for layer in source.tensors)


def read_layers(source: LayersSource, *, draft: bool = False) -> Parts:
    """As `read_folder`, from the blobs of a stored model, or of the draft beside it."""
    folder, prefix = ("draft/", DRAFT) if draft else ("", "")
    if f"{folder}config.json" not in source.files:
        raise CheckpointError(f"the stored model has no {folder}config.json layer; {REPAIR}")
    config_path = Path(source.files[f"{folder}config.json"])
    label = f"the stored {'draft' if draft else 'model'} of {config_path}"
    config = _json(config_path)
    files: dict[str, SafetensorsFile] = {}
    for layer, path in source.tensors.items():
        if layer.startswith(DRAFT) is not draft:
            continue
        for name, file in _layer(layer, path).items():
            if name in files:
                raise CheckpointError(f"{path}: tensor {name} is also in {files[name].path}; {REPAIR}")
            files[name] = file

    hints = configured(config)

    def layout(found: Bundle, words: int, groups: int) -> Quantization:
        hint, grouped = labelled(_where(found), found.name, found.data.file.metadata)
        if hint is None:
            hint = hints.get(found.name.removeprefix(prefix).removesuffix(".weight"), hints.get(""))
            grouped = hint is not None
        return blob_layout(_where(found), words, groups, hint, grouped)

    stored = _store(bundle(files), layout, LazyFiles(most_open=64))
    generation = source.files.get(f"{folder}generation_config.json")
    generation_config = _json(Path(generation)) if generation else {}
    formats = {file.metadata.get("format") for file in files.values()}
    mlx = "quantization" in config or "mlx" in formats
    named = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    # Tensors of a GGUF file keep what is particular about them: gains with their 1, rates without a logarithm.
    return label, named, config, generation_config, "gguf" if "gguf" in formats else "mlx" if mlx else "hf"


def _layer(layer: str, path: str) -> dict[str, SafetensorsFile]:
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        raise CheckpointError(f"layer {layer}: {error}") from error
    strays = [name for name in file.tensors if name != layer and not name.startswith(layer + ".")]
    if strays or not file.tensors:
        found = f"tensor {strays[0]}" if strays else "no tensor"
        raise CheckpointError(f"layer {layer}: {path} holds {found}; {REPAIR}")
    return dict.fromkeys(file.tensors, file)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the configuration is missing; {REPAIR}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the configuration is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: the configuration is not a JSON object")
    return value


def _where(found: Bundle) -> str:
    return f"{found.data.file.path}: tensor {found.name}"


def _spelled_by_mlx(found: Bundle) -> bool:
    return found.scales is not None and found.scales.span.name.endswith(".scales")


Layout = Callable[[Bundle, int, int], Quantization]


def _store(bundles: list[Bundle], layout: Layout, files: LazyFiles) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for found in bundles:
        if found.name in stored:
            raise CheckpointError(f"{_where(found)} is there in two layouts")
        stored[found.name] = _stored(found, layout, files)
    return stored


def _stored(found: Bundle, layout: Layout, files: LazyFiles) -> Stored:
    span = found.data.span
    nbytes = sum(part.span.nbytes for part in found.parts)
    if found.fp8_scale is not None and not scale_fits(span.shape, found.fp8_scale.span.shape):
        raise CheckpointError(
            f"{_where(found)} of shape {list(span.shape)} has FP8 scales of shape {list(found.fp8_scale.span.shape)}, "
            f"expected one, one per row, or one per block of 128 × 128; {REPAIR}"
        )
    if found.scales is None:
        info = TensorInfo(found.name, span.dtype, span.shape, None, nbytes)
        return Stored(info, lambda: _load_dense(found, files), lambda: _view_dense(found))
    quantization = _quantization(found, layout)
    columns = found.scales.span.shape[-1] * quantization.group_size
    info = TensorInfo(found.name, span.dtype, (*span.shape[:-1], columns), quantization, nbytes)
    _check_global_scale(found)
    return Stored(info, lambda: _load_packed(found, quantization, files), lambda: _view_packed(found, quantization))


def _quantization(found: Bundle, layout: Layout) -> Quantization:
    """Check that the companions' shapes and types belong together, and decide the layout."""
    assert found.scales is not None
    data, scales, where = found.data.span, found.scales.span, _where(found)
    if len(data.shape) < 2 or data.shape[:-1] != scales.shape[:-1]:
        raise CheckpointError(f"{where} of shape {list(data.shape)} has scales of shape {list(scales.shape)}; {REPAIR}")
    size = 4 if data.dtype == "U32" else 1
    if data.shape[-1] * size % 4:
        raise CheckpointError(f"{where} has rows of {data.shape[-1]} bytes, not a whole number of words; {REPAIR}")
    words = data.shape[-1] * size // 4
    if scales.dtype in ("U8", "F8_E4M3", "F8_E8M0"):
        if found.biases is not None:
            raise CheckpointError(f"{where} has 8-bit float scales and zero points: unknown layout; {REPAIR}")
        return float_layout(where, words, scales.shape[-1])
    if scales.dtype not in ("F16", "BF16", "F32"):
        raise CheckpointError(f"{where} has scales of type {scales.dtype}, expected U8, F16, BF16 or F32; {REPAIR}")
    if found.biases is None:
        raise CheckpointError(f"{where} has affine scales but no zero points (biases); {REPAIR}")
    biases = found.biases.span
    if biases.shape != scales.shape or biases.dtype != scales.dtype:
        raise CheckpointError(
            f"{where} has scales {scales.dtype} {list(scales.shape)} but zero points {biases.dtype} "
            f"{list(biases.shape)}; {REPAIR}"
        )
    return layout(found, words, scales.shape[-1])


def _check_global_scale(found: Bundle) -> None:
    """Its type and shape, by the header. Its value is read with the tensor: a model may have 70,000 of them."""
    part = found.global_scale
    if part is None:
        return
    experts, count = math.prod(found.data.span.shape[:-2]), math.prod(part.span.shape)
    if part.span.dtype not in ("F32", "F16", "BF16") or count not in (1, experts):
        raise CheckpointError(
            f"{_where(found)} has a global scale {part.span.dtype} of shape {list(part.span.shape)}, "
            f"expected one number{f' or {experts}' if experts > 1 else ''}; {REPAIR}"
        )


def _global_scale(found: Bundle) -> np.ndarray | None:
    """Float32 multiplier, a scalar or one per expert."""
    if found.global_scale is None:
        return None
    numbers = _view(found.global_scale).astype(np.float32).reshape(-1)
    if not np.isfinite(numbers).all() or (found.global_kind == "reciprocal" and not numbers.all()):
        raise CheckpointError(f"{_where(found)} has an unusable global scale ({numbers[:4]}); {REPAIR}")
    if found.global_kind == "largest":
        numbers = numbers / NVFP4_LARGEST
    elif found.global_kind == "reciprocal":
        numbers = np.float32(1) / numbers
    return numbers.reshape(()) if numbers.size == 1 else numbers


def _view(part: Part) -> np.ndarray:
    return part.file.view(part.span.name)


def _view_dense(found: Bundle) -> HostWeight:
    return HostWeight(_view(found.data), scales=None if found.fp8_scale is None else _view(found.fp8_scale))


def _view_packed(found: Bundle, quantization: Quantization) -> HostWeight:
    assert found.scales is not None
    biases = None if found.biases is None else _view(found.biases)
    return HostWeight(_view(found.data), quantization, _view(found.scales), biases, _global_scale(found))


def _load_dense(found: Bundle, files: LazyFiles) -> Weight:
    if found.refused is not None:
        raise CheckpointError(f"{_where(found)} {found.refused}")
    data = files.take(found.data)
    return Weight(data if found.fp8_scale is None else decode_fp8(data, files.take(found.fp8_scale)))


def _load_packed(found: Bundle, quantization: Quantization, files: LazyFiles) -> Weight:
    assert found.scales is not None
    scale = _global_scale(found)
    data = files.take(found.data)
    return Weight(
        data if data.dtype == mx.uint32 else data.view(mx.uint32),
        quantization,
        files.take(found.scales),
        None if found.biases is None else files.take(found.biases),
        None if scale is None else mx.array(scale),
    )

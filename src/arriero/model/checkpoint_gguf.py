"""Opening GGUF files: names and configuration as Hugging Face has them, blocks repacked when a tensor is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFTensor, open_shards
from arriero.formats.gguf_repack import LAYOUTS, repack, repackable
from arriero.formats.mapped import REPAIR
from arriero.model.gguf_config import ARCHITECTURES, architecture_of, config_of, generation_config_of
from arriero.model.gguf_names import CONSUMED, hugging_face_name
from arriero.model.gguf_orders import column_order, row_order, take_columns
from arriero.model.stored import HostWeight, Stored, TensorInfo
from arriero.model.weight import Mode, Quantization, Weight
from arriero.source import GGUFSource

Parts = tuple[str, dict[str, Stored], dict[str, Any], dict[str, Any], Literal["gguf"]]

_COMPANIONS = (".scale", ".input_scale")
_MODES: dict[str, Mode] = {"affine": "affine", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
_DENSE = {"F32", "F16", "BF16", "I8", "I16", "I32", "I64"}


class Order(NamedTuple):
    """Where our rows and columns are in the file, None where they are in the same places."""

    rows: np.ndarray | None
    columns: np.ndarray | None


def read(source: GGUFSource) -> Parts:
    """Label, tensors, configuration, generation configuration and dialect; raises CheckpointError."""
    files = open_shards(source.paths)
    label = str(files[0].path)
    architecture = architecture_of(files[0])
    config = config_of(files)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    scales = _global_scales(tensors) if architecture in ARCHITECTURES else {}
    stored: dict[str, Stored] = {}
    for tensor in tensors.values():
        if architecture in ARCHITECTURES:
            if CONSUMED.match(tensor.name) or tensor.name.endswith(_COMPANIONS):
                continue
            _check(tensor)
        name = hugging_face_name(architecture, tensor.name)
        order = _order(architecture, tensor, config)
        if name in stored:
            raise CheckpointError(f"{label}: tensor {tensor.name} is there under another name too")
        stored[name] = _stored(name, tensor, order, scales.get(tensor.name))
    return label, stored, config, generation_config_of(files[0]), "gguf"


def _order(architecture: str, tensor: GGUFTensor, config: Mapping[str, Any]) -> Order:
    try:
        return Order(
            row_order(architecture, tensor.name, tensor.shape, config),
            column_order(tensor.name, tensor.shape, config),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{tensor.file.path}: {error}") from error


def _global_scales(tensors: Mapping[str, GGUFTensor]) -> dict[str, np.ndarray]:
    """NVFP4's multipliers by the name of their weight: float32, a scalar or one per expert."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if not name.endswith(".scale"):
            continue
        weight = name.removesuffix(".scale").removesuffix(".weight") + ".weight"
        owner = tensors.get(weight)
        experts = owner.shape[0] if owner is not None and len(owner.shape) == 3 else 1
        where = f"{tensor.file.path}: tensor {name}"
        if owner is None or owner.type.name != "NVFP4" or tensor.type.name != "F32":
            raise CheckpointError(f"{where} is a scale, but {weight} is no NVFP4 tensor; {REPAIR}")
        values = tensor.dense().reshape(-1)
        if len(values) not in (1, experts) or not np.isfinite(values).all():
            raise CheckpointError(f"{where} has {len(values)} numbers for {experts} matrices; {REPAIR}")
        found[weight] = values.reshape(()) if len(values) == 1 else values
    return found


def _check(tensor: GGUFTensor) -> None:
    if tensor.type.name not in _DENSE and not repackable(tensor.type):
        raise CheckpointError(
            f"{tensor.file.path}: tensor {tensor.name} is stored as {tensor.type.name}, which we cannot run; "
            "use a model of another quantisation"
        )


def _stored(name: str, tensor: GGUFTensor, order: Order, scale: np.ndarray | None) -> Stored:
    layout = LAYOUTS.get(tensor.type.name)
    quantization = Quantization(_MODES[layout.mode], layout.bits, layout.group_size) if layout else None
    info = TensorInfo(name, tensor.type.name, tensor.shape, quantization, tensor.nbytes)
    return Stored(info, lambda: _load(tensor, order, scale), lambda: _view(tensor, order, scale))


def _dense(tensor: GGUFTensor, order: Order) -> np.ndarray:
    values = tensor.dense()
    if order.rows is not None:
        values = np.take(values, order.rows, axis=0)
    return values if order.columns is None else np.take(values, order.columns, axis=-1)


def _raw(tensor: GGUFTensor, order: Order) -> np.ndarray:
    """The blocks, rows in our order."""
    raw = tensor.raw()
    return raw if order.rows is None else np.take(raw, order.rows, axis=-2)


def _view(tensor: GGUFTensor, order: Order, scale: np.ndarray | None) -> HostWeight:
    """Another order is the one case that copies: still NumPy's memory, not MLX's."""
    if tensor.type.plain:
        return HostWeight(_dense(tensor, order))
    raw = _raw(tensor, order)
    if order.columns is not None:
        raw = _columns(tensor, raw, order.columns, tensor.type.block)
    return HostWeight(raw, global_scale=scale)


def _columns(tensor: GGUFTensor, array: np.ndarray, order: np.ndarray, unit: int) -> np.ndarray:
    try:
        return take_columns(array, order, unit)
    except CheckpointError as error:
        raise CheckpointError(
            f"{tensor.file.path}: tensor {tensor.name} is stored as {tensor.type.name}, but {error}"
        ) from error


def _load(tensor: GGUFTensor, order: Order, scale: np.ndarray | None) -> Weight:
    _check(tensor)
    if tensor.type.plain:
        return Weight(_array(_dense(tensor, order)))
    raw = _raw(tensor, order)
    lead = raw.shape[:-1]
    try:
        packed = repack(tensor.type, raw.reshape(-1, raw.shape[-1]))
    except CheckpointError as error:
        raise CheckpointError(f"{tensor.file.path}: tensor {tensor.name}: {error}") from error
    layout = packed.layout
    # 32 numbers of any width fill whole words.
    unit = max(layout.group_size, 32)

    def shaped(array: np.ndarray) -> mx.array:
        if order.columns is not None:
            array = _columns(tensor, array, order.columns, unit)
        return mx.array(array.reshape(*lead, array.shape[-1]))

    return Weight(
        shaped(packed.data),
        Quantization(_MODES[layout.mode], layout.bits, layout.group_size),
        shaped(packed.scales),
        None if packed.biases is None else shaped(packed.biases),
        None if scale is None else mx.array(scale),
    )


def _array(values: np.ndarray) -> mx.array:
    if values.dtype.name == "bfloat16":
        return mx.array(values.view(np.uint16)).view(mx.bfloat16)
    return mx.array(values)

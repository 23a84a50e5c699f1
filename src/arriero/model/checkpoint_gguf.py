"""Opening GGUF files: names and configuration as Hugging Face has them, blocks repacked when a tensor is taken."""

from __future__ import annotations

from typing import Any, Literal

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFTensor, open_shards
from arriero.formats.gguf_repack import repack
from arriero.model.gguf_config import config_of, generation_config_of
from arriero.model.gguf_orders import take_columns
from arriero.model.gguf_tensors import Order, check_type, named_tensors
from arriero.model.stored import HostWeight, Stored, TensorInfo
from arriero.model.weight import Quantization, Weight
from arriero.source import GGUFSource

Parts = tuple[str, dict[str, Stored], dict[str, Any], dict[str, Any], Literal["gguf"]]


def read(source: GGUFSource) -> Parts:
    """Label, tensors, configuration, generation configuration and dialect; raises CheckpointError."""
    files = open_shards(source.paths)
    label = str(files[0].path)
    config = config_of(files)
    stored = {
        found.name: _stored(found.name, found.tensor, found.order, found.scale, found.quantization)
        for found in named_tensors(files, config)
    }
    return label, stored, config, generation_config_of(files[0]), "gguf"


def _stored(
    name: str, tensor: GGUFTensor, order: Order, scale: np.ndarray | None, quantization: Quantization | None
) -> Stored:
    info = TensorInfo(name, tensor.type.name, tensor.shape, quantization, tensor.nbytes)
    return Stored(info, lambda: _load(tensor, order, scale, quantization), lambda: _view(tensor, order, scale))


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


def _load(tensor: GGUFTensor, order: Order, scale: np.ndarray | None, quantization: Quantization | None) -> Weight:
    check_type(tensor)
    if quantization is None:
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
        quantization,
        shaped(packed.scales),
        None if packed.biases is None else shaped(packed.biases),
        None if scale is None else mx.array(scale),
    )


def _array(values: np.ndarray) -> mx.array:
    if values.dtype.name == "bfloat16":
        return mx.array(values.view(np.uint16)).view(mx.bfloat16)
    return mx.array(values)

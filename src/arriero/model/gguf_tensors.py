"""The tensors of GGUF files by Hugging Face name: which are weights, where their rows are, what multiplies them.

Refuses to know MLX: `create` asks the same as a load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFFile, GGUFTensor
from arriero.formats.gguf_repack import LAYOUTS, repackable
from arriero.formats.mapped import REPAIR
from arriero.model.gguf_config import ARCHITECTURES, architecture_of
from arriero.model.gguf_names import CONSUMED, hugging_face_name
from arriero.model.gguf_orders import column_order, row_order
from arriero.model.quantization import Mode, Quantization

_COMPANIONS = (".scale", ".input_scale")
_MODES: dict[str, Mode] = {"affine": "affine", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
_DENSE = {"F32", "F16", "BF16", "I8", "I16", "I32", "I64"}


class Order(NamedTuple):
    """Where our rows and columns are in the file, None where they are in the same places."""

    rows: np.ndarray | None
    columns: np.ndarray | None


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with its Hugging Face name."""

    name: str
    tensor: GGUFTensor
    order: Order
    scale: np.ndarray | None
    """NVFP4's multiplier: float32, a scalar or one per expert."""

    @property
    def quantization(self) -> Quantization | None:
        """What its blocks are repacked to; None for plain numbers."""
        layout = LAYOUTS.get(self.tensor.type.name)
        return Quantization(_MODES[layout.mode], layout.bits, layout.group_size) if layout else None


def named_tensors(files: Sequence[GGUFFile], config: Mapping[str, Any]) -> list[NamedTensor]:
    """All weights of a model's files, of which `config` was made; raises CheckpointError naming file and tensor."""
    label, architecture = str(files[0].path), architecture_of(files[0])
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    scales = _global_scales(tensors) if architecture in ARCHITECTURES else {}
    found: dict[str, NamedTensor] = {}
    for tensor in tensors.values():
        if architecture in ARCHITECTURES:
            if CONSUMED.match(tensor.name) or tensor.name.endswith(_COMPANIONS):
                continue
            check_type(tensor)
        name = hugging_face_name(architecture, tensor.name)
        order = _order(architecture, tensor, config)
        if name in found:
            raise CheckpointError(f"{label}: tensor {tensor.name} is there under another name too")
        found[name] = NamedTensor(name, tensor, order, scales.get(tensor.name))
    return list(found.values())


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


def check_type(tensor: GGUFTensor) -> None:
    """CheckpointError for a type that cannot run."""
    if tensor.type.name not in _DENSE and not repackable(tensor.type):
        raise CheckpointError(
            f"{tensor.file.path}: tensor {tensor.name} is stored as {tensor.type.name}, which we cannot run; "
            "use a model of another quantisation"
        )

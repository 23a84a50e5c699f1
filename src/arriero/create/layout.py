"""The packed layout of a tensor with its scales, asked by whoever plans, recodes or copies it."""

from __future__ import annotations

from collections.abc import Mapping

from arriero.errors import CheckpointError
from arriero.model.companions import Bundle
from arriero.model.packing import affine_layout, blob_layout, float_layout, labelled
from arriero.model.quantization import Quantization


def layout_of(found: Bundle, hints: Mapping[str, Quantization]) -> Quantization:
    """By its shapes, then by what its file says, then by `hints` of the configuration.

    Raises CheckpointError for companions that don't fit it.
    """
    assert found.scales is not None
    data, scales, where = found.data.span, found.scales.span, f"tensor {found.name}"
    if data.shape[:-1] != scales.shape[:-1]:
        raise CheckpointError(
            f"{where} of packed shape {list(data.shape)} and its scales {list(scales.shape)} do not belong together; "
            "convert the model again"
        )
    words, groups = (shape[-1] if shape else 0 for shape in (data.shape, scales.shape))
    words = words if data.dtype == "U32" else words // 4
    if scales.dtype not in ("F32", "BF16", "F16"):
        return float_layout(where, words, groups)
    if found.biases is None or found.biases.span.shape != scales.shape:
        raise CheckpointError(f"{where} has affine scales but no zero points (biases) of their shape")
    declared = [hints[path] for path in (found.name.removesuffix(".weight"), "") if path in hints]
    if not scales.name.endswith(f"{found.name}.scale"):
        return affine_layout(where, words, groups, declared)
    hint, grouped = labelled(where, found.data.span.name, found.data.file.metadata)
    if hint is None and declared:
        hint, grouped = declared[0], True
    return blob_layout(where, words, groups, hint, grouped)

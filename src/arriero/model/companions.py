"""Which tensors of a safetensors model belong together: a matrix with its scales, zero points and global scale.

Four spellings circulate: MLX's (`X.weight`, `X.scales`, `X.biases`), that of tensor layers (`X.weight.scale`,
`X.weight.bias`), ModelOpt's (`X.weight_scale`, `X.weight_scale_2`) and compressed-tensors' (`X.weight_packed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from arriero.errors import CheckpointError
from arriero.formats.safetensors import SafetensorsFile, TensorSpan

GlobalScale = Literal["multiplier", "largest", "reciprocal"]
"""What a global scale means: a factor; the tensor's largest value (factor · 2688, MLX); one over the factor."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of one file."""

    file: SafetensorsFile
    span: TensorSpan


@dataclass(frozen=True, slots=True)
class Bundle:
    """A tensor under its public name, with its companions."""

    name: str
    data: Part
    scales: Part | None = None
    biases: Part | None = None
    global_scale: Part | None = None
    global_kind: GlobalScale = "multiplier"
    fp8_scale: Part | None = None
    """Float scales of an FP8 matrix (by block, row or tensor), which is decoded when loaded."""
    refused: str | None = None
    """Why the tensor can be viewed but not loaded."""

    @property
    def parts(self) -> list[Part]:
        companions = (self.scales, self.biases, self.global_scale, self.fp8_scale)
        return [self.data, *(part for part in companions if part is not None)]


def bundle(files: Mapping[str, SafetensorsFile]) -> list[Bundle]:
    """Fold companions into their matrices; tensors that belong to no other stay tensors of their own."""
    parts = {name: Part(file, file.tensors[name]) for name, file in files.items()}
    foreign = next((name for name in parts if name.endswith(".qweight")), None)
    if foreign is not None:
        raise CheckpointError(
            f"{parts[foreign].file.path}: tensor {foreign} is packed by GPTQ or AWQ, which is not supported; "
            "use the original model or one quantised for MLX"
        )
    bundles: dict[str, Bundle] = {}
    folded: set[str] = set()
    for name in parts:
        found = _companions(name, parts)
        if found is not None:
            bundles[name] = found
            folded.update(part.span.name for part in found.parts[1:])
            folded.update(_activation_scales(name) & parts.keys())
    ordered = []
    for name, part in parts.items():
        if name in bundles:
            ordered.append(bundles[name])
        elif name not in folded:
            ordered.append(Bundle(name, part))
    return ordered


def _companions(name: str, parts: Mapping[str, Part]) -> Bundle | None:
    part = parts[name]
    dtype = part.span.dtype
    if name + ".scale" in parts and dtype == "U32":
        scale = parts[name + ".scale"]
        return Bundle(name, part, scale, parts.get(name + ".bias"), parts.get(name + ".global_scale"))
    if name.endswith(".weight_packed"):
        stem = name.removesuffix("_packed")
        if stem + "_scale" not in parts:
            return None
        scale = parts[stem + "_scale"]
        if scale.span.dtype in ("F32", "BF16", "F16"):
            what = "is whole numbers as compressed-tensors packs them, which are not supported"
            return Bundle(stem, part, refused=f"{what}; use the BF16 weights or an MLX conversion")
        return Bundle(stem, part, scale, None, parts.get(stem + "_global_scale"), global_kind="reciprocal")
    if not name.endswith(".weight"):
        return None
    module = name.removesuffix(".weight")
    if module + ".scales" in parts and dtype == "U32":
        whole = parts.get(module + ".global_scale") or parts.get(name + ".global_scale")
        return Bundle(
            name, part, parts[module + ".scales"], parts.get(module + ".biases"), whole, global_kind="largest"
        )
    if dtype in ("U8", "F8_E4M3", "F8_E5M2"):
        return _float_companions(name, part, parts)
    return None


def _float_companions(name: str, part: Part, parts: Mapping[str, Part]) -> Bundle | None:
    """ModelOpt's and Hugging Face's 4- and 8-bit floats; what cannot be loaded can still be viewed."""
    scale = parts.get(name + "_scale")
    inverse = parts.get(name + "_scale_inv")
    if scale is None and inverse is None:
        return None
    if scale is not None and (part.span.dtype, scale.span.dtype) in (
        ("U8", "F8_E4M3"),
        ("U8", "U8"),
        ("F8_E4M3", "U8"),
    ):
        return Bundle(name, part, scale, None, parts.get(name + "_scale_2"))
    factor = inverse if inverse is not None else scale
    if part.span.dtype == "F8_E4M3" and factor is not None and factor.span.dtype in ("F32", "BF16", "F16"):
        return Bundle(name, part, fp8_scale=factor)
    refused = f"is {part.span.dtype} in a layout that is not supported; use the BF16 weights or an MLX conversion"
    return Bundle(name, part, refused=refused)


def _activation_scales(name: str) -> set[str]:
    """Scales for quantised activations, which nothing here uses."""
    stem = name.removesuffix("_packed").removesuffix(".weight")
    return {f"{stem}.{scale}" for scale in ("input_scale", "input_global_scale", "output_scale", "weight_shape")}

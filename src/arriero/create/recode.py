"""A precision that was asked for, tensor by tensor: what it is made of, and whether it has to be made at all.

What is packed already stays as it is where that is what was asked, or no wider: a second rounding never adds precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from arriero.create.adapter import Adapted, Adapter
from arriero.create.layout import layout_of
from arriero.create.made import Made
from arriero.create.numbers import Fp8Numbers, Numbers, PackedNumbers, PlainNumbers
from arriero.create.policies import Policy, Tensor, policy_for
from arriero.create.precisions import DENSE, PACKED, PLAIN, SOURCE, fits
from arriero.create.quantize import Plain, Quantized
from arriero.create.relabel import RelabelledFp8
from arriero.formats.blockfp8 import BLOCK, scale_fits
from arriero.formats.safetensors import SafetensorsFile
from arriero.model.companions import Bundle, Part
from arriero.model.quantization import Quantization

_FLOATS = ("F32", "BF16", "F16")
_TABLE_FACTORS = ("weight_scale", "weight_scale_2", "weight.global_scale")


@dataclass(frozen=True, slots=True)
class Recoded:
    """A tensor that changes."""

    made: Made
    kind: str
    """The precision that it gets."""
    source: str
    """The one that it had."""
    factor: str = ""
    """The name of its table's factor, which is in its numbers now."""

    @property
    def packing(self) -> int:
        """Numbers for each element of its file's tensor."""
        return 32 // PACKED[self.kind].bits if self.kind in PACKED else 1


@dataclass(frozen=True, slots=True)
class Recoding:
    """A precision, and who gets it; and an adapter that is merged before."""

    asked: str
    """'' leaves every tensor what it is, but for those that the adapter changes."""
    policy: Policy
    search: bool = True
    adapter: Adapter | None = None

    @classmethod
    def to(cls, asked: str, config: Mapping[str, Any], *, search: bool = True, adapter: Adapter | None = None) -> Self:
        """By the policy of a configuration's architecture; raises UnsupportedArchitecture."""
        return cls(asked, policy_for(config), search, adapter)

    def of(
        self, found: Bundle, files: Mapping[str, SafetensorsFile], hints: Mapping[str, Quantization]
    ) -> Recoded | None:
        """How a tensor changes, or None where it is copied; raises CheckpointError for companions that don't fit it."""
        numbers, source, how = _numbers(found, files, hints)
        if numbers is None:
            return None
        factor = _table_factor(found.name, files)
        multiplied = "" if factor is None else factor.span.name
        kind = self.policy(Tensor(found.name, numbers.shape), self.asked) if self.asked else SOURCE
        size = sum(part.span.nbytes for part in found.parts)
        delta = self.adapter.delta_of(found.name, numbers.shape) if self.adapter is not None else None
        if delta is not None:
            # What was packed would lose most of a small change if it were packed again unasked.
            kind = kind or next((name for name, dtype in PLAIN.items() if dtype == source), "bf16")
            numbers, source = Adapted(numbers, delta), f"{source} + adapter"
        elif kind == SOURCE or source == DENSE.get(kind):
            return None
        if kind in PLAIN:
            return Recoded(Plain(numbers, PLAIN[kind], size), kind, source, multiplied)
        scales = source if source in _FLOATS else "BF16"
        if delta is None:
            if how is not None and (how == PACKED[kind] or how.bits <= PACKED[kind].bits):
                return None
            relabelled = _relabelled(found, kind)
            if relabelled is not None:
                return Recoded(relabelled, kind, source)
        return Recoded(Quantized(numbers, kind, scales, size, self.search), kind, source, multiplied)


def _numbers(
    found: Bundle, files: Mapping[str, SafetensorsFile], hints: Mapping[str, Quantization]
) -> tuple[Numbers | None, str, Quantization | None]:
    """A tensor's numbers, what it is stored as, and how it is packed; None for what has no numbers that we know."""
    span = found.data.span
    if found.refused is not None or len(span.shape) < 2 or 0 in span.shape:
        return None, "", None
    if found.fp8_scale is not None:
        if not scale_fits(span.shape, found.fp8_scale.span.shape):
            return None, "", None  # refused where it is planned
        return Fp8Numbers(found.name, found.data, found.fp8_scale), "fp8", None
    if found.scales is not None:
        how = layout_of(found, hints)
        return PackedNumbers(found, how, _table_factor(found.name, files)), how.name, how
    if span.dtype == "F8_E4M3":
        factor = _table_factor(found.name, files)
        return (None, "", None) if factor is None else (PlainNumbers(found.name, found.data, factor), "fp8", None)
    if span.dtype in _FLOATS:
        return PlainNumbers(found.name, found.data), span.dtype, None
    return None, "", None


def _table_factor(name: str, files: Mapping[str, SafetensorsFile]) -> Part | None:
    """The one factor of all shards of a table, where it has one."""
    table = re.fullmatch(r"(.+)\.shard_\d+\.weight", name)
    names = [f"{table[1]}.{word}" for word in _TABLE_FACTORS] if table is not None else []
    scale = next((name for name in names if name in files), None)
    return None if scale is None else Part(files[scale], files[scale].tensors[scale])


def _relabelled(found: Bundle, kind: str) -> Made | None:
    """FP8 blocks under powers of two are MXFP8 already: only their scales are written out."""
    scale = found.fp8_scale
    if kind != "mxfp8" or scale is None or not fits(found.data.span.shape, kind):
        return None
    values = np.abs(scale.file.view(scale.span.name).astype(np.float64))
    mantissas, exponents = np.frexp(values)
    powers = bool((mantissas == 0.5).all() and (exponents >= -126).all() and (exponents <= 128).all())
    positive = bool((scale.file.view(scale.span.name).astype(np.float64) > 0).all())
    return RelabelledFp8(found.name, found.data, scale, BLOCK) if powers and positive else None

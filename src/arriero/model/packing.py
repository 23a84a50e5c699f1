"""Which packed layout a tensor of a safetensors file has: its shapes first, what is declared second.

`words · 32 / groups = bits · group_size` is all that shapes tell; declarations choose among the pairs that fit. Refuses
to know MLX: `create` asks the same questions of a folder as a load does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from arriero.errors import CheckpointError
from arriero.formats.affine import BITS, GROUPS
from arriero.model.quantization import Quantization

TYPES: dict[str, Quantization] = {
    **{f"INT{bits}": Quantization("affine", bits, 64) for bits in BITS},
    "NVFP4": Quantization("nvfp4", 4, 16),
    "MXFP4": Quantization("mxfp4", 4, 32),
    "MXFP8": Quantization("mxfp8", 8, 32),
}
ALIASES = {"FP4": "INT4", "Q4": "INT4", "FP8": "INT8", "Q8": "INT8"}
"""What a blob's `quant_type` may say (any case)."""

_FLOAT_LAYOUTS = {q.bits * q.group_size: q for q in TYPES.values() if q.mode != "affine"}


def float_layout(where: str, words: int, groups: int) -> Quantization:
    """The layout of a tensor with uint8 scales: each of nvfp4, mxfp4, mxfp8 has a ratio of its own."""
    layout = _FLOAT_LAYOUTS.get(_product(where, words, groups))
    if layout is None:
        raise CheckpointError(f"{where}: {words} words and {groups} scales a row fit none of nvfp4, mxfp4, mxfp8")
    return layout


def affine_layout(where: str, words: int, groups: int, hints: Iterable[Quantization]) -> Quantization:
    """Bits and group size of an affine tensor; `hints` in falling order of trust.

    A hint that fits wins; else one whose group size fits (bits vary from tensor to tensor, group sizes rarely do); else
    one whose bits fit; else MLX's usual sizes.
    """
    fitting = _fitting(where, words, groups)
    hints = [hint for hint in hints if hint.mode == "affine"]
    for hint in hints:
        if hint in fitting:
            return hint
    for hint in hints:
        for layout in fitting:
            if layout.group_size == hint.group_size:
                return layout
    for hint in hints:
        for layout in fitting:
            if layout.bits == hint.bits:
                return layout
    return _usual(fitting)


def blob_layout(where: str, words: int, groups: int, hint: Quantization | None, grouped: bool) -> Quantization:
    """Bits and group size of an affine tensor layer, whose declared type may be that of its whole blob.

    `grouped` says that the group size was declared too, as our own `create` does. Where it wasn't, only int4 and int8
    exist: a ratio of 128 is int4 in groups of 32, 512 int8 in groups of 64, and 256 is either, as the type says.
    """
    fitting = _fitting(where, words, groups)
    if hint is not None and grouped and hint in fitting:
        return hint
    product = _product(where, words, groups)
    eight = hint is not None and hint.bits == 8
    known = {128: (4, 32), 512: (8, 64), 256: (8, 32) if eight else (4, 64)}
    if product in known:
        return Quantization("affine", *known[product])
    return affine_layout(where, words, groups, [hint] if hint else [])


def declared_type(where: str, name: str, group_size: str | None) -> tuple[Quantization, bool]:
    """The layout of a blob's `quant_type` and `group_size`, and whether the group size was given."""
    kind = ALIASES.get(name.upper(), name.upper())
    if kind not in TYPES:
        raise CheckpointError(f"{where}: the quantisation type {name!r} is unknown; known are {', '.join(TYPES)}")
    layout = TYPES[kind]
    if not group_size:
        return layout, False
    if not group_size.isdecimal() or len(group_size) > 5:
        raise CheckpointError(f"{where}: the group size {group_size!r:.40} is not a number")
    return Quantization(layout.mode, layout.bits, int(group_size)), True


def labelled(where: str, name: str, metadata: Mapping[str, str]) -> tuple[Quantization | None, bool]:
    """What a tensor layer's file says of one of its tensors, as `declared_type` gives it; None for nothing."""
    kind = metadata.get(f"{name}.quant_type") or metadata.get("quant_type")
    group_size = metadata.get(f"{name}.group_size") or metadata.get("group_size")
    return declared_type(where, kind, group_size) if kind else (None, False)


def configured(config: Mapping[str, Any]) -> dict[str, Quantization]:
    """Module path → layout from `quantization` of a config.json; the model-wide one under ``""``."""
    section = config.get("quantization") or config.get("quantization_config")
    found: dict[str, Quantization] = {}
    if not isinstance(section, Mapping):
        return found
    modules = {"": section} | {key: value for key, value in section.items() if isinstance(value, Mapping)}
    default = section.get("group_size")
    for path, entry in modules.items():
        mode, bits, group = entry.get("mode", "affine"), entry.get("bits"), entry.get("group_size", default)
        if mode in ("affine", "nvfp4", "mxfp4", "mxfp8") and isinstance(bits, int) and isinstance(group, int):
            found[path] = Quantization(mode, bits, group)
    return found


def _product(where: str, words: int, groups: int) -> int:
    if not words or not groups or words * 32 % groups:
        raise CheckpointError(f"{where}: {words} packed words and {groups} scales a row do not belong together")
    return words * 32 // groups


def _fitting(where: str, words: int, groups: int) -> list[Quantization]:
    product = _product(where, words, groups)
    found = [Quantization("affine", b, g) for g in GROUPS for b in BITS if b * g == product]
    if not found:
        raise CheckpointError(
            f"{where}: {words} packed words and {groups} scales a row fit no affine layout "
            f"(bits {', '.join(map(str, BITS))}; groups of {', '.join(map(str, GROUPS))})"
        )
    return found


def _usual(fitting: list[Quantization]) -> Quantization:
    """4 bits before 2; groups of 64 before 32 before 128."""
    order = [64, 32, 128]
    return min(fitting, key=lambda q: (q.bits == 2, order.index(q.group_size)))

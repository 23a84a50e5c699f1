"""The signature that MLX writes before a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

# MLX's type names (get_type_string) and item sizes
TYPES = {
    mx.float32: ("float", 4),
    mx.float16: ("float16_t", 2),
    mx.bfloat16: ("bfloat16_t", 2),
    mx.bool_: ("bool", 1),
    mx.int8: ("int8_t", 1),
    mx.int16: ("int16_t", 2),
    mx.int32: ("int32_t", 4),
    mx.int64: ("int64_t", 8),
    mx.uint8: ("uint8_t", 1),
    mx.uint16: ("uint16_t", 2),
    mx.uint32: ("uint32_t", 4),
    mx.uint64: ("uint64_t", 8),
}
NP = {
    mx.float32: np.float32,
    mx.float16: np.float16,
    mx.bfloat16: np.uint16,
    mx.bool_: np.bool_,
    mx.int8: np.int8,
    mx.int16: np.int16,
    mx.int32: np.int32,
    mx.int64: np.int64,
    mx.uint8: np.uint8,
    mx.uint16: np.uint16,
    mx.uint32: np.uint32,
    mx.uint64: np.uint64,
}
ATTRIBUTES = [  # in MLX's order; how the launcher makes each from ThreadInfo t
    ("dispatch_quadgroups_per_threadgroup", "uint", "t.dispatch_quads"),
    ("dispatch_simdgroups_per_threadgroup", "uint", "t.dispatch_sgs"),
    ("dispatch_threads_per_threadgroup", "uint3", "t.dispatch_tptg"),
    ("grid_origin", "uint3", None),
    ("grid_size", "uint3", "t.grid"),
    ("quadgroup_index_in_threadgroup", "uint", "t.quad"),
    ("quadgroups_per_threadgroup", "uint", "t.quads"),
    ("simdgroup_index_in_threadgroup", "uint", "t.sg"),
    ("simdgroups_per_threadgroup", "uint", "t.sgs"),
    ("thread_execution_width", "uint", "32u"),
    ("thread_index_in_quadgroup", "uint", "t.quad_lane"),
    ("thread_index_in_simdgroup", "uint", "t.lane"),
    ("thread_index_in_threadgroup", "uint", "t.index"),
    ("thread_position_in_grid", "uint3", "t.pos_grid"),
    ("thread_position_in_threadgroup", "uint3", "t.pos_tg"),
    ("threadgroup_position_in_grid", "uint3", "t.tg_pos"),
    ("threadgroups_per_grid", "uint3", "t.tgs_per_grid"),
    ("threads_per_grid", "uint3", "t.grid"),
    ("threads_per_simdgroup", "uint", "32u"),
    ("threads_per_threadgroup", "uint3", "t.tptg"),
]


def signature(
    fn: str,
    input_names: Sequence[str],
    inputs: Sequence[tuple[mx.Dtype, int, int]],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
    source: str,
    atomic_outputs: bool,
) -> tuple[str, list[str], list[tuple[str, str]]]:
    """The kernel's signature as MLX writes it, the launch arguments, and the buffer list.

    inputs: (dtype, ndim, size) each.
    """
    s, args, bufs = "", [], []
    if template:
        kinds = ["bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename" for _, v in template]
        s += "template <" + ", ".join(f"{k} {n}" for k, (n, _) in zip(kinds, template, strict=True)) + ">\n"
    s += f"[[kernel]] void {fn}(\n"
    params = []
    for name, (dt, ndim, size) in zip(input_names, inputs, strict=True):
        ty, loc, ref = TYPES[dt][0], "constant" if size < 8 else "device", "&" if ndim == 0 else "*"
        params.append(f"  const {loc} {ty}{ref} {name} [[buffer({len(bufs)})]]")
        args.append(f"{'*' if ndim == 0 else ''}(const {ty}*)b[{len(bufs)}]")
        bufs.append(("in", name))
        if ndim:
            for suf, t, r in (("shape", "int", "*"), ("strides", "int64_t", "*"), ("ndim", "int", "&")):
                if f"{name}_{suf}" in source:
                    params.append(f"  const constant {t}{r} {name}_{suf} [[buffer({len(bufs)})]]")
                    args.append(f"{'*' if r == '&' else ''}(const {t}*)b[{len(bufs)}]")
                    bufs.append((suf, name))
    for name, dt in zip(output_names, output_dtypes, strict=True):
        ty = TYPES[dt][0]
        ty = f"atomic<{ty}>" if atomic_outputs else ty
        params.append(f"  device {ty}* {name} [[buffer({len(bufs)})]]")
        args.append(f"({ty}*)b[{len(bufs)}]")
        bufs.append(("out", name))
    for a, ty, ex in ATTRIBUTES:
        if a in source:
            params.append(f"  {ty} {a} [[{a}]]")
            if ex is None:
                args.append("uint3(0u)")
            else:
                args.append(f"uint3(+{ex}[0], +{ex}[1], +{ex}[2])" if ty == "uint3" else ex)
    return s + ",\n".join(params) + ") {\n", args, bufs


def template_args(template: Sequence[tuple[str, Any]]) -> str:
    """The arguments as C++ spells them."""

    def spelled(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool | int) else TYPES[value][0]

    return ", ".join(spelled(value) for _, value in template)

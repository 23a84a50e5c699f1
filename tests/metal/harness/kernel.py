"""A kernel that is called as those of `mx.fast.metal_kernel` are, and runs on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from arriero.kernels.metal.source import load
from tests.metal.harness.address_spaces import check_address_spaces, clang
from tests.metal.harness.buffers import Buffer, Dispatch, Input, RunOptions, Stats, array, item, output
from tests.metal.harness.build import INCLUDE, build, entry, library, locate
from tests.metal.harness.errors import MetalError
from tests.metal.harness.rewrite import line_offsets, lined_header, rewrite_threadgroup
from tests.metal.harness.signature import signature, template_args

LAUNCH = """
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];
extern "C" __attribute__((visibility("default"))) const char* const msl_image[2] = {{__ehdr_start, _end}};
extern "C" __attribute__((no_sanitize("thread"), visibility("default"))) void msl_entry(void** b) {{
  auto& t = *msl::info;
  (void)t;
  {call};
}}
"""
MODES = ("safe", "relaxed", "fast")


@dataclass
class Options:
    """What is checked, and how threads are ordered."""

    seed: int = 0
    budget: int = 2_000_000_000  # memory accesses and group operations
    timeout: float = 60.0  # seconds of CPU time
    shuffle: bool = True  # random order of threads, simdgroups, threadgroups
    divergent_simd: str = "error"  # or "active": lanes at one call are the active set
    races: bool = True
    share_between_threadgroups: bool = False  # allow plain sharing of device memory
    uninitialised: bool = True
    exited_barrier: bool = False  # threads that returned do not count at barriers
    threadgroup_limit: int = 32768
    same_site: bool = True
    allow_unwritten: bool = False  # outputs without init_value may stay partly unwritten
    shift_inputs: bool = False  # put inputs one element off alignment, like a slice
    max_threads: int = 1024
    hostile_fast_math: bool = False  # fast:: of an infinity or NaN gives NaN
    address_spaces: bool | None = None  # None: check where clang is there


@dataclass
class Kernel:
    """The arguments of `mx.fast.metal_kernel`; calls take `Options` by name, too."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    compile_options: dict[str, Any] | None = None
    path: Path | None = None
    """The .metal file, for messages."""
    options: Options = field(default_factory=Options)
    stats: dict[str, int] = field(default_factory=dict)

    def text(
        self,
        inputs: Sequence[tuple[mx.Dtype, int, int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]],
    ) -> tuple[str, list[tuple[str, str]]]:
        """The unit to compile, and its buffers."""
        name = f"custom_kernel_{self.name}"
        head, arguments, buffers = signature(
            name, self.input_names, inputs, self.output_names, output_dtypes, template, self.source, self.atomic_outputs
        )
        lines = line_offsets(self.path) if self.path else {}
        label = self.path.name if self.path else f"{self.name}.metal"
        made = f"<{template_args(template)}>" if template else ""
        parts = [
            INCLUDE,
            lined_header(self.path, label, self.header),
            f'\n#line 1 "{self.name}.signature"\n{head}',
            f'#line {lines.get("body", 1)} "{label}"\n{rewrite_threadgroup(self.source)}\n}}\n',
            f'#line 1 "{self.name}.launch"',
            LAUNCH.format(call=f"{name}{made}({', '.join(arguments)})"),
        ]
        return "".join(parts), buffers

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        **options: Any,
    ) -> list[mx.array]:
        """The outputs, computed at once; MetalError for whatever is wrong with the kernel or its launch."""
        chosen = replace(self.options, **options)
        template = list(template or [])
        if len(inputs) != len(self.input_names) or not (
            len(output_shapes) == len(output_dtypes) == len(self.output_names)
        ):
            raise ValueError("inputs and outputs must match their names")
        if min(*grid, *threadgroup) < 1:
            raise MetalError("launch", "grid and threadgroup sizes must be positive")
        if prod(threadgroup) > chosen.max_threads:
            raise MetalError("launch", f"more than {chosen.max_threads} threads in a threadgroup")
        held = [Input.of(mx.array(given), self.ensure_row_contiguous) for given in inputs]
        text, layout = self.text([(h.dtype, len(h.shape), h.size) for h in held], output_dtypes, template)
        compiled, runtime = build(text, self._hostile(chosen))
        if chosen.address_spaces or (chosen.address_spaces is None and clang()):
            mark = compiled.with_suffix(".as")
            if not mark.exists():
                check_address_spaces(self, inputs, output_dtypes, template)
                mark.touch()
        made = {
            name: (output(shape, dtype, init_value), dtype)
            for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        }
        named = dict(zip(self.input_names, held, strict=True))
        keep, buffers = [], (Buffer * len(layout))()
        for place, (what, name) in enumerate(layout):
            shift = 0
            if what == "out":
                data, dtype = made[name]
                kind, size = (2 if init_value is None else 3), item(dtype)
            elif what == "in":
                data, kind, size = named[name].data, named[name].kind, item(named[name].dtype)
                shift = size if chosen.shift_inputs else 0
            else:
                data = named[name].extra(what)
                name, kind, size = f"{name}_{what}", 1, data.itemsize
            keep.append(data)
            buffers[place] = Buffer(name.encode(), data.ctypes.data, data.nbytes, kind, size, shift, 0, 0)
        self._run(compiled, runtime, grid, threadgroup, buffers, chosen)
        for place, (what, name) in enumerate(layout):
            if what == "out" and init_value is None and buffers[place].unwritten and not chosen.allow_unwritten:
                missing = f"{buffers[place].unwritten} of {made[name][0].nbytes} bytes of '{name}' were never written"
                raise MetalError("unwritten-output", f"{self.name}: {missing}")
        return [array(*made[name]) for name in self.output_names]

    def _hostile(self, chosen: Options) -> int:
        """Whether fast functions turn infinities into NaN: 2 for all, where the compiler is told to be fast."""
        mode = (self.compile_options or {}).get("math_mode", "safe")
        if mode not in MODES:
            raise ValueError(f"math_mode {mode} is none of {', '.join(MODES)}")
        if mode != "safe":
            return 2
        return 1 if chosen.hostile_fast_math and "fast::" in self.header + self.source else 0

    def _run(
        self,
        compiled: Path,
        runtime: Path,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        buffers: Any,
        chosen: Options,
    ) -> None:
        given = RunOptions(
            **{name: getattr(chosen, name) for name in PASSED},
            divergent_simd=chosen.divergent_simd == "active",
            cross_tg=chosen.share_between_threadgroups,
            uninit=chosen.uninitialised,
            tg_limit=chosen.threadgroup_limit,
        )
        size = Dispatch((ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*threadgroup))
        stats, message, places = Stats(), ctypes.create_string_buffer(4096), (ctypes.c_uint64 * 2)()
        failed = library(runtime).msl_run(
            *entry(compiled),
            ctypes.byref(size),
            buffers,
            len(buffers),
            ctypes.byref(given),
            ctypes.byref(stats),
            message,
            len(message),
            places,
        )
        self.stats = {name: getattr(stats, name) for name, _ in Stats._fields_}
        if failed:
            found = message.value.decode(errors="replace")
            raise MetalError(found.split(":")[0], f"{self.name}: {found}", locate(compiled, places))


PASSED = {name for name, _ in RunOptions._fields_} & {known.name for known in fields(Options)} - {"divergent_simd"}


def from_file(path: Path, edit: Sequence[tuple[str, str]] = (), **options: Any) -> Kernel:
    """The kernel of a .metal file; `edit` plants faults: pairs of a text that must be there and what replaces it."""
    spec = load(path)
    for old, new in edit:
        if old not in spec["source"] + spec["header"]:
            raise ValueError(f"{path.name} does not hold what is to be replaced: {old}")
        spec["source"], spec["header"] = spec["source"].replace(old, new), spec["header"].replace(old, new)
    return Kernel(**spec, path=path, options=Options(**options))

"""Compiles a kernel for the CPU and runs it on numpy arrays."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.source import Kernel, text

SHIM, WARPGROUP = (Path(__file__).with_name(name) for name in ("shim.hpp", "warpgroup.hpp"))
TYPES = {"uint32": "unsigned", "int32": "int", "uint8": "unsigned char", "float32": "float", "uint16": "__nv_bfloat16"}
"""C++ types by numpy's names; 16 bits are bfloat16."""
KINDS = {mx.bfloat16: np.uint16, mx.float32: np.float32, mx.uint32: np.uint32, mx.int32: np.int32}
"""Types of outputs."""


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which("g++") or shutil.which("clang++")


def execute(
    kernel: Kernel,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    template: Mapping[str, int | bool],
    *,
    blocks: tuple[int, int, int],
    seed: int = 0,
) -> None:
    """Run all blocks, one after another; outputs, and inputs that the kernel writes, change in place.

    AssertionError says what is wrong with a kernel's collectives.
    """
    names = tuple(TYPES[array.dtype.name] for array in (*inputs, *outputs))
    assert all(value >= 0 for value in template.values()), "MLX makes names of constants, which a minus is no part of"
    strided = any(f"{name}_strides" in text(kernel.body) for name in kernel.inputs)
    assert all(array.flags.c_contiguous for array in (() if strided else inputs))
    run = _built(kernel, kernel.full_name, names, tuple(template.items()))
    pointers = (ctypes.c_void_p * len(names))(*(array.ctypes.data for array in (*inputs, *outputs)))
    shapes, strides = np.zeros((len(names), 8), np.int32), np.zeros((len(names), 8), np.int64)
    for i, array in enumerate((*inputs, *outputs)):
        shapes[i, : array.ndim] = array.shape
        strides[i, : array.ndim] = np.array(array.strides) // array.itemsize
    fault = run(pointers, *(x.ctypes.data_as(ctypes.c_void_p) for x in (shapes, strides)), *blocks, seed)
    assert fault is None, fault.decode()


@cache
def _built(
    kernel: Kernel, name: str, types: tuple[str, ...], template: tuple[tuple[str, int | bool], ...]
) -> Callable[..., bytes | None]:
    """`name` is the kernel's full one, which changes with its sources."""
    found = compiler()
    assert found is not None
    folder = Path(mkdtemp(prefix="cuda-on-cpu-"))
    (folder / "kernel.cpp").write_text(_source(kernel, types, template), encoding="utf-8")
    library = folder / "kernel.so"
    subprocess.run(
        [found, "-O0", "-std=c++20", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "kernel.cpp", "-o", "kernel.so"],
        cwd=folder,
        check=True,
    )
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    run.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int] * 3, ctypes.c_uint]
    shutil.rmtree(folder)
    return run


def _source(kernel: Kernel, types: Sequence[str], template: Sequence[tuple[str, int | bool]]) -> str:
    header = kernel.header.replace(text("numbers"), "")
    assert header != kernel.header, "the shim stands for numbers.cu"
    header = header.replace(text("warpgroup"), f'#include "{WARPGROUP}"\n')
    body = text(kernel.body).replace("extern __shared__ char shared_[];", "")
    arguments = [*kernel.inputs, *kernel.outputs]
    cluster = int(dict(kernel.defines).get("CLUSTER", "1"))
    lines = [
        f'#include "{SHIM}"',
        header,
        "static void** pointers_; static const int (*shapes_)[8]; static const long (*strides_)[8];",
        "static void kernel_() {",
        *(
            f"  {kind}* {name} = ({kind}*)pointers_[{i}];"
            for i, (kind, name) in enumerate(zip(types, arguments, strict=True))
        ),
        *(
            f"  const int* {name}_shape = shapes_[{i}]; const long* {name}_strides = strides_[{i}];"
            for i, name in enumerate(arguments)
        ),
        *(f"  constexpr {'bool' if isinstance(v, bool) else 'int'} {name} = {str(v).lower()};" for name, v in template),
        body,
        "}",
        'extern "C" const char* run(void** pointers, const int (*shapes)[8], const long (*strides)[8],',
        "                           int x, int y, int z, unsigned seed) {",
        "  pointers_ = pointers; shapes_ = shapes; strides_ = strides;",
        f"  blockDim = {{{kernel.threads}, 1, 1}}; gridDim = {{x, y, z}};",
        f"  for (arriero::phase_ = 0; arriero::phase_ < {kernel.phases}; ++arriero::phase_)",
        f"  for (int k = 0; k < z; ++k) for (int j = 0; j < y; j += {cluster}) for (int i = 0; i < x; ++i) {{",
        "    blockIdx = {i, j, k};",
        f"    if (const char* fault = fibers::run({kernel.threads}, kernel_, seed++, {cluster})) return fault;",
        "  }",
        "  return nullptr;",
        "}",
    ]
    return "\n".join(lines) + "\n"


class Emulated:
    """Takes the place of `Kernel.__call__`: the same lazy-looking call, computed at once on the CPU."""

    def __init__(self) -> None:
        self.seed = 0

    def __call__(
        self,
        kernel: Kernel,
        inputs: Sequence[mx.array],
        template: Mapping[str, int | bool],
        *,
        blocks: tuple[int, int, int],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        self.seed += 1
        held = [_words(mx.contiguous(array) if kernel.contiguous else array) for array in inputs]
        # Poisoned, so that what no thread writes is seen.
        made = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            made.append(np.full((*shape, dtype.size), 0xFF, np.uint8).view(KINDS[dtype]).reshape(shape))
        execute(kernel, held, made, template, blocks=blocks, seed=self.seed)
        return [mx.array(a).view(mx.bfloat16) if a.dtype == np.uint16 else mx.array(a) for a in made]


def _words(array: mx.array) -> np.ndarray:
    """The array's own memory, bfloat16 as 16 bits: what a kernel writes there is in the array."""
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(array, plain)
    return np.asarray(plain)

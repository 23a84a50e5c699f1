"""Which device the arrays live on, the optional extension with CPU kernels, and the GPU that our kernels run on.

Refuses to know models. `ARRIERO_KERNELS=graph` keeps every operation on plain MLX, whatever is installed.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib.metadata import version
from typing import Any, ParamSpec, Protocol, cast

import mlx.core as mx

from arriero.kernels.cuda.gpu import Gpu, available, find, prepare
from arriero.kernels.cuda.probe import probe
from arriero.kernels.metal import gpu as apple

log = logging.getLogger(__name__)

P = ParamSpec("P")

EXTENSION = "arriero_cpu"

if mx.cuda.is_available() and os.environ.get("ARRIERO_KERNELS", "").strip().lower() != "graph":
    prepare()


def on_cpu() -> bool:
    """Whether operations run on the CPU (MLX's default device)."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


class CpuKernels(Protocol):
    """What this room uses of `arriero_cpu`: lazy, and a row's bits don't depend on its company."""

    def supports(self, mode: str, bits: int, group_size: int, x_dtype: mx.Dtype) -> bool: ...
    def matmul(self, x: mx.array, w: mx.array) -> mx.array: ...
    def quantized_matmul(
        self, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, **how: Any
    ) -> mx.array: ...
    def gather_mm(self, x: mx.array, w: mx.array, indices: mx.array) -> mx.array: ...
    def gather_qmm(
        self, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, **how: Any
    ) -> mx.array: ...
    def attention(self, q: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], **how: Any) -> mx.array: ...
    def kv_append(self, buffer: mx.array, update: mx.array, start: int) -> mx.array: ...
    def rms_norm(self, x: mx.array, w: mx.array | None, eps: float) -> mx.array: ...
    def add_rms_norm(self, x: mx.array, r: mx.array, w: mx.array | None, eps: float) -> tuple[mx.array, mx.array]: ...
    def rope(self, x: mx.array, table: mx.array, *, interleaved: bool = False) -> mx.array: ...
    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array: ...
    def geglu(self, gate: mx.array, up: mx.array) -> mx.array: ...
    def gated_delta(
        self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, **how: Any
    ) -> tuple[mx.array, list[list[mx.array]]]: ...
    def depthwise_conv(
        self, x: mx.array, w: mx.array, bias: mx.array | None, **how: Any
    ) -> tuple[mx.array, list[list[mx.array]]]: ...
    def indexed_attention(
        self, q: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], blocks: mx.array, **how: Any
    ) -> mx.array: ...
    def select_blocks(self, q: mx.array, keys: Sequence[mx.array], **how: Any) -> mx.array: ...
    def top_k(self, x: mx.array, k: int) -> mx.array: ...
    def argmax(self, x: mx.array) -> mx.array: ...
    def take_rows(
        self, w: mx.array, scales: mx.array, biases: mx.array | None, ids: mx.array, **how: Any
    ) -> mx.array: ...
    def packable(self, mode: str, bits: int, group_size: int) -> bool: ...
    def pack(self, w: mx.array, scales: mx.array, biases: mx.array | None, **how: Any) -> Any: ...
    def packed_matmul(self, x: mx.array, packed: Any, **how: Any) -> mx.array: ...
    def packed_gather(self, x: mx.array, packed: Any, indices: mx.array, **how: Any) -> mx.array: ...
    def packed_rows(self, packed: Any, ids: mx.array, **how: Any) -> mx.array: ...
    def matrix(self, *what: Any, **how: Any) -> Any: ...
    def attention_part(self, **what: Any) -> Any: ...
    def gated_part(self, **what: Any) -> Any: ...
    def stack(self, layers: Sequence[tuple[Any, Any]]) -> Any: ...
    def probe(self) -> str: ...


@cache
def cpu_extension() -> CpuKernels | None:
    """The package `arriero_cpu` when it is installed and works here, imported and probed once.

    None when `ARRIERO_KERNELS=graph` asks for plain MLX, and with one warning when it is not installed, is of another
    version, or cannot run here.
    """
    if _plain():
        return None
    try:
        extension = cast(CpuKernels, importlib.import_module(EXTENSION))
    except ModuleNotFoundError as error:
        if error.name == EXTENSION:
            log.warning(
                "arriero-cpu is not installed, so plain MLX runs on the CPU (much slower). Install it from the folder "
                "native of the sources (it needs g++ and cmake), or set ARRIERO_KERNELS=graph to be silent about it"
            )
            return None
        _warn(error)
        return None
    except (ImportError, OSError, RuntimeError) as error:
        _warn(error)
        return None
    lacks = [name for name in vars(CpuKernels) if not name.startswith("_") and not hasattr(extension, name)]
    if lacks:
        _warn(AttributeError(f"arriero-cpu is of another version, it lacks {', '.join(lacks)}"))
        return None
    try:
        name = extension.probe()
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        _warn(error)
        return None
    log.info("CPU kernels: arriero-cpu (%s)", name)
    return extension


def native() -> CpuKernels | None:
    """The extension when operations run on the CPU, None on other devices."""
    return cpu_extension() if on_cpu() else None


@cache
def _gpu() -> Gpu | None:
    """The NVIDIA GPU when our kernels work on it, tried once; None with one warning when they don't."""
    if _plain():
        return None
    try:
        found = find()
        probe(found)
    except (RuntimeError, ValueError, OSError) as error:
        log.warning(
            "the CUDA kernels cannot be used, so plain MLX runs instead (slower): %s. Set ARRIERO_KERNELS=graph to be "
            "silent about it",
            error,
        )
        return None
    log.info("CUDA kernels: %d multiprocessors of compute capability %d.%d", found.multiprocessors, *found.capability)
    return found


def cuda() -> Gpu | None:
    """The NVIDIA GPU when operations run on it and our kernels work there, else None."""
    return _gpu() if available() else None


def metal() -> bool:
    """Whether operations run on an Apple GPU and the environment asks for our kernels there."""
    return apple.available() and _metal_wanted()


@cache
def _metal_wanted() -> bool:
    return not _plain() and apple.wanted()


def _plain() -> bool:
    """Whether the environment asks for plain MLX."""
    choice = os.environ.get("ARRIERO_KERNELS", "").strip().lower()
    if choice not in ("", "auto", "graph"):
        log.warning("ARRIERO_KERNELS=%s is not known (graph, auto); using auto", choice)
    return choice == "graph"


def required() -> CpuKernels:
    """The extension, for what only it can compute: weights that are in its layout."""
    extension = native()
    if extension is None:
        raise RuntimeError("the weights were packed for the CPU kernels, which cannot be used on another device")
    return extension


def fused(function: Callable[P, mx.array]) -> Callable[P, mx.array]:
    """An element-wise function, compiled into one kernel on GPUs and run operation by operation on the CPU.

    Compiled CPU code may round otherwise for another number of rows; operations of their own don't.
    """
    compiled: Callable[P, mx.array] = mx.compile(function, shapeless=True)

    @wraps(function)
    def choose(*args: P.args, **kwargs: P.kwargs) -> mx.array:
        return function(*args, **kwargs) if on_cpu() else compiled(*args, **kwargs)

    return choose


def _warn(error: Exception) -> None:
    log.warning(
        "the CPU kernels cannot be used, so plain MLX runs instead (much slower): %s. Reinstall arriero-cpu for mlx "
        "%s, or set ARRIERO_KERNELS=graph to be silent about it",
        error,
        version("mlx"),
    )

"""The NVIDIA GPU that operations run on."""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass

import mlx.core as mx

from arriero.kernels.cuda.compiled import Store, folder_for, use

log = logging.getLogger(__name__)

MULTIPROCESSORS = 16
SHARED_MEMORY_OPTIN = 97
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Numbers of `cuDeviceGetAttribute`. Source: CUDA Driver API, CUdevice_attribute."""

LEAST_CAPABILITY = (8, 0)
"""The first with bfloat16 in its tensor cores and with cache hints."""


COMMAND_GRAPHS = "MLX_USE_CUDA_GRAPHS"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What decides a launch's geometry."""

    multiprocessors: int
    shared_memory: int
    """Bytes that one block may have."""
    capability: tuple[int, int]
    in_place: bool
    """Whether kernels may write into their inputs: MLX's command graphs would not see the order of such writes."""


def find() -> Gpu:
    """Device 0; RuntimeError when there is no driver, or when it is older than the kernels need."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"NVIDIA's driver library could not be loaded: {error}") from None

    def ask(what: int) -> int:
        value = ctypes.c_int()
        _checked(driver.cuDeviceGetAttribute(ctypes.byref(value), what, handle))
        return value.value

    handle = ctypes.c_int()
    _checked(driver.cuInit(0))
    _checked(driver.cuDeviceGet(ctypes.byref(handle), 0))
    capability = (ask(CAPABILITY_MAJOR), ask(CAPABILITY_MINOR))
    if capability < LEAST_CAPABILITY:
        raise RuntimeError(
            "the kernels need an NVIDIA GPU of compute capability {}.{}; this one has {}.{}".format(
                *LEAST_CAPABILITY, *capability
            )
        )
    return Gpu(ask(MULTIPROCESSORS), ask(SHARED_MEMORY_OPTIN), capability, os.environ.get(COMMAND_GRAPHS) == "0")


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"NVIDIA's driver answers with error {status}")


def prepare() -> None:
    """Settle how MLX runs kernels, before it runs the first: compiled code in our own folder, and no command graphs.

    With few long kernels graphs gain nothing (5.4 ms a step without, 6.0 ms with them, H200), and kernels that write
    in place need their order kept. Whoever sets MLX's own variables decides.
    """
    os.environ.setdefault(COMMAND_GRAPHS, "0")
    try:
        capability = find().capability
        folder = folder_for(capability)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        log.warning("compiled CUDA kernels cannot be kept, so each start compiles them anew: %s", error)
        return
    os.environ["MLX_PTX_CACHE_DIR"] = str(folder)
    store = Store(folder, capability)
    store.tidy()
    use(store)


def available() -> bool:
    """Whether this MLX has a CUDA device and uses it by default."""
    return bool(mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu)

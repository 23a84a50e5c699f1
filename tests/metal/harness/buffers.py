"""What the runtime is given: its structures, and the memory of arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal.harness.signature import NP, TYPES


class Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("item", ctypes.c_int32),
        ("shift", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("unwritten", ctypes.c_uint64),
    ]


class RunOptions(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("budget", ctypes.c_uint64),
        ("timeout", ctypes.c_double),
        ("shuffle", ctypes.c_int32),
        ("divergent_simd", ctypes.c_int32),
        ("races", ctypes.c_int32),
        ("cross_tg", ctypes.c_int32),
        ("uninit", ctypes.c_int32),
        ("exited_barrier", ctypes.c_int32),
        ("tg_limit", ctypes.c_int32),
        ("same_site", ctypes.c_int32),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_uint64)
        for n in ("threads", "threadgroups", "switches", "simd_ops", "barriers", "accesses", "tg_bytes")
    ]


class Dispatch(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint32 * 3), ("tg", ctypes.c_uint32 * 3)]


@dataclass
class Input:
    """An array as a kernel sees it: strides in elements, `data` the stretch of memory that it covers."""

    dtype: mx.Dtype
    data: np.ndarray
    shape: tuple[int, ...]
    strides: list[int]
    size: int

    @classmethod
    def of(cls, array: mx.array, contiguous: bool) -> Input:
        """ValueError for negative strides."""
        mx.eval(array)
        plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        held = np.ascontiguousarray(np.array(plain)) if contiguous else np.array(plain, copy=False)
        held = held.reshape(array.shape)
        strides = [stride // held.itemsize for stride in held.strides]
        if not held.flags.c_contiguous and held.size:
            if min(strides) < 0:
                raise ValueError("the harness has no negative strides")
            span = 1 + sum(stride * (size - 1) for stride, size in zip(strides, held.shape, strict=True))
            held = np.lib.stride_tricks.as_strided(held, (span,), (held.itemsize,)).copy()
        return cls(array.dtype, np.ascontiguousarray(held), tuple(array.shape), strides, array.size)

    @property
    def kind(self) -> int:
        """1 in the `constant` address space, 0 in `device`."""
        return 1 if self.size < 8 else 0

    def extra(self, what: str) -> np.ndarray:
        """Its shape, strides or number of dimensions, as MLX passes them."""
        if what == "shape":
            return np.array(self.shape, np.int32)
        if what == "strides":
            return np.array(self.strides, np.int64)
        return np.array([len(self.shape)], np.int32)


def output(shape: Any, dtype: mx.Dtype, init_value: float | None) -> np.ndarray:
    """Memory of an output, bfloat16 as 16 bits."""
    data = np.zeros(shape, NP[dtype])
    if init_value is None:
        return data
    made = mx.array(init_value, mx.float32).astype(dtype)
    data[...] = np.array(made.view(mx.uint16)) if dtype == mx.bfloat16 else init_value
    return data


def array(data: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """An output's memory as MLX's."""
    return mx.array(data).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(data)


def item(dtype: mx.Dtype) -> int:
    """Bytes of one element."""
    return TYPES[dtype][1]

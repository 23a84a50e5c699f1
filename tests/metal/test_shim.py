"""Metal's arithmetic and group functions in C++, against NumPy and MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.harness.kernel import Kernel
from tests.metal.launches import emulated

pytestmark = emulated


def run(source: str, inputs: list[mx.array], dtype: mx.Dtype, shape: tuple[int, ...], **options: Any) -> mx.array:
    """`out` of a body that has i, lane and inputs a, b."""
    threads = inputs[0].size
    head = "const uint i = thread_position_in_grid.x; const uint lane = thread_index_in_simdgroup;\n"
    kernel = Kernel("t", ["a", "b"][: len(inputs)], ["out"], head + source)
    size = {"grid": (threads, 1, 1), "threadgroup": (min(threads, 256), 1, 1)}
    return kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], **size, **options)[0]


def bits(a: mx.array) -> np.ndarray:
    return np.array(a.view(mx.uint16 if a.dtype.size == 2 else mx.uint32))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sixteen_bit_arithmetic_rounds_after_each_operation(dtype: mx.Dtype) -> None:
    a, b = (mx.random.normal((1024,), key=mx.random.key(seed)).astype(dtype) for seed in (0, 1))
    kind = "bfloat16_t" if dtype == mx.bfloat16 else "half"
    made = run(f"{kind} x = a[i] * b[i] + a[i]; out[i] = x / b[i] - a[i];", [a, b], dtype, a.shape)
    assert np.array_equal(bits(made), bits((a * b + a) / b - a))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_numbers_of_sixteen_bits_convert_as_in_mlx(dtype: mx.Dtype) -> None:
    patterns = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint64).astype(np.uint32)
    wide = mx.array(patterns).view(mx.float32)
    kind = "bfloat16_t" if dtype == mx.bfloat16 else "half"
    number = ~np.isnan(np.array(wide))
    made = run(f"out[i] = {kind}(a[i]);", [wide], dtype, wide.shape)
    assert np.array_equal(bits(made)[number], bits(wide.astype(dtype))[number])


def test_group_functions_are_those_of_thirty_two_lanes() -> None:
    x = np.random.default_rng(2).integers(0, 1000, 256).astype(np.int32)
    s, lane = x.reshape(8, 32), np.arange(256) % 32
    first = np.arange(256) - lane
    wanted = {
        "simd_sum(x)": np.repeat(s.sum(1), 32),
        "simd_max(x)": np.repeat(s.max(1), 32),
        "simd_prefix_exclusive_sum(x)": (np.cumsum(s, 1) - s).ravel(),
        "simd_broadcast(x, 7)": np.repeat(s[:, 7], 32),
        "simd_shuffle_xor(x, 5)": x[first + (lane ^ 5)],
        "simd_shuffle_down(x, 3)": np.where(lane > 28, x, x[np.minimum(first + 31, np.arange(256) + 3)]),
        "simd_any(x == a[0])": np.repeat((s == x[0]).any(1), 32),
        "quad_sum(x)": np.repeat(x.reshape(64, 4).sum(1), 4),
    }
    places = "".join(f"out[{n} * 256 + i] = {call};" for n, call in enumerate(wanted))
    for seed in (0, 1):
        made = np.array(run(f"int x = a[i]; {places}", [mx.array(x)], mx.int32, (len(wanted), 256), seed=seed))
        for row, (call, want) in zip(made, wanted.items(), strict=True):
            assert np.array_equal(row, want), call


def test_a_part_of_a_simdgroup_counts_only_its_lanes() -> None:
    assert run("out[i] = simd_sum(1);", [mx.zeros((40,))], mx.int32, (40,)).tolist() == [32] * 32 + [8] * 8


def test_functions_of_one_number() -> None:
    x = np.linspace(0.05, 0.95, 64).astype(np.float32)
    wanted = {
        "metal::exp(x)": np.exp(x),
        "metal::log(x)": np.log(x),
        "metal::tanh(x)": np.tanh(x),
        "metal::rsqrt(x)": x**-0.5,
        "metal::fma(x, x, 1.0f)": x * x + 1,
        "metal::max(x, -INFINITY)": x,
        "metal::abs(x - 0.5f)": np.abs(x - 0.5),
        "as_type<float>(as_type<uint>(x) + 1u)": np.nextafter(x, np.float32(9)),
    }
    places = "".join(f"out[{n} * 64 + i] = {call};" for n, call in enumerate(wanted))
    made = np.array(run(f"float x = a[i]; {places}", [mx.array(x)], mx.float32, (len(wanted), 64)))
    for row, (call, want) in zip(made, wanted.items(), strict=True):
        assert np.allclose(row, want, rtol=2e-6, atol=1e-6), call


def test_atomics_of_a_threadgroup_and_of_the_device() -> None:
    x = mx.array(np.random.default_rng(3).integers(0, 100, 1000).astype(np.int32))
    source = """
    threadgroup atomic_int local;
    if (thread_index_in_threadgroup == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&local, a[thread_position_in_grid.x], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index_in_threadgroup == 0)
      atomic_fetch_add_explicit(&out[0], atomic_load_explicit(&local, memory_order_relaxed), memory_order_relaxed);
    """
    kernel = Kernel("at", ["a"], ["out"], source, atomic_outputs=True)
    size = {"grid": (1000, 1, 1), "threadgroup": (128, 1, 1)}
    made = kernel(inputs=[x], output_shapes=[(3,)], output_dtypes=[mx.int32], init_value=0, **size)[0]
    assert made[0].item() == x.sum().item()

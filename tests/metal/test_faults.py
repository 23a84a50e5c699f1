"""Faults planted in small kernels: each is caught, in every order of threads, by the right check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tests.metal.harness.errors import MetalError
from tests.metal.harness.kernel import Kernel, Options
from tests.metal.launches import caught, emulated

pytestmark = emulated

HEAD = """
threadgroup float buf[256];
const uint i = thread_position_in_threadgroup.x, g = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
"""
SHARED = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE = "threadgroup_barrier(mem_flags::mem_device);"


def body(
    source: str, count: int = 256, group: int = 256, shape: int | None = None, dtype: mx.Dtype = mx.float32, **call: Any
) -> Callable[..., mx.array]:
    """Runs a bare body: input `inp`, output `out`."""
    kernel = Kernel("bug", ["inp"], ["out"], HEAD + source, options=Options())

    def run(seed: int = 0, **options: Any) -> mx.array:
        made = kernel(
            inputs=[mx.arange(count).astype(dtype)],
            output_shapes=[(shape or count,)],
            output_dtypes=[dtype],
            grid=(count, 1, 1),
            threadgroup=(group, 1, 1),
            seed=seed,
            **{**call, **options},
        )
        return made[0]

    return run


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (f"buf[i] = inp[g]; {SHARED} float a = buf[255 - i]; buf[i] = a; out[g] = a;", ("race",)),
        ("buf[i] = inp[g]; out[g] = buf[i ^ 1];", ("race", "uninitialised")),
        (f"out[g] = inp[g]; {SHARED} float a = out[g ^ 7]; {DEVICE} out[g] = a;", ("race",)),
        (
            "buf[i] = inp[g]; simdgroup_barrier(mem_flags::mem_threadgroup); out[g] = buf[i ^ 32];",
            ("race", "uninitialised"),
        ),
        (f"if (i < 100) {{ {SHARED} }} out[g] = inp[g];", ("divergent-barrier",)),
        (f"if (i < 128) {{ {SHARED} }}\nelse {{ {SHARED} }} out[g] = inp[g];", ("divergent-barrier",)),
        (f"for (uint j = 0; j < 1 + i / 128; ++j) {SHARED} out[g] = inp[g];", ("divergent-barrier",)),
        (f"if (g >= 200) return; buf[i] = inp[g]; {SHARED} out[g] = buf[i];", ("divergent-barrier",)),
        ("float s = inp[g]; if (lane < 16) s = simd_sum(s); out[g] = s; s = simd_max(s);", ("divergence",)),
        ("if (lane == 5) return; out[g] = simd_shuffle_xor(inp[g], 1);", ("inactive-lane",)),
        ("out[g] = simd_shuffle(inp[g], lane + 1);", ("bad-lane",)),
        ("out[g] = inp[g + 1];", ("out-of-bounds",)),
        ("out[g] = inp[int(g) - 1];", ("out-of-bounds",)),
        ("out[g] = ((const device float4*)inp)[g / 4 + 1].w;", ("out-of-bounds",)),
        ("float4 v = *(const device float4*)(inp + g % 128); out[g] = v.x;", ("misaligned",)),
        ("((device float*)inp)[g] = 0; out[g] = 1;", ("bad-write",)),
        ("float a[4] = {1, 2, 3, 4}; out[g] = a[g / 60];", ("array-bounds",)),
        (f"if (lane < 31) buf[i] = inp[g]; {SHARED} out[g] = buf[i ^ 1];", ("uninitialised",)),
        ("out[g] += inp[g];", ("uninitialised",)),
        ("if (g != 77) out[g] = inp[g];", ("unwritten-output",)),
        ("out[g] = 100 / (int(g) - 5);", ("crash",)),
    ],
    ids=[
        "no barrier before reuse",
        "no barrier",
        "a barrier for other memory",
        "a barrier of one simdgroup between two",
        "a barrier in a branch",
        "two different barriers",
        "a barrier in loops of different length",
        "a return before a barrier",
        "a sum in a branch",
        "a lane that has returned",
        "a lane that is not there",
        "one past the end",
        "one before the beginning",
        "a wide load past the end",
        "a wide load of odd address",
        "a write to an input",
        "an index past a private array",
        "shared memory nobody wrote",
        "output nobody wrote is read",
        "output nobody writes",
        "division by zero",
    ],
)
def test_a_planted_fault_is_caught(source: str, kinds: tuple[str, ...]) -> None:
    message = caught(kinds, body(source))
    assert "unwritten-output" in kinds or "bug.metal:" in message or "(line 4)" in message


def test_what_the_checks_accept() -> None:
    body(f"buf[i] = inp[g]; {SHARED} out[g] = buf[255 - i];")(seed=3)
    body("buf[i] = inp[g]; simdgroup_barrier(mem_flags::mem_threadgroup); out[g] = buf[i ^ 1];")(seed=3)
    body(f"out[g] = inp[g]; {DEVICE} float a = out[g ^ 7]; {DEVICE} out[g] = a;")(seed=3)
    made = body("out[g] = simd_sum(inp[g]) + simd_shuffle_xor(inp[g], 1);")(seed=3)
    assert made[0].item() == sum(range(32)) + 1


@pytest.mark.parametrize(("group", "shape"), [(256, 8), (32, 8), (1, 128)])
def test_two_threads_that_write_one_place_race_in_one_threadgroup_and_across(group: int, shape: int) -> None:
    caught("race", body(f"out[g % {shape}] += inp[g];", group=group, shape=shape, init_value=0))


def test_a_slice_is_not_aligned_as_wide_loads_need() -> None:
    run = body("float4 v = ((const device float4*)inp)[g / 4]; out[g] = v[g % 4];")
    run()
    caught("misaligned", lambda seed: run(seed, shift_inputs=True))


def test_memory_of_a_threadgroup_does_not_survive_it() -> None:
    source = f"if (threadgroup_position_in_grid.x == 0 || i > 0) buf[i] = inp[g]; {SHARED} out[g] = buf[i ^ 1];"
    caught("uninitialised", body(source, count=512))


def test_infinity_in_fast_functions_becomes_nan_where_the_test_asks() -> None:
    run = body("float m = g > 3 ? -INFINITY : 0.0f; out[g] = metal::fast::exp(m) * inp[g];")
    assert not bool(mx.any(mx.isnan(run())))
    assert bool(mx.any(mx.isnan(run(hostile_fast_math=True))))


@pytest.mark.parametrize(
    ("source", "kind", "options"),
    [
        ("threadgroup float big[8193]; big[i] = inp[g]; out[g] = big[i];", "threadgroup-memory", {}),
        ("while (inp[g] >= 0) out[g] = 1;", "budget", {"budget": 100_000}),
        ("volatile thread int n = 1; while (n) {} out[g] = 0;", "timeout", {"timeout": 0.2}),
    ],
    ids=["too much shared memory", "an endless loop", "an endless loop without memory"],
)
def test_limits_end_a_run(source: str, kind: str, options: dict[str, Any]) -> None:
    caught(kind, lambda seed: body(source)(seed, **options), seeds=[0])


def test_a_threadgroup_of_too_many_threads_is_refused() -> None:
    caught("launch", body("out[g] = 0;", count=2048, group=2048), seeds=[0])


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        ("bfloat16_t v = 1.5f * inp[0]; out[g] = v;", mx.bfloat16),
        ("inp[0] = 1; out[g] = 1;", mx.float32),
        ("double d = inp[0]; out[g] = d;", mx.float32),
        ("out[g] = simd_sum(ulong(inp[0]));", mx.float32),
        ("out[g] = metal::max(1, 2.0f);", mx.float32),
        ("threadgroup float s = 0; out[g] = s;", mx.float32),
    ],
    ids=["float to bfloat", "a const input", "double", "sums of 64 bits", "an ambiguous call", "an initialiser"],
)
def test_what_metal_refuses_does_not_compile(source: str, dtype: mx.Dtype) -> None:
    with pytest.raises(MetalError) as error:
        body(source, dtype=dtype)()
    assert error.value.kind == "compile"

"""Times by the GPU's own clock, without what the host takes to launch.

The device is kept busy while the host submits everything; what ran behind that is then timed between two kernels that
read the device's clock. The kernels' ends and beginnings, a microsecond between two, are in the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.kernels.cuda.source import argument

RUNS = 5
SHORTEST, LONGEST = 0.004, 0.5
"""Seconds that the device is kept busy, at first and at most."""

SOURCE = """
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    unsigned long long const until = now + nanoseconds[0];
    while (now < until) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) stamp[0] = now;
"""
"""Waits for a time and says when it was over. Source: PTX ISA, %globaltimer."""


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="arriero_bench_stamp", input_names=["nanoseconds"], output_names=["stamp"], source=SOURCE
    )


def stamp(seconds: float) -> mx.array:
    """The device's time in nanoseconds after it has waited so long, lazy: the first of the numbers."""
    nanoseconds = argument(mx.array([round(seconds * 1e9)] * 8, mx.uint32))
    mx.eval(nanoseconds)
    made: list[mx.array] = _kernel()(
        inputs=[nanoseconds],
        template=[],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.uint64],
    )
    return made[0]


def device_seconds(run: Callable[[], Sequence[mx.array]], operations: int) -> float:
    """Median time of one of the `operations` that `run` builds, after two rounds that compile and warm up.

    RuntimeError where the host cannot submit them all while the device waits half a second.
    """
    for _ in range(2):
        mx.eval(run())
    busy = SHORTEST
    times: list[float] = []
    while len(times) < RUNS:
        before, after = stamp(busy), stamp(0.0)
        mx.synchronize()
        started = time.perf_counter()
        mx.async_eval(before)  # type: ignore[no-untyped-call]
        outputs = run()
        mx.async_eval(*outputs)  # type: ignore[no-untyped-call]
        mx.async_eval(after)  # type: ignore[no-untyped-call]
        submitted = time.perf_counter() - started
        mx.eval(before, after)
        if submitted < 0.9 * busy:
            times.append(int(np.array(after)[0] - np.array(before)[0]) * 1e-9 / operations)
        elif busy < LONGEST:
            busy *= 2
        else:
            raise RuntimeError(f"{operations} operations were not submitted within {LONGEST} s")
        del outputs
    return statistics.median(times)

"""Packed weights where numbers end, and where several threads use the pool."""

import threading

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import error, f64, normal, same
from test_packed import quantised

FOUR = ("affine", 4, 32, None)
EIGHT = ("affine", 8, 32, 128)


@pytest.mark.parametrize("fmt", [FOUR, EIGHT], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_scale_that_is_no_number_spoils_its_own_column_alone(rng, fmt, bad):
    arrays, how, w = quantised(rng, fmt, 21, 256)
    scales = np.array(arrays[1])
    scales[5, 3] = bad
    x = normal(rng, 9, 256, dtype=mx.bfloat16)
    y = f64(cpu.packed_matmul(x, cpu.pack(arrays[0], mx.array(scales), arrays[2], **how)))
    assert not np.isfinite(y[:, 5]).any()
    others = np.delete(np.arange(21), 5)
    assert error(mx.array(y[:, others].astype(np.float32)), f64(x) @ w[others].T) < 4e-3


@pytest.mark.parametrize("fmt", [FOUR, EIGHT], ids=str)
def test_scales_and_biases_of_zero_give_zeros(rng, fmt):
    arrays, how, _ = quantised(rng, fmt, 21, 256)
    nothing = mx.zeros_like(arrays[1])
    y = cpu.packed_matmul(normal(rng, 3, 256, dtype=mx.float16), cpu.pack(arrays[0], nothing, nothing, **how))
    assert not f64(y).any()


def test_results_beyond_float16_are_infinite_with_their_sign(rng):
    arrays, how, w = quantised(rng, EIGHT, 37, 256)
    x = mx.full((2, 256), 60000.0, mx.float16)
    want = f64(x) @ w.T
    y = f64(cpu.packed_matmul(x, cpu.pack(*arrays, **how)))
    beyond = np.abs(want) > 66000
    assert beyond.any()
    assert np.array_equal(y[beyond], np.sign(want[beyond]) * np.inf)
    assert np.isfinite(y[np.abs(want) < 65000]).all()


@pytest.mark.parametrize("fmt", [FOUR, EIGHT], ids=str)
def test_activations_of_any_size_are_multiplied_and_denormal_ones_are_zero(rng, fmt):
    arrays, how, w = quantised(rng, fmt, 37, 256)
    packed = cpu.pack(*arrays, **how)
    x = np.zeros((5, 256), np.float32)
    x[0, 7] = 1e37
    x[1, 7], x[1, 100] = -1e37, 1e-3
    x[2] = 1e-39
    x[3, ::2] = 1e-29
    x = mx.array(x).astype(mx.bfloat16)
    y, want = cpu.packed_matmul(x, packed), f64(x) @ (w / 64).T
    small = cpu.packed_matmul(x, packed, global_scale=1 / 64)
    for row in (0, 1, 3):
        assert error(small[row], want[row]) < 4e-3
    assert not f64(y[2]).any()
    assert not f64(y[4]).any()


def test_columns_of_a_larger_array_are_multiplied(rng):
    arrays, how, _ = quantised(rng, FOUR, 5, 128)
    packed = cpu.pack(*arrays, **how)
    whole = normal(rng, 6, 3, 256, dtype=mx.bfloat16)
    part = whole[::2, 1, 128:]
    assert same(
        cpu.packed_matmul(part, packed),
        cpu.packed_matmul(mx.array(np.array(part.astype(mx.float32))).astype(mx.bfloat16), packed),
    )
    turned = normal(rng, 128, 7, dtype=mx.bfloat16).T
    assert same(cpu.packed_matmul(turned, packed), cpu.packed_matmul(mx.contiguous(turned), packed))


def test_the_pool_changes_its_size_while_threads_pack_and_multiply(rng):
    arrays, how, _ = quantised(rng, FOUR, 523, 512)
    mx.eval(arrays)
    x = normal(rng, 9, 512, dtype=mx.bfloat16)
    want = np.array(cpu.packed_matmul(x, cpu.pack(*arrays, **how)).astype(mx.float32))
    mx.eval(x)
    wrong, before = [], cpu.threads()

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                got = np.array(cpu.packed_matmul(x, cpu.pack(*arrays, **how)).astype(mx.float32))
                if not np.array_equal(got, want):
                    wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    size = 0
    while any(t.is_alive() for t in threads):
        size = size % 4 + 1
        cpu.set_threads(size)
        threads[0].join(0.002)
    cpu.set_threads(before)
    assert not wrong

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, TOLERANCE, error, f64, normal, same


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [1, 7, 64, 576, 1030])
def test_norms(rng, dtype, size):
    x, r = normal(rng, 37, size, dtype=dtype), normal(rng, 37, size, dtype=dtype)
    for w in (normal(rng, size, dtype=dtype), normal(rng, size), None):
        gain = 1 if w is None else f64(w)
        y = cpu.rms_norm(x, w, 1e-5)
        want = f64(x) / np.sqrt(np.mean(f64(x) ** 2, -1, keepdims=True) + 1e-5) * gain
        assert error(y, want) < TOLERANCE[dtype]
        total, normed = cpu.add_rms_norm(x, r, w, 1e-5)
        assert same(total, x + r)
        assert same(normed, cpu.rms_norm(x + r, w, 1e-5))
        for start, n in ((0, 1), (5, 3), (20, 17)):
            assert same(cpu.rms_norm(x[start : start + n], w, 1e-5), y[start : start + n])
    assert same(cpu.rms_norm(x[:, ::-1], None, 1e-5), cpu.rms_norm(mx.contiguous(x[:, ::-1]), None, 1e-5))
    assert cpu.rms_norm(x[:0], None, 1e-5).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (80, 32), (96, 72), (24, 6), (256, 256)])
def test_rope(rng, dtype, interleaved, dim, rot):
    x = normal(rng, 11, 3, dim, dtype=dtype)
    at = rng.integers(0, 5000, 11)
    freqs = 10000.0 ** (-np.arange(rot // 2) / (rot // 2))
    freqs32 = mx.array(freqs.astype(np.float32))
    angle = at[:, None, None] * f64(freqs32)
    cos, sin = np.cos(angle) * 1.25, np.sin(angle) * 1.25
    want = f64(x)
    a, b = (slice(0, rot, 2), slice(1, rot, 2)) if interleaved else (slice(0, rot // 2), slice(rot // 2, rot))
    u, v = want[..., a].copy(), want[..., b].copy()
    want[..., a], want[..., b] = u * cos - v * sin, u * sin + v * cos
    table = cpu.rope_table(mx.array(at), freqs32, 1.25)
    y = cpu.rope(x, table, interleaved=interleaved)
    assert y.dtype == dtype
    assert error(y, want) < TOLERANCE[dtype]
    full = cpu.rope_table(mx.arange(5000), freqs32, 1.25)
    assert same(cpu.rope(x, full, mx.array(at), interleaved=interleaved), y)
    turned = mx.contiguous(x.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert same(cpu.rope(turned, table, interleaved=interleaved), y)
    assert cpu.rope(x[:0], table[:0]).shape == (0, 3, dim)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gated(rng, dtype):
    both = normal(rng, 33, 2 * 131, dtype=dtype) * 4
    g, u = both[:, :131], both[:, 131:]
    silu = f64(g) / (1 + np.exp(-f64(g)))
    gelu = 0.5 * f64(g) * (1 + np.tanh(np.sqrt(2 / np.pi) * (f64(g) + 0.044715 * f64(g) ** 3)))
    for f, want in ((cpu.swiglu, silu), (cpu.geglu, gelu)):
        y = f(g, u)
        assert error(y, want * f64(u)) < TOLERANCE[dtype]
        assert same(f(g[4:5], u[4:5]), y[4:5])
        assert same(f(mx.contiguous(g), mx.contiguous(u)), y)
        assert f(g[:0], u[:0]).shape == (0, 131)
        extremes = mx.array([[-200.0, 200.0, 0.0, -1e4]]).astype(dtype)
        assert np.allclose(f64(f(extremes, mx.ones_like(extremes))), f64(mx.array([[0.0, 200.0, 0.0, 0.0]])), atol=1e-6)
        bad = mx.array([[np.nan, np.inf, 1.0]]).astype(dtype)
        out = f64(f(bad, mx.ones_like(bad)))
        assert not np.isfinite(out[0, :2]).any()
        assert np.isfinite(out[0, 2])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_argmax(rng, dtype):
    for rows, n in ((1, 1), (3, 5), (40, 513), (1, 100003)):
        x = normal(rng, rows, n, dtype=dtype)
        y = cpu.argmax(x)
        assert y.dtype == mx.uint32
        assert np.array_equal(np.array(y), np.argmax(f64(x), -1))
    ties = mx.array([[1.0, 3.0, 2.0, 3.0] + [0.0] * 40]).astype(dtype)
    assert cpu.argmax(ties).item() == 1
    holes = mx.array([[np.nan, -5.0, np.nan, -1.0] + [-9.0] * 40]).astype(dtype)
    assert cpu.argmax(holes).item() == 3
    assert cpu.argmax(mx.full((50,), -np.inf, dtype)).item() == 0

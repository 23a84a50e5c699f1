"""Random shapes, dtypes and strides against NumPy. ARRIERO_FUZZ_EXAMPLES asks for more than the usual few."""

from __future__ import annotations

import os

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
from helpers import TOLERANCE, error, f64, multiply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("ARRIERO_FUZZ_EXAMPLES", "40"))
fuzz = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 40, suppress_health_check=list(HealthCheck)
)
dtypes = st.sampled_from(list(TOLERANCE))
small = st.integers(0, 9)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...], dtype: mx.Dtype, *, dense_last: bool = False) -> mx.array:
    """Normal values of this shape: cut out of something larger, with steps, reversed, permuted or broadcast."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if draw(st.booleans()):
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    axes = range(len(shape))
    before = [draw(st.integers(0, 2)) for _ in axes]
    step = [draw(st.sampled_from([1, 1, 2, -1])) for _ in axes]
    spread = [draw(st.booleans()) and draw(st.booleans()) for _ in axes]
    order = draw(st.permutations(list(axes)))
    if dense_last and shape:
        step[-1], spread[-1] = 1, False
        order = [a for a in order if a != len(shape) - 1] + [len(shape) - 1]
    full = [1 if spread[a] else before[a] + shape[a] * abs(step[a]) + 1 for a in axes]
    base = mx.array(rng.standard_normal([full[a] for a in order], dtype=np.float32)).astype(dtype)
    x = mx.transpose(base, [order.index(a) for a in axes]) if shape else base
    cuts = []
    for a in axes:
        if spread[a]:
            cuts.append(slice(0, 1))
        elif step[a] == -1:
            cuts.append(slice(before[a] + shape[a] - 1, before[a] - 1 if before[a] else None, -1))
        else:
            cuts.append(slice(before[a], before[a] + shape[a] * step[a], step[a]))
        if shape[a] == 0:
            cuts[-1] = slice(0, 0)
    x = mx.broadcast_to(x[tuple(cuts)], shape)
    assert x.shape == shape
    return x


@st.composite
def rows_of(draw: st.DrawFn, k: int, dtype: mx.Dtype) -> mx.array:
    lead = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=2)))
    if draw(st.booleans()):
        lead = (*lead, draw(st.integers(10, 40)))
    return draw(arrays((*lead, k), dtype))


def product_error(y: mx.array, x: np.ndarray, w: np.ndarray) -> float:
    """As `error`, but never relative to less than what such vectors usually yield: a few outputs may cancel out."""
    want = x @ w.T
    assert y.shape == want.shape
    if want.size == 0 or not x.any() or not w.any():
        return float(np.abs(f64(y)).sum())
    usual = np.linalg.norm(x, axis=-1).max() * np.linalg.norm(w) / np.sqrt(x.shape[-1])
    rows = np.linalg.norm(f64(y) - want, axis=-1).max()
    return float(rows / max(usual, np.linalg.norm(want, axis=-1).max()))


@fuzz
@given(st.data())
def test_dense_products(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 300))
    x = data.draw(rows_of(k, data.draw(dtypes)))
    w = data.draw(arrays((n, k), data.draw(dtypes)))
    y = cpu.matmul(x, w)
    assert y.dtype == x.dtype
    assert product_error(y, f64(x), f64(w)) < TOLERANCE[x.dtype]


@fuzz
@given(st.data())
def test_quantised_products(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["affine", "affine", "nvfp4", "mxfp4", "mxfp8"]))
    group = {"affine": data.draw(st.sampled_from([32, 64, 128])), "nvfp4": 16}.get(mode, 32)
    bits = data.draw(st.sampled_from([2, 3, 4, 5, 6, 8])) if mode == "affine" else 8 if mode == "mxfp8" else 4
    n, k = data.draw(st.integers(1, 70)), group * data.draw(st.integers(1, 6))
    kind = {"group_size": group, "bits": bits, "mode": mode}
    q = mx.quantize(data.draw(arrays((n + 2, k + (-k) % 32), mx.float32)), **kind)
    q = tuple(a[1 : n + 1, : a.shape[1] * k // (k + (-k) % 32)] for a in q)
    w = f64(mx.dequantize(*(mx.contiguous(a) for a in q), dtype=mx.float32, **kind)) if k % 32 == 0 else None
    if w is None:
        full = mx.dequantize(*(mx.pad(a, [(0, 0), (0, a.shape[1] // (k // 16))]) for a in q), dtype=mx.float32, **kind)
        w = f64(full)[:, :k]
    x = data.draw(rows_of(k, data.draw(dtypes)))
    exact = data.draw(st.booleans())
    y = multiply(x, *q, exact=exact, **kind)
    assert y.dtype == x.dtype
    assert product_error(y, f64(x), w) < (TOLERANCE[x.dtype] if exact or x.dtype == mx.float32 else 2e-2)


@fuzz
@given(st.data())
def test_experts(data: st.DataObject) -> None:
    experts, n, k, t = (data.draw(st.integers(1, m)) for m in (6, 40, 90, 40))
    x = data.draw(arrays((t, k), data.draw(dtypes)))
    w = data.draw(arrays((experts, n, k), data.draw(dtypes)))
    shape = (t,) if data.draw(st.booleans()) else (t, data.draw(st.integers(1, 3)))
    index = np.random.default_rng(data.draw(small)).integers(0, experts, shape)
    y = cpu.gather_mm(x, w, mx.array(index))
    want = np.einsum("tk,t...nk->t...n", f64(x), f64(w)[index])
    assert y.shape == want.shape
    usual = np.linalg.norm(f64(x), axis=-1).max() * np.linalg.norm(f64(w), axis=-1).max()
    assert np.abs(f64(y) - want).max() < TOLERANCE[x.dtype] * usual


def softmax_rows(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float) -> np.ndarray:
    """q [T, Hq, D], k and v [Hkv, n, D], seen [T, n]."""
    rep = q.shape[1] // k.shape[0]
    s = np.einsum("thd,hnd->thn", q, np.repeat(k, rep, 0)) * scale
    s = np.where(seen[:, None, :], s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True, initial=-1e30)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    e = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return np.einsum("thn,hnd->thd", e, np.repeat(v, rep, 0))


@fuzz
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    dtype, kv = data.draw(dtypes), data.draw(dtypes)
    heads, rep = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    d, dv = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
    window = data.draw(st.none() | st.integers(1, 300))
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    q = data.draw(arrays((sum(lengths), heads * rep, d), dtype))
    keys, values, counts, positions, bases, want = [], [], [], [], [], []
    for i, n in enumerate(lengths):
        count = n + data.draw(st.integers(0, 400))
        cap = count + data.draw(st.integers(0, 3))
        keys.append(data.draw(arrays((1, heads, cap, d), kv)))
        values.append(data.draw(arrays((1, heads, cap, dv), kv)))
        counts.append(count)
        bases.append(data.draw(st.integers(0, 600)))
        positions.append(bases[-1] + count - n)
        at = positions[-1] + np.arange(n)[:, None]
        key = bases[-1] + np.arange(count)[None]
        seen = (key <= at) & (key > at - (window or 10**9))
        rows = f64(q)[sum(lengths[:i]) : sum(lengths[: i + 1])]
        want.append(softmax_rows(rows, f64(keys[-1])[0, :, :count], f64(values[-1])[0, :, :count], seen, d**-0.5))
    y = cpu.attention(
        q, keys, values, scale=d**-0.5, lengths=lengths, positions=positions, counts=counts, bases=bases, window=window
    )
    expected = np.concatenate(want)
    assert y.shape == expected.shape
    if expected.any():
        assert error(y, expected) < max(TOLERANCE[dtype], 4e-6)


@fuzz
@given(st.data())
def test_small_operations(data: st.DataObject) -> None:
    dtype = data.draw(dtypes)
    n = data.draw(st.integers(1, 300))
    x = data.draw(rows_of(n, dtype))
    r = data.draw(arrays(x.shape, dtype))
    w = data.draw(arrays((n,), data.draw(dtypes)))
    total, normed = cpu.add_rms_norm(x, r, w, 1e-5)
    s = f64(total)
    assert error(total, f64(x) + f64(r)) < TOLERANCE[dtype]
    want = s / np.sqrt(np.mean(s**2, -1, keepdims=True) + 1e-5) * f64(w)
    assert error(normed, want) < TOLERANCE[dtype]
    gate = f64(x)
    with np.errstate(over="ignore"):
        assert error(cpu.swiglu(x, r), gate / (1 + np.exp(-gate)) * f64(r)) < TOLERANCE[dtype]
    assert np.array_equal(np.array(cpu.argmax(x)), np.argmax(gate, axis=-1))


@fuzz
@given(st.data())
def test_rotary_positions(data: st.DataObject) -> None:
    dtype = data.draw(dtypes)
    t, h, d = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 3)), data.draw(st.integers(2, 140))
    half = data.draw(st.integers(1, d // 2))
    x = data.draw(arrays((t, h, d), dtype))
    interleaved = data.draw(st.booleans())
    positions = np.random.default_rng(data.draw(small)).integers(0, 9000, t)
    freqs = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    y = cpu.rope(x, cpu.rope_table(mx.array(positions), mx.array(freqs)), interleaved=interleaved)
    angle = (positions[:, None] * freqs.astype(np.float64))[:, None]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    want = f64(x)
    a, b = want[..., first].copy(), want[..., second].copy()
    want[..., first] = a * np.cos(angle) - b * np.sin(angle)
    want[..., second] = a * np.sin(angle) + b * np.cos(angle)
    assert error(y, want) < TOLERANCE[dtype]


@fuzz
@given(st.data())
def test_cache_appends(data: st.DataObject) -> None:
    heads, cap, d = (data.draw(st.integers(1, m)) for m in (3, 20, 20))
    t = data.draw(st.integers(0, cap))
    start = data.draw(st.integers(0, cap - t))
    buffer = mx.array(np.random.default_rng(1).standard_normal((1, heads, cap, d), dtype=np.float32))
    packed = data.draw(st.booleans())
    update = data.draw(arrays((t, heads, d) if packed else (1, heads, t, d), mx.float32))
    want = np.array(buffer)
    want[0, :, start : start + t] = np.array(update).transpose(1, 0, 2) if packed else np.array(update)[0]
    assert np.array_equal(np.array(cpu.kv_append(buffer, update, start)), want)

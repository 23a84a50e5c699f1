import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, TOLERANCE, error, f64, gather, multiply, normal, same

FORMATS = [("affine", b, g) for b in (1, 2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
FORMATS += [("nvfp4", 4, 16), ("mxfp4", 4, 32), ("mxfp8", 8, 32)]
IDS = [f"{m}{b}g{g}" for m, b, g in FORMATS]


def quantise(rng, n, k, mode, bits, group, scale_dtype=mx.float32):
    w = normal(rng, n, k)
    q = mx.quantize(w, group_size=group, bits=bits, mode=mode)
    if mode != "affine":
        return q, f64(mx.dequantize(*q, group_size=group, bits=bits, mode=mode, dtype=mx.float32))
    q = (q[0], q[1].astype(scale_dtype), q[2].astype(scale_dtype))
    f32 = (q[0], q[1].astype(mx.float32), q[2].astype(mx.float32))
    return q, f64(mx.dequantize(*f32, group_size=group, bits=bits))


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_quantised(rng, fmt, dtype):
    mode, bits, group = fmt
    assert cpu.supports(mode, bits, group, dtype) != cpu.packable(mode, bits, group)
    for n, k in ((1, 128), (37, 384), (66, 640)):
        q, w = quantise(rng, n, k, mode, bits, group)
        x = normal(rng, 21, k, dtype=dtype)
        for exact in (True, False):
            for m in (1, 3, 21):
                y = multiply(x[:m], *q, group_size=group, bits=bits, mode=mode, exact=exact)
                assert y.dtype == dtype
                tolerance = TOLERANCE[dtype] if exact or dtype == mx.float32 else 2e-2
                assert error(y, f64(x[:m]) @ w.T) < tolerance, (n, k, m, exact)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_quantised_row_does_not_depend_on_its_batch(rng, fmt, dtype):
    mode, bits, group = fmt
    q, _ = quantise(rng, 70, 640, mode, bits, group)
    x = normal(rng, 270, 640, dtype=dtype)
    kind = {"group_size": group, "bits": bits, "mode": mode}
    whole = multiply(x, *q, **kind)
    for start, m in ((0, 1), (17, 1), (255, 2), (256, 3), (100, 4), (3, 5), (9, 6), (0, 16), (7, 33), (261, 9)):
        assert same(multiply(x[start : start + m], *q, **kind), whole[start : start + m]), (start, m)


@pytest.mark.parametrize("scale_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_scales_of_any_float_type(rng, scale_dtype, dtype, bits):
    q, w = quantise(rng, 40, 256, "affine", bits, 32, scale_dtype)
    x = normal(rng, 9, 256, dtype=dtype)
    for m in (1, 9):
        for exact in (True, False):
            y = multiply(x[:m], *q, group_size=32, bits=bits, mode="affine", exact=exact)
            tolerance = TOLERANCE[dtype] if exact or dtype == mx.float32 else 2e-2
            assert error(y, f64(x[:m]) @ w.T) < tolerance


def test_mxfp8_equals_the_dense_product_with_dequantised_weights(rng):
    q, w = quantise(rng, 33, 512, "mxfp8", 8, 32)
    x = normal(rng, 20, 512)
    for m in (1, 8, 20):
        got = cpu.quantized_matmul(x[:m], *q, group_size=32, bits=8, mode="mxfp8")
        assert same(got, cpu.matmul(x[:m], mx.array(w.astype(np.float32))))


@pytest.mark.parametrize("w_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dense(rng, w_dtype, dtype):
    for n, k in ((1, 1), (5, 7), (37, 99), (66, 1027), (130, 64)):
        w, x = normal(rng, n, k, dtype=w_dtype), normal(rng, 270, k, dtype=dtype)
        whole = cpu.matmul(x, w)
        assert whole.dtype == dtype
        assert error(whole, f64(x) @ f64(w).T) < TOLERANCE[dtype], (n, k)
        for start, m in ((0, 1), (3, 2), (5, 3), (255, 4), (1, 5), (250, 16)):
            assert same(cpu.matmul(x[start : start + m], w), whole[start : start + m]), (n, k, m)


def test_odd_number_of_nvfp4_groups(rng):
    q, w = quantise(rng, 21, 256, "nvfp4", 4, 16)
    q, w = (q[0][:, :26], q[1][:, :13]), w[:, :208]
    for dtype in DTYPES.values():
        x = normal(rng, 19, 208, dtype=dtype)
        whole = multiply(x, *q, group_size=16, bits=4, mode="nvfp4")
        assert error(whole, f64(x) @ w.T) < TOLERANCE[dtype]
        assert same(multiply(x[3:4], *q, group_size=16, bits=4, mode="nvfp4"), whole[3:4])
        fast = multiply(x, *q, group_size=16, bits=4, mode="nvfp4", exact=False)
        assert error(fast, f64(x) @ w.T) < 2e-2


@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_global_scale(rng, mode, bits, group):
    q, w = quantise(rng, 24, 128, mode, bits, group)
    x = normal(rng, 6, 128)
    for scale in (0.37, mx.array([0.37])):
        y = multiply(x, *q, group_size=group, bits=bits, mode=mode, global_scale=scale)
        assert error(y, f64(x) @ w.T * 0.37) < 2e-6
    scale = rng.uniform(0.5, 2.0, 24).astype(np.float32)
    x = normal(rng, 20, 128, dtype=mx.bfloat16)
    for m, exact in ((1, True), (20, True), (20, False)):
        how = {"group_size": group, "bits": bits, "mode": mode, "exact": exact}
        y = multiply(x[:m], *q, global_scale=mx.array(scale), **how)
        assert error(y, f64(x[:m]) @ w.T * scale) < (4e-3 if exact else 2e-2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("exact", [True, False])
def test_non_finite_activations_come_through(rng, value, dtype, exact):
    q, _ = quantise(rng, 20, 128, "affine", 4, 32)
    x = f64(normal(rng, 40, 128))
    x[5, 77] = value
    x = mx.array(x.astype(np.float32)).astype(dtype)
    for rows in (x, x[5:6], x[4:7]):
        y = f64(multiply(rows, *q, group_size=32, bits=4, mode="affine", exact=exact))
        hit = 5 if len(y) == 40 else len(y) // 2
        assert not np.isfinite(y[hit]).any()
        assert np.isfinite(np.delete(y, hit, axis=0)).all()
        assert not np.isfinite(f64(cpu.matmul(rows, mx.ones((3, 128))))[hit]).any()


def test_many_rows_of_the_fast_setting(rng):
    q, w = quantise(rng, 40, 192, "affine", 4, 64)
    x = normal(rng, 1100, 192, dtype=mx.bfloat16)
    y = multiply(x, *q, group_size=64, bits=4, exact=False)
    assert error(y, f64(x) @ w.T) < 2e-2


def test_shapes_strides_and_sizes(rng):
    q, w = quantise(rng, 24, 128, "affine", 4, 32)
    kind = {"group_size": 32, "bits": 4, "mode": "affine"}
    x = normal(rng, 2, 3, 5, 128)
    assert error(multiply(x, *q, **kind), f64(x) @ w.T) < 2e-6
    assert error(multiply(x[0, 0, 0], *q, **kind), f64(x[0, 0, 0]) @ w.T) < 2e-6
    t = normal(rng, 128, 6).T
    assert error(multiply(t, *q, **kind), f64(t) @ w.T) < 2e-6
    wide = normal(rng, 6, 256)
    for view in (wide[:, ::2], wide[:, 1:129], wide[::-1, :128], mx.broadcast_to(wide[:1, :128], (6, 128))):
        assert error(multiply(view, *q, **kind), f64(view) @ w.T) < 2e-6
        assert error(cpu.matmul(view, view), f64(view) @ f64(view).T) < 2e-6
    part = tuple(a[3:11] for a in q)
    assert error(multiply(x[0, 0], *part, **kind), f64(x[0, 0]) @ w[3:11].T) < 2e-6
    assert multiply(x[:, :0], *q, **kind).shape == (2, 0, 5, 24)
    assert np.array_equal(f64(cpu.matmul(mx.zeros((2, 0)), mx.zeros((3, 0)))), np.zeros((2, 3)))
    odd = mx.array(np.frombuffer(b"\0" * 2 + np.arange(8 * 130, dtype=np.uint16).tobytes(), np.uint16)[1:])
    bf = (odd % 7).astype(mx.bfloat16).reshape(8, 130)
    assert error(cpu.matmul(bf[:, 1:], bf[:, 1:]), f64(bf[:, 1:]) @ f64(bf[:, 1:]).T) < 4e-3


def test_refusals(rng):
    q, _ = quantise(rng, 24, 128, "mxfp8", 8, 32)
    x = normal(rng, 2, 128)
    kind = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    assert cpu.supports("mxfp8", 8, 32, mx.float32)
    assert not cpu.supports("mxfp8", 8, 64, mx.float32)
    assert not cpu.supports("affine", 4, 32, mx.float32)
    assert not cpu.supports("other", 8, 32, mx.float32)
    assert not cpu.supports("mxfp8", 8, 32, mx.int32)
    for arguments, other in (
        ((x, *q), {"bits": 7}),
        ((x, *q), {"group_size": 64}),
        ((x[:, :64], *q), {}),
        ((x, *q, q[1]), {}),
        ((x, q[0], q[1].astype(mx.float16)), {}),
    ):
        with pytest.raises(ValueError, match="arriero_cpu"):
            cpu.quantized_matmul(*arguments, **(kind | other))
    affine, _ = quantise(rng, 24, 128, "affine", 4, 32)
    how = {"group_size": 32, "bits": 4}
    for call in (
        lambda: cpu.quantized_matmul(x, *affine, **how),
        lambda: cpu.gather_qmm(x, *(a[None] for a in affine), indices=mx.array([0, 0]), **how),
        lambda: cpu.take_rows(*affine, mx.array([0]), dtype=mx.float32, **how),
        lambda: cpu.matrix(*affine, **how),
    ):
        with pytest.raises(ValueError, match=r"only mxfp8 is multiplied as it lies; pack\(\)"):
            call()
    with pytest.raises(ValueError, match="arriero_cpu"):
        cpu.matmul(x, mx.zeros((3, 64)))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_experts(rng, dtype, mode, bits, group):
    experts, n, k = 5, 20, 128
    parts = [quantise(rng, n, k, mode, bits, group) for _ in range(experts)]
    q = tuple(mx.stack(a) for a in zip(*(p[0] for p in parts), strict=True))
    w = np.stack([p[1] for p in parts])
    scale = np.array([1.0, 0.5, 2.0, 0.25, 3.0])
    x = normal(rng, 31, k, dtype=dtype)
    kind = {"group_size": group, "bits": bits, "mode": mode}
    for shape in ((31,), (31, 3)):
        index = rng.integers(0, experts, shape)
        y = gather(x, *q, indices=mx.array(index), global_scale=mx.array(scale.astype(np.float32)), **kind)
        want = np.einsum("tk,t...nk->t...n", f64(x), w[index] * scale[index][..., None, None])
        assert error(y.reshape(-1, n), want.reshape(-1, n)) < TOLERANCE[dtype]
        one = multiply(x[4:5], *(a[int(index.flat[4 * (index.ndim * 2 - 1)])] for a in q), **kind)
        assert same(gather(x, *q, indices=mx.array(index), **kind).reshape(31, -1, n)[4, :1], one)
        halved = gather(x, *q, indices=mx.array(index), global_scale=0.5, **kind)
        assert same(halved, gather(x, *q, indices=mx.array(index), global_scale=mx.full((5,), 0.5), **kind))
        fast = gather(x, *q, indices=mx.array(index), exact=False, **kind)
        want = np.einsum("tk,t...nk->t...n", f64(x), w[index])
        assert error(fast.reshape(-1, n), want.reshape(-1, n)) < 2e-2
        dense = mx.array(w.astype(np.float32))
        y = cpu.gather_mm(x, dense, mx.array(index))
        want = np.einsum("tk,t...nk->t...n", f64(x), w[index])
        assert error(y.reshape(-1, n), want.reshape(-1, n)) < TOLERANCE[dtype]


def test_lazy_compiled_and_pipelined(rng):
    q, _ = quantise(rng, 64, 128, "affine", 4, 32)

    def f(a):
        y = multiply(a.T * 2, *q, group_size=32, bits=4, mode="affine")
        return mx.sin(y + 1) * cpu.rms_norm(y, None, 1e-5)

    a = normal(rng, 128, 3)
    want = f(a)
    got = [mx.compile(f)(a), f(a)]
    mx.async_eval(got)
    assert error(got[0], f64(want)) < 1e-5
    assert same(got[1], want)

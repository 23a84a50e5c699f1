"""Packed weights against float64, in every format."""

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, TOLERANCE, error, f64, normal, same

# mode, bits, group, zero: codes less zero times scale, None: with biases of their own
FORMATS = [
    ("affine", 1, 32, None),
    ("affine", 2, 64, None),
    ("affine", 3, 32, None),
    ("affine", 4, 32, None),
    ("affine", 4, 128, 8),
    ("affine", 5, 32, 16),
    ("affine", 6, 64, None),
    ("affine", 8, 32, 128),
    ("affine", 8, 64, None),
    ("nvfp4", 4, 16, None),
    ("mxfp4", 4, 32, None),
]


def quantised(rng, fmt, *shape, dtype=mx.float16):
    """The arrays in MLX's layout, the format's keywords, and the values in float64."""
    mode, bits, group, zero = fmt
    how = {"group_size": group, "bits": bits, "mode": mode}
    arrays = list(mx.quantize(normal(rng, *shape), **how))
    if mode == "affine":
        arrays[1:] = [a.astype(dtype) for a in arrays[1:]]
        if zero is not None:
            arrays[2] = -zero * arrays[1].astype(mx.float32)
            arrays[2] = arrays[2].astype(dtype)
    whole = [a.astype(mx.float32) if mode == "affine" and i else a for i, a in enumerate(arrays)]
    return arrays, how, f64(mx.dequantize(*whole, **how, dtype=mx.float32))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_products_rows_are_near_and_do_not_depend_on_each_other(rng, fmt, dtype):
    for n, k in ((1, 128), (37, 640), (83, 256)):
        arrays, how, w = quantised(rng, fmt, n, k, dtype=dtype)
        packed = cpu.pack(*arrays, **how)
        assert (packed.rows, packed.columns, packed.experts) == (n, k, 0)
        assert packed.symmetric or fmt[3] is None
        x = normal(rng, 40, k, dtype=dtype)
        whole = cpu.packed_matmul(x, packed)
        assert whole.dtype == dtype
        assert error(whole, f64(x) @ w.T) < TOLERANCE[dtype]
        for first, rows in ((0, 1), (1, 2), (4, 3), (5, 5), (32, 8), (3, 16), (9, 17)):
            assert same(cpu.packed_matmul(x[first : first + rows], packed), whole[first : first + rows])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_fast_products(rng, fmt, dtype):
    arrays, how, w = quantised(rng, fmt, 37, 640)
    packed = cpu.pack(*arrays, **how)
    x = normal(rng, 40, 640, dtype=dtype)
    fast = cpu.packed_matmul(x, packed, exact=False)
    assert error(fast, f64(x) @ w.T) < 1.2e-2
    assert same(cpu.packed_matmul(x[3:17], packed, exact=False), fast[3:17])
    assert same(cpu.packed_matmul(x[:12], packed, exact=False), cpu.packed_matmul(x[:12], packed))
    x = x.astype(mx.float32)
    assert same(cpu.packed_matmul(x, packed, exact=False), cpu.packed_matmul(x, packed))


@pytest.mark.parametrize(
    "mixed", [(mx.float32, mx.bfloat16), (mx.bfloat16, mx.float32), (mx.bfloat16, mx.float16)], ids=str
)
def test_scales_of_another_dtype_than_x(rng, mixed):
    xt, wt = mixed
    arrays, how, w = quantised(rng, ("affine", 4, 32, None), 37, 640, dtype=wt)
    x = normal(rng, 9, 640, dtype=xt)
    assert error(cpu.packed_matmul(x, cpu.pack(*arrays, **how)), f64(x) @ w.T) < TOLERANCE[xt]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_experts(rng, fmt, dtype):
    arrays, how, w = quantised(rng, fmt, 5, 21, 256)
    packed = cpu.pack(*arrays, **how)
    assert packed.experts == 5
    scales = np.array([1, 0.5, 2, 0.25, 3], np.float32)
    for tokens in (1, 30):
        x = normal(rng, tokens, 256, dtype=dtype)
        for index in (rng.integers(0, 5, tokens), np.sort(rng.integers(0, 5, (tokens, 3)), 0)):
            y = cpu.packed_gather(x, packed, mx.array(index), global_scale=mx.array(scales))
            want = np.einsum("tk,t...nk->t...n", f64(x), w[index] * scales[index][..., None, None])
            assert error(y.reshape(-1, 21), want.reshape(-1, 21)) < TOLERANCE[dtype]
    one = cpu.packed_gather(x[:1], packed, mx.array([[2, 0]]), global_scale=0.5)
    for i, e in enumerate((2, 0)):
        single = cpu.pack(*(a[e] for a in arrays), **how)
        assert same(one[0, i : i + 1], cpu.packed_matmul(x[:1], single, global_scale=0.5))
    assert not f64(cpu.packed_gather(x[:2], packed, mx.array([-1, 5]))).any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_single_rows(rng, fmt, dtype):
    arrays, how, w = quantised(rng, fmt, 37, 640)
    packed = cpu.pack(*arrays, **how)
    ids = mx.array([3, 0, 36, 3, -1, 37, 16])
    want = np.where(((np.array(ids) >= 0) & (np.array(ids) < 37))[:, None], w[np.clip(np.array(ids), 0, 36)], 0)
    assert error(cpu.packed_rows(packed, ids, dtype=dtype), want) < TOLERANCE[dtype]
    assert error(cpu.packed_rows(packed, ids, global_scale=0.5, dtype=dtype), want / 2) < TOLERANCE[dtype]


def test_scales_of_the_whole_and_of_each_column(rng):
    arrays, how, w = quantised(rng, ("nvfp4", 4, 16, None), 37, 160)
    packed, w = cpu.pack(arrays[0][:, :18], arrays[1][:, :9], **how), w[:, :144]
    x = normal(rng, 3, 144)
    by_row = rng.random(37).astype(np.float32)
    assert error(cpu.packed_matmul(x, packed, global_scale=0.3), f64(x) @ w.T * 0.3) < 2e-6
    assert error(cpu.packed_matmul(x, packed, global_scale=mx.array(by_row)), f64(x) @ w.T * by_row) < 2e-6


def test_strided_lazy_and_empty_inputs(rng):
    arrays, how, w = quantised(rng, ("affine", 4, 32, None), 74, 256)
    packed = cpu.pack(*(a[::2] for a in arrays), **how)
    x = normal(rng, 256, 3) * 2
    assert error(cpu.packed_matmul(x.T, packed), f64(x).T @ w[::2].T) < 2e-6
    y = mx.compile(lambda a: mx.sin(cpu.packed_matmul(a.T, packed)))(x)
    assert error(y, np.sin(f64(x).T @ w[::2].T)) < 1e-5
    assert cpu.packed_matmul(x.T[None, :0], packed).shape == (1, 0, 37)
    assert cpu.packed_rows(packed, mx.array([], mx.int32), dtype=mx.float16).shape == (0, 256)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_non_finite_activations_come_out_in_their_own_rows(rng, bad):
    arrays, how, _ = quantised(rng, ("affine", 4, 32, None), 37, 256)
    packed = cpu.pack(*arrays, **how)
    x = np.array(normal(rng, 20, 256))
    x[5, 77] = bad
    for dtype in DTYPES.values():
        for exact in (True, False):
            y = np.isfinite(f64(cpu.packed_matmul(mx.array(x).astype(dtype), packed, exact=exact)))
            assert not y[5].any()
            assert np.delete(y, 5, 0).all()


def test_packing_keeps_no_more_than_it_says(rng):
    arrays, how, _ = quantised(rng, ("affine", 8, 32, 128), 2048, 2048)
    mx.eval(arrays)
    before = mx.get_active_memory()
    packed = cpu.pack(*arrays, **how)
    assert packed.nbytes == 2048 * 2048 + 2048 * 64 * 2  # codes and scales; the biases say nothing
    assert 0 <= mx.get_active_memory() - before - packed.nbytes < 8192
    assert sum(a.nbytes for a in packed.arrays) - packed.nbytes < 8192


def test_small_matrices_share_blocks_that_live_as_long_as_they(rng):
    arrays, how, w = quantised(rng, ("affine", 4, 32, None), 40, 64)
    x = normal(rng, 2, 64)
    packed = [cpu.pack(*arrays, **how) for _ in range(1500)]
    del packed[:-2]
    for p in packed:
        assert error(cpu.packed_matmul(x, p), f64(x) @ w.T) < 2e-6


def test_what_is_refused(rng):
    arrays, how, _ = quantised(rng, ("affine", 4, 32, None), 8, 64)
    stack, _, _ = quantised(rng, ("affine", 4, 32, None), 2, 8, 64)
    packed, experts = cpu.pack(*arrays, **how), cpu.pack(*stack, **how)
    assert not cpu.packable("mxfp8", 8, 32)
    assert cpu.packable("affine", 3, 128)
    with pytest.raises(ValueError, match="not packable: affine, 7 bits"):
        cpu.pack(*arrays, **(how | {"bits": 7}))
    with pytest.raises(ValueError, match="biases go with mode 'affine'"):
        cpu.pack(*arrays[:2], **how)
    with pytest.raises(ValueError, match="wrong shape"):
        cpu.pack(arrays[0], arrays[1][:4], arrays[2], **how)
    with pytest.raises(ValueError, match="w is empty"):
        cpu.pack(*(a[:0] for a in arrays), **how)
    with pytest.raises(ValueError, match="inner size"):
        cpu.packed_matmul(mx.ones((2, 32)), packed)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        cpu.packed_matmul(mx.ones((2, 64), mx.int32), packed)
    with pytest.raises(ValueError, match="packed_gather takes those"):
        cpu.packed_matmul(mx.ones((2, 64)), experts)
    with pytest.raises(ValueError, match="packed_matmul takes those"):
        cpu.packed_gather(mx.ones((2, 64)), packed, mx.array([0, 1]))
    with pytest.raises(ValueError, match=r"indices \[T\]"):
        cpu.packed_gather(mx.ones((2, 64)), experts, mx.array([0, 1, 1]))
    with pytest.raises(ValueError, match="no matrix"):
        cpu.matrix(packed=experts)
    with pytest.raises(ValueError, match="not both"):
        cpu.matrix(arrays[0], packed=packed)
    with pytest.raises(ValueError, match="must hold 1 value"):
        cpu.packed_rows(packed, mx.array([0]), global_scale=mx.ones(3), dtype=mx.float32)

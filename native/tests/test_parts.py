"""The halves of a layer against the operations that they replace, bit for bit."""

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, TOLERANCE, error, f64, normal, same

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 96, 6, 2, 32, 160


class Weights:
    """A matrix in one format, as a handle and as the product that it stands for."""

    def __init__(self, rng, n, k, kind, dtype, bias=False, scale=None):
        w = normal(rng, n, k)
        self.bias = normal(rng, n, dtype=dtype) if bias else None
        self.how = {}
        if kind == "dense":
            self.arrays = (w.astype(dtype),)
        else:
            mode, bits, group = kind
            self.how = {"group_size": group, "bits": bits, "mode": mode, "global_scale": scale}
            self.arrays = mx.quantize(w, group_size=group, bits=bits, mode=mode)
            if cpu.packable(mode, bits, group):
                how = {"group_size": group, "bits": bits, "mode": mode}
                self.how = {"packed": cpu.pack(*self.arrays, **how), "global_scale": scale}
                self.handle = cpu.matrix(bias=self.bias, **self.how)
                return
        self.handle = cpu.matrix(*self.arrays, bias=self.bias, **self.how)

    def __call__(self, x):
        if "packed" in self.how:
            y = cpu.packed_matmul(x, **self.how)
        elif self.how:
            y = cpu.quantized_matmul(x, *self.arrays, **self.how)
        else:
            y = cpu.matmul(x, *self.arrays)
        return y if self.bias is None else y + self.bias


KINDS = {
    "joined": [("affine", 4, 32)],
    "apart": [("affine", 4, 32), ("affine", 8, 32), "dense"],
    "fp": [("nvfp4", 4, 16), ("mxfp8", 8, 32), ("mxfp4", 4, 32)],
}
SPANS = [([1], [0]), ([1, 1, 1], [300, 0, 17]), ([5, 1, 40], [0, 255, 3]), ([300], [200])]


def gain(rng, width, dtype):
    return (normal(rng, width, dtype=dtype), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rich", [False, True])
def test_attention_part(rng, dtype, kinds, rich):
    sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    edges = [sizes[0], sizes[0] + sizes[1]]
    rows = [sum(sizes)] if len(kinds) == 1 else sizes
    scale = mx.array(0.7) if rich and kinds[0][0] == "nvfp4" else None
    qkv = [Weights(rng, n, HIDDEN, k, dtype, rich, scale) for n, k in zip(rows, kinds, strict=True)]
    out = Weights(rng, HIDDEN, HEADS * DIM, kinds[0], dtype, rich)
    before, after, query_norm, key_norm = None, None, None, None
    if rich:
        before, after = gain(rng, HIDDEN, mx.float32), gain(rng, HIDDEN, dtype)
        query_norm, key_norm = gain(rng, DIM, dtype), gain(rng, DIM, mx.float32)
    how = {"scale": 0.2, "softcap": 3.0 if rich else None, "window": 30 if rich else None}
    part = cpu.attention_part(
        before=before,
        qkv=[w.handle for w in qkv],
        query_norm=query_norm,
        key_norm=key_norm,
        out=out.handle,
        after=after,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        interleaved=rich,
        **how,
    )
    for lengths, positions in SPANS:
        bases = [p // 256 * 256 if rich else 0 for p in positions]
        x = normal(rng, sum(lengths), HIDDEN, dtype=dtype)
        at = np.concatenate([np.arange(p, p + n) for n, p in zip(lengths, positions, strict=True)])
        angles = cpu.rope_table(mx.array(at), mx.array(np.linspace(0.01, 1, 8 if rich else 16).astype(np.float32)))
        held = [normal(rng, 1, KV_HEADS, 512, DIM, dtype=dtype) for _ in range(2 * len(lengths))]
        copies = [h + 0 for h in held]
        mx.eval(copies)

        n = x if before is None else cpu.rms_norm(x, *before)
        q, k, v = mx.split(mx.concatenate([w(n) for w in qkv], axis=-1), edges, axis=-1)
        q, k, v = q.reshape(-1, HEADS, DIM), k.reshape(-1, KV_HEADS, DIM), v.reshape(-1, KV_HEADS, DIM)
        if rich:
            q, k = cpu.rms_norm(q, *query_norm), cpu.rms_norm(k, *key_norm)
        q, k = cpu.rope(q, angles, interleaved=rich), cpu.rope(k, angles, interleaved=rich)
        first = 0
        for i, (length, position, base) in enumerate(zip(lengths, positions, bases, strict=True)):
            for j, new in ((2 * i, k), (2 * i + 1, v)):
                copies[j] = cpu.kv_append(copies[j], new[first : first + length], position - base)
            first += length
        counts = [p + n - b for n, p, b in zip(lengths, positions, bases, strict=True)]
        spans = {"lengths": lengths, "positions": positions, "counts": counts, "bases": bases}
        y = out(cpu.attention(q, copies[0::2], copies[1::2], **spans, **how).reshape(len(at), -1))
        want = y if after is None else cpu.rms_norm(y, *after)

        got, *buffers = part(x, angles, held, lengths, positions, bases)
        assert got.dtype == dtype
        assert same(got, want)
        assert len(buffers) == len(copies)
        assert all(same(a, b) for a, b in zip(buffers, copies, strict=True))
    assert part(x[:0], angles[:0], held[:2], [0], [3], [0])[0].shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kinds", [["dense"], [("affine", 4, 32)], [("affine", 5, 32), ("affine", 6, 32)]], ids=str)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_part(rng, dtype, kinds, gelu):
    rows = 2 * INNER // len(kinds)
    gate_up = [Weights(rng, rows, HIDDEN, kind, dtype, bias=gelu) for kind in kinds]
    down = Weights(rng, HIDDEN, INNER, kinds[0], dtype)
    before, after = gain(rng, HIDDEN, dtype), gain(rng, HIDDEN, mx.float32) if gelu else None
    part = cpu.gated_part(before=before, gate_up=[w.handle for w in gate_up], down=down.handle, after=after, gelu=gelu)
    x, branch = normal(rng, 300, HIDDEN, dtype=dtype), normal(rng, 300, HIDDEN, dtype=dtype)
    total, n = cpu.add_rms_norm(x, branch, *before)
    gate, up = mx.split(mx.concatenate([w(n) for w in gate_up], axis=-1), 2, axis=-1)
    y = down((cpu.geglu if gelu else cpu.swiglu)(gate, up))
    want = total + (y if after is None else cpu.rms_norm(y, *after))
    for start, count in ((0, 300), (0, 1), (7, 3), (299, 1), (20, 257)):
        rows = slice(start, start + count)
        assert same(part(x[rows], branch[rows]), want[rows])
    assert part(x[:0], branch[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("how", ["part", "matrix"])
def test_fast_halves_give_the_bits_of_fast_products(rng, how):
    def packed(n, k):
        return cpu.pack(*mx.quantize(normal(rng, n, k), group_size=32, bits=4), group_size=32, bits=4)

    both, down = packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER)
    before = gain(rng, HIDDEN, mx.bfloat16)
    matrices = [cpu.matrix(packed=p, exact=how == "part") for p in (both, down)]
    part = cpu.gated_part(before=before, gate_up=matrices[:1], down=matrices[1], exact=how == "matrix")
    x, branch = (normal(rng, 30, HIDDEN, dtype=mx.bfloat16) for _ in range(2))
    for rows, exact in ((30, False), (12, True)):
        total, n = cpu.add_rms_norm(x[:rows], branch[:rows], *before)
        gate, up = mx.split(cpu.packed_matmul(n, both, exact=exact), 2, axis=-1)
        want = total + cpu.packed_matmul(cpu.swiglu(gate, up), down, exact=exact)
        assert same(part(x[:rows], branch[:rows]), want)


def test_parts_refuse_what_does_not_fit(rng):
    dense = {n: cpu.matrix(normal(rng, n, 32)) for n in (32, 64, 96)}
    shape = {"before": None, "out": dense[32], "heads": 2, "kv_heads": 2, "head_dim": 16, "scale": 1.0}
    with pytest.raises(ValueError, match="do not make the heads"):
        cpu.attention_part(qkv=[dense[64]], **shape)
    with pytest.raises(ValueError, match="must hold 32 floats"):
        cpu.attention_part(qkv=[dense[96]], after=(mx.ones(31), 1e-5), **shape)
    part = cpu.attention_part(qkv=[dense[96]], **shape)
    x, buffers = normal(rng, 3, 32), [mx.zeros((1, 2, 256, 16))] * 2
    with pytest.raises(ValueError, match="do not fit a buffer"):
        part(x, None, buffers, [3], [254], [0])
    with pytest.raises(ValueError, match="do not fit a buffer"):
        part(x, None, buffers, [3], [0], [256])
    with pytest.raises(ValueError, match="do not add up"):
        part(x, None, buffers, [2], [0], [0])
    with pytest.raises(ValueError, match="dtype"):
        part(x, None, [b.astype(mx.float16) for b in buffers], [3], [0], [0])
    with pytest.raises(ValueError, match="do not fit down"):
        cpu.gated_part(before=(mx.ones(32), 1e-5), gate_up=[dense[96]], down=dense[32])
    with pytest.raises(ValueError, match="bias does not fit"):
        cpu.matrix(normal(rng, 32, 32), bias=mx.ones(31))


def take(arrays, ids, *, dtype, global_scale=None, **how):
    if cpu.packable(how["mode"], how["bits"], how["group_size"]):
        return cpu.packed_rows(cpu.pack(*arrays, **how), ids, dtype=dtype, global_scale=global_scale)
    return cpu.take_rows(*arrays, None, ids, dtype=dtype, global_scale=global_scale, **how)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("fmt", [("affine", b, 32) for b in (1, 2, 3, 4, 5, 6, 8)] + KINDS["fp"], ids=str)
def test_taken_rows(rng, dtype, fmt):
    mode, bits, group = fmt
    ids = mx.array([3, 0, 36, 3, 11])
    for width in (128, 160, 144) if mode == "nvfp4" else (128, 160):
        wide = mx.quantize(normal(rng, 37, 320), group_size=group, bits=bits, mode=mode)
        packed = [part[:, : part.shape[1] * width // 320] for part in wide]
        how = {"group_size": group, "bits": bits, "mode": mode, "dtype": dtype}
        whole = mx.dequantize(*wide, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
        want = whole[ids, :width]
        got = take(packed, ids, **how)
        assert got.dtype == dtype
        assert error(got, f64(want)) < TOLERANCE[dtype]
        assert error(take(packed, ids, global_scale=0.5, **how), f64(want) / 2) < TOLERANCE[dtype]
        assert not f64(take(packed, mx.array([-1, 37]), **how)).any()

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, TOLERANCE, error, f64, normal, same


def reference(q, k, v, *, scale, count, position, base=0, window=None, softcap=None, sinks=None, causal=True):
    q, k, v = f64(q), f64(k)[0, :, :count], f64(v)[0, :, :count]
    rep = q.shape[1] // k.shape[0]
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    at = base + np.arange(count)
    for t in range(q.shape[0]):
        p = position + t
        seen = at <= p if causal else np.ones(count, bool)
        if causal and window:
            seen &= at > p - window
        for h in range(q.shape[1]):
            s = k[h // rep][seen] @ q[t, h] * scale
            if softcap:
                s = softcap * np.tanh(s / softcap)
            if sinks is not None:
                s = np.append(s, sinks[h])
            if s.size == 0:
                continue
            e = np.exp(s - s.max())
            e /= e.sum()
            out[t, h] = e[: seen.sum()] @ v[h // rep][seen]
    return out


SHAPES = [(9, 3, 64, 64), (4, 4, 80, 80), (8, 2, 96, 96), (6, 1, 128, 128), (2, 2, 192, 128), (4, 1, 256, 256)]
SHAPES += [(2, 1, 72, 40), (1, 1, 512, 512)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_against_reference(rng, shape, dtype):
    hq, hkv, dk, dv = shape
    for length, count in ((1, 1), (1, 300), (3, 35), (17, 17), (40, 283)):
        q = normal(rng, length, hq, dk, dtype=dtype)
        k, v = normal(rng, 1, hkv, 512, dk, dtype=dtype), normal(rng, 1, hkv, 512, dv, dtype=dtype)
        kind = {"scale": dk**-0.5, "position": count - length, "count": count}
        for extra in ({}, {"window": 20}, {"causal": False}):
            got = cpu.attention(
                q, [k], [v], scale=kind["scale"], lengths=[length], counts=[count], positions=[count - length], **extra
            )
            assert got.dtype == dtype
            assert error(got, reference(q, k, v, **kind, **extra)) < 2 * TOLERANCE[dtype], (length, count, extra)


def test_softcap_and_sinks(rng):
    q, k, v = normal(rng, 5, 4, 64), normal(rng, 1, 2, 320, 64), normal(rng, 1, 2, 320, 64)
    sinks = np.array([-1.0, 0.0, 2.0, 30.0])
    for extra in ({"softcap": 3.0}, {"sinks": sinks}, {"softcap": 3.0, "sinks": sinks, "window": 50}):
        want = reference(q, k, v, scale=0.5, count=310, position=305, **extra)
        extra = extra | ({"sinks": mx.array(sinks.astype(np.float32))} if "sinks" in extra else {})
        got = cpu.attention(q, [k], [v], scale=0.5, lengths=[5], counts=[310], positions=[305], **extra)
        assert error(got, want) < 4e-6


def test_spans_with_their_own_caches(rng):
    lengths, counts, caps = [1, 7, 1, 70, 2, 0, 1], [700, 7, 1, 100, 513, 40, 256], [1024, 256, 256, 256, 768, 256, 256]
    bases = [0, 0, 0, 0, 256, 0, 512]
    positions = [b + c - n for b, c, n in zip(bases, counts, lengths, strict=True)]
    for window in (None, 90):
        q = normal(rng, sum(lengths), 6, 64)
        ks, vs = ([normal(rng, 1, 2, c, 64) for c in caps] for _ in range(2))
        kind = {"scale": 0.125, "window": window}
        whole = cpu.attention(q, ks, vs, lengths=lengths, counts=counts, positions=positions, bases=bases, **kind)
        at = 0
        for n, c, p, b, k, v in zip(lengths, counts, positions, bases, ks, vs, strict=True):
            if n:
                want = reference(q[at : at + n], k, v, count=c, position=p, base=b, **kind)
                assert error(whole[at : at + n], want) < 4e-6
                alone = cpu.attention(
                    q[at : at + n], [k], [v], lengths=[n], counts=[c], positions=[p], bases=[b], **kind
                )
                assert same(alone, whole[at : at + n])
            at += n


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("window", [None, 33, 300])
def test_a_query_does_not_depend_on_its_call(rng, dtype, dim, window):
    """Neither on the queries beside it, nor on keys behind it, nor on where a sliding buffer begins."""
    total = 600
    q = normal(rng, total, 4, dim, dtype=dtype)
    k, v = normal(rng, 1, 2, total, dim, dtype=dtype), normal(rng, 1, 2, total, dim, dtype=dtype)
    kind = {"scale": dim**-0.5, "window": window, "sinks": mx.array([0.1, 0.2, 0.3, 0.4])}
    whole = cpu.attention(q, [k], [v], lengths=[total], counts=[total], positions=[0], **kind)
    for start, n in ((0, 1), (255, 1), (256, 1), (599, 1), (250, 2), (510, 5), (100, 9), (37, 130), (0, 300)):
        for count in (start + n, total):
            part = cpu.attention(q[start : start + n], [k], [v], lengths=[n], counts=[count], positions=[start], **kind)
            assert same(part, whole[start : start + n]), (start, n, count)
    if window:
        for start, n in ((599, 1), (570, 30)):
            base = (start - window + 1) // 256 * 256
            part = cpu.attention(
                q[start : start + n],
                [mx.contiguous(k[:, :, base:])],
                [mx.contiguous(v[:, :, base:])],
                lengths=[n],
                counts=[total - base],
                positions=[start],
                bases=[base],
                **kind,
            )
            assert same(part, whole[start : start + n]), (start, n, base)


def test_strided_caches_and_garbage_behind_the_count(rng):
    q = normal(rng, 3, 4, 64)
    k, v = normal(rng, 1, 2, 300, 64), normal(rng, 1, 2, 300, 64)
    kind = {"scale": 0.125, "lengths": [3], "counts": [290], "positions": [287]}
    want = cpu.attention(q, [k], [v], **kind)
    token_first = [mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for a in (k, v)]
    assert same(cpu.attention(q, token_first[:1], token_first[1:], **kind), want)
    last = [mx.contiguous(a.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2) for a in (k, v)]
    assert same(cpu.attention(q, last[:1], last[1:], **kind), want)
    assert same(cpu.attention(q, [k[:, :, :290]], [v[:, :, :290]], scale=0.125, lengths=[3], positions=[287]), want)
    dirty = [mx.concatenate([a[:, :, :290], mx.full((1, 2, 10, 64), np.nan)], axis=2) for a in (k, v)]
    assert same(cpu.attention(q, dirty[:1], dirty[1:], **kind), want)
    strided = mx.contiguous(q.transpose(2, 1, 0)).transpose(2, 1, 0)
    assert same(cpu.attention(strided, [k], [v], **kind), want)


def test_non_finite_values_come_through(rng):
    q = np.array(normal(rng, 3, 2, 64))
    q[1, 0, 5] = np.nan
    k, v = normal(rng, 1, 1, 40, 64), normal(rng, 1, 1, 40, 64)
    for rows, at in ((slice(0, 3), 1), (slice(1, 2), 0)):
        n = rows.stop - rows.start
        y = f64(
            cpu.attention(mx.array(q[rows]), [k], [v], scale=1.0, lengths=[n], counts=[40], positions=[37 + rows.start])
        )
        assert np.isnan(y[at, 0]).all()
        assert np.isfinite(y[at, 1]).all()


def test_empty_and_refused(rng):
    k = normal(rng, 1, 2, 16, 64)
    y = cpu.attention(mx.zeros((0, 4, 64)), [k], [k], scale=1.0, lengths=[0], counts=[0], positions=[0])
    assert y.shape == (0, 4, 64)
    y = cpu.attention(normal(rng, 1, 4, 64), [k], [k], scale=1.0, lengths=[1], counts=[0], positions=[0])
    assert not f64(y).any()
    good = {"scale": 1.0, "lengths": [1], "counts": [1], "positions": [0]}
    for change in ({"counts": [17]}, {"lengths": [2]}, {"positions": [0, 1]}, {"positions": [-1]}):
        with pytest.raises(ValueError, match="arriero_cpu"):
            cpu.attention(normal(rng, 1, 4, 64), [k], [k], **(good | change))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_append(rng, dtype):
    want = np.zeros((1, 2, 32, 8))
    buffer = mx.zeros((1, 2, 32, 8), dtype)
    at = 0
    for n, packed in ((5, True), (1, False), (0, True), (3, False), (20, True)):
        update = normal(rng, n, 2, 8, dtype=dtype) if packed else normal(rng, 1, 2, n, 8, dtype=dtype)
        buffer = cpu.kv_append(buffer, update, at)
        want[0, :, at : at + n] = f64(update).transpose(1, 0, 2) if packed else f64(update)[0]
        at += n
    mx.async_eval(buffer)
    assert np.array_equal(f64(buffer), want)
    with pytest.raises(ValueError, match="does not fit"):
        cpu.kv_append(buffer, normal(rng, 4, 2, 8), at)
    packed = normal(rng, 3, 2, 8, dtype=dtype)
    turned = cpu.kv_append(mx.zeros((1, 2, 32, 8), dtype), packed.transpose(1, 0, 2)[None], 4)
    assert same(turned, cpu.kv_append(mx.zeros((1, 2, 32, 8), dtype), packed, 4))


def test_pipelined_decoding_with_appends(rng):
    """Steps queued ahead of each other see the cache as it stood."""
    steps, dim = 60, 64
    tokens = [tuple(normal(rng, 1, h, dim) for h in (4, 2, 2)) for _ in range(steps)]
    keys, values = mx.zeros((1, 2, 256, dim)), mx.zeros((1, 2, 256, dim))
    mx.eval(keys, values, tokens)
    got = []
    for i, (q, k, v) in enumerate(tokens):
        keys, values = cpu.kv_append(keys, k, i), cpu.kv_append(values, v, i)
        got.append(cpu.attention(q, [keys], [values], scale=0.125, lengths=[1], counts=[i + 1], positions=[i]))
        mx.async_eval(got[-1], keys, values)
    q, k, v = (mx.concatenate(a) for a in zip(*tokens, strict=True))
    k, v = (a.transpose(1, 0, 2)[None] for a in (k, v))
    assert same(mx.concatenate(got), cpu.attention(q, [k], [v], scale=0.125, lengths=[steps], positions=[0]))

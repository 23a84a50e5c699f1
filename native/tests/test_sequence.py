import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest
from helpers import DTYPES, TOLERANCE, error, f64, normal, same


def delta64(q, k, v, a, b, rate, bias, state):
    """Token by token in float64; returns y and the state after every token."""
    q, k, v, a, b, rate, bias, state = (f64(x) for x in (q, k, v, a, b, rate, bias, state))
    repeat = v.shape[1] // q.shape[1]
    q = np.repeat(q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(q.shape[-1]), repeat, 1)
    k = np.repeat(k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6), repeat, 1)
    decay, beta = np.exp(-rate * np.logaddexp(0, a + bias)), 1 / (1 + np.exp(-b))
    y, states = [], []
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        u = beta[t, :, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + u[:, :, None] * k[t, :, None, :]
        y.append(np.einsum("hvk,hk->hv", state, q[t]))
        states.append(state)
    return np.array(y), states


def delta_inputs(rng, rows, key_heads, heads, size, width, dtype):
    q, k = normal(rng, rows, key_heads, size, dtype=dtype), normal(rng, rows, key_heads, size, dtype=dtype)
    v, a, b = normal(rng, rows, heads, width, dtype=dtype), normal(rng, rows, heads), normal(rng, rows, heads)
    rate, bias = mx.abs(normal(rng, heads)), normal(rng, heads)
    return (q, k, v, a, b), {"rate": rate, "bias": bias}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(2, 6, 128, 128), (1, 1, 7, 5), (3, 3, 40, 66), (1, 2, 1, 1)])
def test_gated_delta(rng, dtype, shape):
    _, heads, size, width = shape
    lengths, stops = [1, 37, 18], [[], [1, 16, 33], [17]]
    rows, how = delta_inputs(rng, sum(lengths), *shape, dtype)
    states = [normal(rng, heads, width, size) for _ in lengths]
    y, kept = cpu.gated_delta(*rows, **how, states=states, lengths=lengths, stops=stops)
    assert y.dtype == dtype
    at = 0
    for state, length, wanted, got in zip(states, lengths, stops, kept, strict=True):
        part = [x[at : at + length] for x in rows]
        want, every = delta64(*part, how["rate"], how["bias"], state)
        assert error(y[at : at + length], want) < TOLERANCE[dtype]
        for stop, s in zip([*wanted, length], got, strict=True):
            assert error(s, every[stop - 1]) < 3e-6
        carried, pieces = state, []  # the same in other pieces, alone
        for low, high in ((0, length // 3), (length // 3, length // 2), (length // 2, length)):
            if high > low:
                piece, ((carried,),) = cpu.gated_delta(
                    *(x[low:high] for x in part), **how, states=[carried], lengths=[high - low]
                )
                pieces.append(piece)
        assert same(mx.concatenate(pieces), y[at : at + length])
        assert same(carried, got[-1])
        at += length


def test_gated_delta_takes_views_and_empty_spans(rng):
    rows, how = delta_inputs(rng, 9, 2, 4, 24, 16, mx.bfloat16)
    state = normal(rng, 4, 16, 24)
    packed = mx.concatenate([x.reshape(9, -1) for x in rows[:3]], axis=1)
    q, k, v = packed[:, :48], packed[:, 48:96], packed[:, 96:]
    views = (q.reshape(9, 2, 24), k.reshape(9, 2, 24), v.reshape(9, 4, 16), *rows[3:])
    y, ((end,),) = cpu.gated_delta(*rows, **how, states=[state], lengths=[9])
    viewed, (first, second) = cpu.gated_delta(*views, **how, states=[state, state], lengths=[0, 9])
    assert same(viewed, y)
    assert same(first[0], state)
    assert same(second[0], end)
    with pytest.raises(ValueError, match="strictly inside"):
        cpu.gated_delta(*rows, **how, states=[state], lengths=[9], stops=[[9]])
    with pytest.raises(ValueError, match="float32"):
        cpu.gated_delta(*rows, **how, states=[state.astype(mx.bfloat16)], lengths=[9])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("taps", "dilation", "channels"), [(4, 1, 1030), (4, 3, 64), (1, 1, 5), (2, 5, 33)])
def test_depthwise_conv(rng, dtype, taps, dilation, channels):
    lengths, stops = [1, 70, 3], [[], [1, 5, 64], [2]]
    history = (taps - 1) * dilation
    x = normal(rng, sum(lengths), channels, dtype=dtype)
    tails = [normal(rng, history, channels, dtype=dtype) for _ in lengths]
    for w, bias, silu in (
        (normal(rng, taps, channels, dtype=dtype), normal(rng, channels), True),
        (normal(rng, taps, channels), None, False),
    ):
        y, kept = cpu.depthwise_conv(
            x, w, bias, tails=tails, lengths=lengths, stops=stops, dilation=dilation, silu=silu
        )
        at = 0
        for tail, length, wanted, got in zip(tails, lengths, stops, kept, strict=True):
            window = np.concatenate([f64(tail), f64(x[at : at + length])])
            want = sum(f64(w)[j] * window[j * dilation : j * dilation + length] for j in range(taps))
            want = want if bias is None else want + f64(bias)
            want = want / (1 + np.exp(-want)) if silu else want
            assert error(y[at : at + length], want) < TOLERANCE[dtype]
            for stop, t in zip([*wanted, length], got, strict=True):
                assert t.dtype == dtype
                assert np.array_equal(f64(t), window[stop : stop + history])
            at += length
        one, _ = cpu.depthwise_conv(x[1:8], w, bias, tails=tails[1:2], lengths=[7], dilation=dilation, silu=silu)
        assert same(one, y[1:8])


def sorted_indices(x, k):
    with np.errstate(invalid="ignore"):
        return np.argsort(-f64(x), axis=-1, kind="stable")[..., :k]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length", [1, 17, 500, 2049, 70001])
def test_top_k(rng, dtype, length):
    plain = rng.standard_normal((1 if length > 70000 else 3, length)).astype(np.float32)
    broken = np.round(plain)
    broken[rng.random(plain.shape) < 0.6] = np.nan
    broken[rng.random(plain.shape) < 0.2] = -np.inf
    broken[rng.random(plain.shape) < 0.1] = -0.0
    low = np.where(rng.random(plain.shape) < 0.999, -np.inf, plain).astype(np.float32)
    for values in (plain, np.round(plain), broken, low, np.sort(plain), 0 * plain, np.full_like(plain, np.nan)):
        x = mx.array(values).astype(dtype)
        for k in {1, 2, 40, 700, length}:
            if k <= length:
                assert np.array_equal(np.array(cpu.top_k(x, k)), sorted_indices(x, k)), k


def listed_keys(row, position, block):
    complete = (position + 1) // block
    keys = [b * block + i for b in row if 0 <= b < complete for i in range(block)]
    return keys + list(range(complete * block, position + 1))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "width"), [(24, 2, 256, 256), (3, 3, 20, 36), (7, 1, 64, 100)])
def test_indexed_attention(rng, dtype, heads, kv_heads, size, width):
    block, budget = 4, 90
    lengths, positions = [3, 1, 9], [900, 402, 0]
    q = normal(rng, sum(lengths), heads, size, dtype=dtype)
    keys, values, want, lists = [], [], [], []
    for length, position in zip(lengths, positions, strict=True):
        # Heads before tokens in memory or behind them.
        k = normal(rng, 1, position + length, kv_heads, size, dtype=dtype).swapaxes(1, 2)
        v = normal(rng, 1, kv_heads, position + length, width, dtype=dtype)
        keys.append(k)
        values.append(v)
        for p in range(position, position + length):
            row = rng.permutation(max(1, (position + length) // block))[:budget]
            row = np.concatenate([row, np.full(budget - len(row), -1)])
            row[rng.random(budget) < 0.1] = -1
            at = listed_keys(row, p, block)
            lists.append(row)
            for h in range(heads):
                scores = f64(k)[0, h // (heads // kv_heads), at] @ f64(q)[len(want) // heads, h] * size**-0.5
                e = np.exp(scores - scores.max(initial=-np.inf))
                want.append(e @ f64(v)[0, h // (heads // kv_heads), at] / max(e.sum(), 1e-30))
    blocks = mx.array(np.array(lists, np.int32))
    how = {"scale": size**-0.5, "block": block}
    y = cpu.indexed_attention(q, keys, values, blocks, lengths=lengths, positions=positions, **how)
    assert y.dtype == dtype
    assert error(y, np.array(want).reshape(-1, heads, width)) < max(4e-6, TOLERANCE[dtype])
    one = cpu.indexed_attention(q[1:2], keys[:1], values[:1], blocks[1:2], lengths=[1], positions=[901], **how)
    assert same(one, y[1:2])
    nothing = cpu.indexed_attention(
        q[:1], keys[:1], values[:1], mx.full((1, 2), -1, mx.int32), lengths=[1], positions=[3], **how
    )
    assert f64(nothing).any() == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_select_blocks(rng, dtype):
    heads, size, block, budget = 4, 24, 4, 20
    lengths, positions = [17, 1, 90], [700, 2999, 0]
    q = normal(rng, sum(lengths), heads, size, dtype=dtype)
    keys = [normal(rng, (p + n) // block + 2, size, dtype=dtype) for p, n in zip(positions, lengths, strict=True)]
    how = {"scale": size**-0.5, "block": block, "width": budget}
    got = np.array(cpu.select_blocks(q, keys, lengths=lengths, positions=positions, **how))
    row = 0
    for k, length, position in zip(keys, lengths, positions, strict=True):
        for p in range(position, position + length):
            seen = (p + 1) // block
            scores = np.maximum(f64(q)[row] @ f64(k)[:seen].T, 0).sum(0)
            best = np.sort(np.argsort(-scores, kind="stable")[:budget])
            assert got[row].tolist() == [*best.tolist(), *[-1] * (budget - len(best))]
            row += 1
    one = cpu.select_blocks(q[5:6], keys[:1], lengths=[1], positions=[705], **how)
    assert np.array_equal(np.array(one)[0], got[5])
    with pytest.raises(ValueError, match="complete blocks"):
        cpu.select_blocks(q[:1], [keys[0][:20]], lengths=[1], positions=[700], **how)

"""The gated delta rule: linear attention whose state forgets and overwrites.

Per value head, with state S `[Dv, Dk]` and key head `h // (Hv / Hk)`, for every token: `S ← exp(g) S`, then
`S ← S + β (v − S k) kᵀ`, then `y = S q`, where k is divided by its length, q by its length and by √Dk,
`g = −rate · softplus(a + bias)` and `β = σ(b)`. All of it in float32. Source: Yang, Kautz and Hatamizadeh, Gated Delta
Networks, 2024.

Token by token (`recurrent`) a result does not depend on how a sequence is cut into calls. Chunks of tokens (`chunked`)
round otherwise, by about 1e-6 of the state, and take a sixtieth of the dependent steps: plain MLX uses them on GPUs for
long spans of 16-bit rows, never for float32. On the CPU they gain nothing: plain MLX is no faster with them (64 tokens,
48 heads: 137 against 147 ms), and the extension needs as many operations for a chunk as for its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import gated_delta as cuda
from arriero.kernels.metal import gated_delta as metal
from arriero.kernels.spans import Carried, Stops, carried, checked_stops, joined

CHUNK = 64
"""Tokens solved together in the chunked form, a power of two."""
CHUNKED_FROM = 32
"""Span length from which GPUs take chunks; a verified draft is shorter, so its steps round as decoding does."""


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops | None = None,
    eps: float = 1e-6,
) -> Carried:
    """The rule over packed rows, each span from its own state; y is `[T, Hv, Dv]` in v's dtype.

    q and k are `[T, Hk, Dk]`, v `[T, Hv, Dv]`, of one float type; a and b `[T, Hv]`; rate (`exp(A_log)`) and bias
    (`dt_bias`) `[Hv]`. `lengths[i]` rows belong to span i, whose state `states[i]` is float32 `[Hv, Dv, Dk]`. `eps` is
    added to the sum of squares under the root. `stops` asks for a span's states after so many of its rows.
    ValueError for shapes and stops that don't fit.
    """
    heads, width = v.shape[1:]
    cuts = checked_stops(q.shape[0], lengths, len(states), stops)
    if q.shape != k.shape or heads % q.shape[1] or v.shape[0] != q.shape[0]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree, and v {v.shape} hold a multiple of their heads")
    if a.shape != v.shape[:2] or b.shape != v.shape[:2]:
        raise ValueError(f"a {a.shape} and b {b.shape} must hold one value per row and head of v {v.shape}")
    for state in states:
        if state.shape != (heads, width, q.shape[2]) or state.dtype != mx.float32:
            raise ValueError(
                f"a state is {state.dtype} {state.shape}; these heads need float32 {(heads, width, q.shape[2])}"
            )
    native = device.native()
    if native is not None and q.dtype == k.dtype == v.dtype:
        y, every = native.gated_delta(
            q, k, v, a, b, rate=rate, bias=bias, states=states, lengths=lengths, stops=cuts, eps=eps
        )
        return carried(y, every)
    form = cuda.Heads(q.shape[1], heads, q.shape[2], width)
    alike = q.dtype == k.dtype == v.dtype == a.dtype == b.dtype
    if device.cuda() is not None and alike and cuda.scans(form, v.dtype):
        return on_cuda(form, q, k, v, a, b, rate=rate, bias=bias, states=states, lengths=lengths, stops=cuts, eps=eps)
    if device.metal() and metal.takes(q, k, v):
        return on_metal(q, k, v, a, b, rate=rate, bias=bias, states=states, lengths=lengths, stops=cuts, eps=eps)
    return graph(q, k, v, a, b, rate=rate, bias=bias, states=states, lengths=lengths, stops=cuts, eps=eps)


def gated_delta_rows(
    x: mx.array,
    gates: mx.array,
    form: cuda.Heads,
    *,
    gates_at: int = 0,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops | None = None,
    eps: float = 1e-6,
) -> Carried:
    """`gated_delta` of rows x `[T, channels]` that hold q, k and v of all heads, y `[T, Hv, Dv]`.

    Rows of `gates` hold b from element `gates_at` on, and a behind it.
    """
    if device.cuda() is not None and x.dtype == gates.dtype and cuda.scans(form, x.dtype):
        cuts = checked_stops(x.shape[0], lengths, len(states), stops)
        made = cuda.scan(
            form, x, (gates, gates_at), rate=rate, bias=bias, states=states, lengths=lengths, stops=cuts, eps=eps
        )
        return _carried(form, made)
    keys = form.key_heads * form.key_dim
    q, k, v = mx.split(x, [keys, 2 * keys], axis=-1)
    return gated_delta(
        q.reshape(-1, form.key_heads, form.key_dim),
        k.reshape(-1, form.key_heads, form.key_dim),
        v.reshape(-1, form.heads, form.width),
        gates[:, gates_at + form.heads : gates_at + 2 * form.heads],
        gates[:, gates_at : gates_at + form.heads],
        rate=rate,
        bias=bias,
        states=states,
        lengths=lengths,
        stops=stops,
        eps=eps,
    )


def _carried(form: cuda.Heads, made: cuda.Made) -> Carried:
    ends = [end.squeeze(0) for end in made.ends]
    kept = [[state.squeeze(0) for state in states] for states in made.interior]
    return Carried(made.y.reshape(-1, form.heads, form.width), ends, kept)


def on_cuda(
    form: cuda.Heads,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops,
    eps: float,
) -> Carried:
    """One launch for up to 8 spans of any lengths, token by token."""
    made = cuda.scan(
        form,
        mx.concatenate([part.reshape(part.shape[0], -1) for part in (q, k, v)], axis=-1),
        (mx.concatenate([b, a], axis=-1), 0),
        rate=rate.astype(mx.float32),
        bias=bias.astype(mx.float32),
        states=states,
        lengths=lengths,
        stops=stops,
        eps=eps,
    )
    return _carried(form, made)


def on_metal(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops,
    eps: float,
) -> Carried:
    """One launch for spans that are alike, as when decoding, else one for each."""
    if len(set(lengths)) == 1 and len({tuple(wanted) for wanted in stops}) == 1:
        together = states[0][None] if len(states) == 1 else mx.stack(list(states))
        wanted = [*stops[0], lengths[0]]
        y, every = metal.gated_delta(q, k, v, a, b, rate=rate, bias=bias, states=together, stops=wanted, eps=eps)
        return carried(y, [[every[j, i] for j in range(every.shape[0])] for i in range(len(states))])
    outputs: list[mx.array] = []
    kept: list[list[mx.array]] = []
    start = 0
    for state, length, inside in zip(states, lengths, stops, strict=True):
        parts = [x[start : start + length] for x in (q, k, v, a, b)]
        wanted = [*inside, length]
        y, every = metal.gated_delta(*parts, rate=rate, bias=bias, states=state[None], stops=wanted, eps=eps)
        outputs.append(y)
        kept.append([every[j, 0] for j in range(every.shape[0])])
        start += length
    return carried(joined(outputs), kept)


def graph(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops,
    eps: float,
) -> Carried:
    """Plain MLX. What does not depend on the state is computed for all rows at once."""
    query = _to_length(q, eps) * q.shape[-1] ** -0.5
    key = _to_length(k, eps)
    value = v.astype(mx.float32)
    step = a.astype(mx.float32) + bias.astype(mx.float32)
    decay = -rate.astype(mx.float32) * (mx.maximum(step, 0) + mx.log1p(mx.exp(-mx.abs(step))))
    beta = mx.sigmoid(b.astype(mx.float32))
    by_chunks = [v.dtype != mx.float32 and n >= CHUNKED_FROM and not device.on_cpu() for n in lengths]
    alike = len(set(lengths)) == 1 and len({tuple(wanted) for wanted in stops}) == 1
    if len(lengths) > 1 and alike and not by_chunks[0]:
        # Decoding: all spans take their steps together.
        parts = [x.reshape(len(lengths), lengths[0], *x.shape[1:]) for x in (query, key, value, decay, beta)]
        rows, every = recurrent(parts, mx.stack(list(states)), [*stops[0], lengths[0]])
        return carried(rows.reshape(v.shape).astype(v.dtype), [[s[i] for s in every] for i in range(len(lengths))])
    outputs: list[mx.array] = []
    kept: list[list[mx.array]] = []
    start = 0
    for state, length, wanted, long in zip(states, lengths, stops, by_chunks, strict=True):
        span = [x[None, start : start + length] for x in (query, key, value, decay, beta)]
        form = chunked if long else recurrent
        rows, every = form(span, state[None], [*wanted, length])
        outputs.append(rows[0])
        kept.append([s[0] for s in every])
        start += length
    return carried(joined(outputs).astype(v.dtype), kept)


def recurrent(inputs: Sequence[mx.array], state: mx.array, stops: Sequence[int]) -> tuple[mx.array, list[mx.array]]:
    """Token by token, from float32 inputs: q, k `[N, L, Hk, Dk]` of their final lengths, v `[N, L, Hv, Dv]`, g and β
    `[N, L, Hv]`.

    Returns y and the states `[N, Hv, Dv, Dk]` after each of `stops`, the last of which is L. Value heads of one key
    head are rows of one matrix, so that q and k are never repeated.
    """
    q, k, v, decay, beta = inputs
    spans, length, heads, width = v.shape
    groups, size = q.shape[2:]
    shape = (spans, groups, heads // groups * width, size)
    factors = mx.exp(decay)[..., None, None]
    # A row vector times the transpose: MLX's CPU code is ten times slower for a matrix times a column.
    q, k = q[..., None, :], k[..., None, :]
    s = state
    rows: list[mx.array] = []
    kept: list[mx.array] = []
    for t in range(length):
        s = s * factors[:, t]
        read = (k[:, t] @ s.reshape(shape).swapaxes(-1, -2)).reshape(spans, heads, width)
        u = beta[:, t, :, None] * (v[:, t] - read)
        s = s + (u.reshape(*shape[:3], 1) @ k[:, t]).reshape(s.shape)
        rows.append((q[:, t] @ s.reshape(shape).swapaxes(-1, -2)).reshape(spans, heads, width))
        if t + 1 in stops:
            kept.append(s)
    return mx.stack(rows, axis=1), kept


def chunked(inputs: Sequence[mx.array], state: mx.array, stops: Sequence[int]) -> tuple[mx.array, list[mx.array]]:
    """As `recurrent`, CHUNK tokens at a time and cut at every stop.

    With G the running sum of g in a chunk, the chunk's updates U solve `(I + L) U = β (V − exp(G) K S₀ᵀ)`, where
    `L[i, j] = β_i exp(G_i − G_j) k_i·k_j` below the diagonal. What lies before the state is computed for all whole
    chunks between two stops together.
    """
    q, k, v, decay, beta = inputs
    repeat = v.shape[2] // q.shape[2]
    # To heads before tokens: [N, Hv, L, ·].
    q, k = (mx.repeat(x.swapaxes(1, 2), repeat, axis=1) for x in (q, k))
    v, decay, beta = v.swapaxes(1, 2), decay.swapaxes(1, 2), beta.swapaxes(1, 2)
    rows: list[mx.array] = []
    kept: list[mx.array] = []
    start = 0
    for stop in stops:
        whole = start + (stop - start) // CHUNK * CHUNK
        for low, high, size in ((start, whole, CHUNK), (whole, stop, stop - whole)):
            if high > low:
                part = [x[:, :, low:high] for x in (q, k, v, decay, beta)]
                y, state = _chunks(part, state, size)
                rows.append(y)
        kept.append(state)
        start = stop
    return mx.concatenate(rows, axis=2).swapaxes(1, 2), kept


def _chunks(inputs: Sequence[mx.array], state: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Chunks of `size` tokens: q, k, v `[N, Hv, L, ·]`, g and β `[N, Hv, L]`."""
    q, k, v, decay, beta = (x.reshape(*x.shape[:2], x.shape[2] // size, size, *x.shape[3:]) for x in inputs)
    total = mx.cumsum(decay, axis=-1)
    lower = mx.tril(mx.ones((size, size), mx.bool_))
    # Differences above the diagonal are positive and would overflow: they are masked before exp.
    ratio = mx.exp(mx.where(lower, total[..., :, None] - total[..., None, :], -mx.inf))
    strict = mx.tril(beta[..., None] * ratio * (k @ k.swapaxes(-1, -2)), -1)
    solve = _inverse(strict)
    passed = mx.exp(total)[..., None]
    fresh = solve @ (beta[..., None] * v)
    stale = solve @ (beta[..., None] * passed * k)
    seen = ratio * (q @ k.swapaxes(-1, -2))
    reads = passed * q
    writes = k * mx.exp(total[..., -1:] - total)[..., None]
    rows: list[mx.array] = []
    for c in range(q.shape[2]):
        u = fresh[:, :, c] - stale[:, :, c] @ state.swapaxes(-1, -2)
        rows.append(reads[:, :, c] @ state.swapaxes(-1, -2) + seen[:, :, c] @ u)
        state = passed[:, :, c, -1:] * state + u.swapaxes(-1, -2) @ writes[:, :, c]
    return mx.concatenate(rows, axis=2), state


def _inverse(strict: mx.array) -> mx.array:
    """`(I + strict)⁻¹` of strictly lower triangular `[..., n, n]`, by diagonal blocks of twice the size each round.

    `[[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]]`. A product of powers would need fewer steps, but cancels
    catastrophically where keys repeat.
    """
    lead, n = strict.shape[:-2], strict.shape[-1]
    full = 1 << (n - 1).bit_length()
    if full > n:
        strict = mx.pad(strict, [(0, 0)] * len(lead) + [(0, full - n)] * 2)
    inverse = mx.ones((*lead, full, 1, 1), strict.dtype)
    size = 1
    while size < full:
        pairs = full // (2 * size)
        blocks = strict.reshape(*lead, pairs, 2 * size, pairs, 2 * size)
        corner = mx.moveaxis(mx.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        both = inverse.reshape(*lead, pairs, 2, size, size)
        first, second = both[..., 0, :, :], both[..., 1, :, :]
        upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([upper, mx.concatenate([-(second @ corner @ first), second], axis=-1)], axis=-2)
        size *= 2
    return inverse.reshape(*lead, full, full)[..., :n, :n]


def _to_length(x: mx.array, eps: float) -> mx.array:
    wide = x.astype(mx.float32)
    return wide * mx.rsqrt(mx.sum(wide * wide, axis=-1, keepdims=True) + eps)

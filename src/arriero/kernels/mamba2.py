"""The selective state space of Mamba-2: a decaying state per head that every token writes to and reads from.

Per head, with state S `[P, N]` and group `h // (H / G)`, for every token: `S ← exp(−rate · Δ) S + Δ x bᵀ`, then
`y = S c + skip · x`, where `Δ = softplus(dt + bias)` within limits. All of it in float32. Source: Dao and Gu,
Transformers are SSMs, 2024.

Token by token (`recurrent`) a result does not depend on how a sequence is cut into calls. Chunks of tokens (`chunked`)
round otherwise, by about 1e-6 of the state, and take a sixtieth of the dependent steps: plain MLX uses them on GPUs for
long spans of 16-bit rows, never for float32. On the CPU they gain nothing: for 64 heads of 64 and a state of 128, a
token takes 0.43 ms by steps and 0.43 to 0.61 ms by chunks of 32 to 128 (two cores of a Zen 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import mamba2 as cuda
from arriero.kernels.spans import Carried, Stops, carried, checked_stops, joined

CHUNK = 64
"""Tokens computed together in the chunked form."""
CHUNKED_FROM = 32
"""Span length from which GPUs take chunks; a verified draft is shorter, so its steps round as decoding does."""


def mamba2(
    x: mx.array,
    b: mx.array,
    c: mx.array,
    dt: mx.array,
    *,
    rate: mx.array,
    bias: mx.array,
    skip: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops | None = None,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Carried:
    """The recurrence over packed rows, each span from its own state; y is `[T, H, P]` in x's dtype.

    x is `[T, H, P]`, b and c `[T, G, N]`, dt `[T, H]`; rate (`exp(A_log)`), bias (`dt_bias`) and skip (`D`) `[H]`.
    `lengths[i]` rows belong to span i, whose state `states[i]` is float32 `[H, P, N]`. `limits` are the least and the
    greatest Δ. `stops` asks for a span's states after so many of its rows. ValueError for shapes and stops that don't
    fit.
    """
    heads, width = x.shape[1:]
    cuts = checked_stops(x.shape[0], lengths, len(states), stops)
    if b.shape != c.shape or b.shape[0] != x.shape[0] or heads % b.shape[1]:
        raise ValueError(f"b {b.shape} and c {c.shape} must agree, and x {x.shape} hold a multiple of their groups")
    if dt.shape != x.shape[:2]:
        raise ValueError(f"dt {dt.shape} must hold one value per row and head of x {x.shape}")
    for state in states:
        if state.shape != (heads, width, b.shape[2]) or state.dtype != mx.float32:
            raise ValueError(
                f"a state is {state.dtype} {state.shape}; these heads need float32 {(heads, width, b.shape[2])}"
            )
    form = cuda.Heads(heads, width, *b.shape[1:])
    if device.cuda() is not None and x.dtype == b.dtype == c.dtype == dt.dtype and cuda.takes(form, x.dtype):
        rows = mx.concatenate([part.reshape(x.shape[0], -1) for part in (x, b, c)], axis=-1)
        how = {"rate": rate, "bias": bias, "skip": skip}
        constants = {name: array.astype(mx.float32) for name, array in how.items()}
        y, kept = cuda.scan(form, rows, (dt, 0), states=states, lengths=lengths, stops=cuts, limits=limits, **constants)
        return carried(y, kept)
    step = _step(dt, bias, limits)
    value, read, write = (part.astype(mx.float32) for part in (x, c, b))
    decay = -rate.astype(mx.float32) * step
    inputs = [value * step[..., None], write, read, decay]
    rows, every = _over_spans(inputs, states, lengths, cuts, narrow=x.dtype != mx.float32)
    return carried((rows + skip.astype(mx.float32)[:, None] * value).astype(x.dtype), every)


def mamba2_rows(
    x: mx.array,
    dt: mx.array,
    form: cuda.Heads,
    *,
    dt_at: int = 0,
    rate: mx.array,
    bias: mx.array,
    skip: mx.array,
    states: Sequence[mx.array],
    lengths: Sequence[int],
    stops: Stops | None = None,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Carried:
    """`mamba2` of rows x `[T, columns]` that hold x of all heads, then b and c of all groups.

    Rows of `dt` hold it from element `dt_at` on.
    """
    if device.cuda() is not None and x.dtype == dt.dtype and cuda.takes(form, x.dtype):
        cuts = checked_stops(x.shape[0], lengths, len(states), stops)
        y, every = cuda.scan(
            form,
            x,
            (dt, dt_at),
            rate=rate,
            bias=bias,
            skip=skip,
            states=states,
            lengths=lengths,
            stops=cuts,
            limits=limits,
        )
        return carried(y, every)
    inner, shared = form.heads * form.width, form.groups * form.size
    value, write, read = mx.split(x, [inner, inner + shared], axis=-1)
    return mamba2(
        value.reshape(-1, form.heads, form.width),
        write.reshape(-1, form.groups, form.size),
        read.reshape(-1, form.groups, form.size),
        dt[:, dt_at : dt_at + form.heads],
        rate=rate,
        bias=bias,
        skip=skip,
        states=states,
        lengths=lengths,
        stops=stops,
        limits=limits,
    )


def _step(dt: mx.array, bias: mx.array, limits: tuple[float, float]) -> mx.array:
    """Δ, float32 `[T, H]`."""
    raw = dt.astype(mx.float32) + bias.astype(mx.float32)
    step = mx.maximum(raw, 0) + mx.log1p(mx.exp(-mx.abs(raw)))
    low, high = limits
    if low > 0:
        step = mx.maximum(step, low)
    return step if high == float("inf") else mx.minimum(step, high)


def _over_spans(
    inputs: Sequence[mx.array], states: Sequence[mx.array], lengths: Sequence[int], stops: Stops, *, narrow: bool
) -> tuple[mx.array, list[list[mx.array]]]:
    """Rows `[T, H, P]` and, per span, its states after each stop and after its last row."""
    alike = len(set(lengths)) == 1 and len({tuple(wanted) for wanted in stops}) == 1
    if len(lengths) > 1 and alike and not device.on_cpu() and not (narrow and lengths[0] >= CHUNKED_FROM):
        # Decoding: all spans take their steps together, so that a device has fewer operations to start. On the CPU each
        # state is better off alone in the caches, and nobody copies it out of a stack (8 rows: 9 instead of 35 ms).
        parts = [part.reshape(len(lengths), lengths[0], *part.shape[1:]) for part in inputs]
        rows, every = recurrent(parts, mx.stack(list(states)), [*stops[0], lengths[0]])
        return rows.reshape(inputs[0].shape), [[s[i] for s in every] for i in range(len(lengths))]
    outputs: list[mx.array] = []
    kept: list[list[mx.array]] = []
    start = 0
    for state, length, wanted in zip(states, lengths, stops, strict=True):
        span = [part[None, start : start + length] for part in inputs]
        by_chunks = narrow and length >= CHUNKED_FROM and not device.on_cpu()
        form = chunked if by_chunks else recurrent
        rows, every = form(span, state[None], [*wanted, length])
        outputs.append(rows[0])
        kept.append([s[0] for s in every])
        start += length
    return joined(outputs), kept


def recurrent(inputs: Sequence[mx.array], state: mx.array, stops: Sequence[int]) -> tuple[mx.array, list[mx.array]]:
    """Token by token, from float32 inputs: Δx `[S, L, H, P]`, b and c `[S, L, G, N]`, the decay's exponent `[S, L, H]`.

    Returns `S c` and the states `[S, H, P, N]` after each of `stops`, the last of which is L. Heads of one group are
    rows of one matrix, so that b and c are never repeated.
    """
    value, write, read, decay = inputs
    spans, length, heads, width = value.shape
    groups, size = write.shape[2:]
    shape = (spans, groups, heads // groups * width, size)
    factors = mx.exp(decay)[..., None, None]
    value = value.reshape(spans, length, groups, -1, 1)
    # A row vector times the transpose: MLX's CPU code is ten times slower for a matrix times a column. The outer
    # product is a plain multiplication there, since a matrix product takes 2.5 times as long.
    write, read = write[..., None, :], read[..., None, :]
    s = state
    rows: list[mx.array] = []
    kept: list[mx.array] = []
    for t in range(length):
        s = s * factors[:, t] + (value[:, t] * write[:, t]).reshape(s.shape)
        rows.append((read[:, t] @ s.reshape(shape).swapaxes(-1, -2)).reshape(spans, heads, width))
        if t + 1 in stops:
            kept.append(s)
    return mx.stack(rows, axis=1), kept


def chunked(inputs: Sequence[mx.array], state: mx.array, stops: Sequence[int]) -> tuple[mx.array, list[mx.array]]:
    """As `recurrent`, CHUNK tokens at a time and cut at every stop.

    With D the running sum of the decay's exponent in a chunk, row i is `exp(D_i) S₀ c_i` plus the sum over j ≤ i of
    `exp(D_i − D_j) (b_j · c_i) Δ_j x_j`. What does not need the state is computed for all whole chunks between two
    stops together.
    """
    value, write, read, decay = inputs
    # To heads before tokens: [S, H, L, ·]; b and c once per group.
    value, write, read, decay = (part.swapaxes(1, 2) for part in (value, write, read, decay))
    rows: list[mx.array] = []
    kept: list[mx.array] = []
    start = 0
    for stop in stops:
        whole = start + (stop - start) // CHUNK * CHUNK
        for low, high, size in ((start, whole, CHUNK), (whole, stop, stop - whole)):
            if high > low:
                y, state = _chunks([part[:, :, low:high] for part in (value, write, read, decay)], state, size)
                rows.append(y)
        kept.append(state)
        start = stop
    return mx.concatenate(rows, axis=2).swapaxes(1, 2), kept


def _chunks(inputs: Sequence[mx.array], state: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """Chunks of `size` tokens: Δx `[S, H, L, P]`, b and c `[S, G, L, N]`, the exponent `[S, H, L]`."""
    value, write, read, decay = (
        part.reshape(*part.shape[:2], part.shape[2] // size, size, *part.shape[3:]) for part in inputs
    )
    repeat = value.shape[1] // write.shape[1]
    total = mx.cumsum(decay, axis=-1)
    lower = mx.tril(mx.ones((size, size), mx.bool_))
    # Differences above the diagonal are positive and would overflow: they are masked before exp.
    ratio = mx.exp(mx.where(lower, total[..., :, None] - total[..., None, :], -mx.inf))
    met = mx.repeat(read @ write.swapaxes(-1, -2), repeat, axis=1)
    fresh = (ratio * met) @ value
    write, read = (mx.repeat(part, repeat, axis=1) for part in (write, read))
    added = (value * mx.exp(total[..., -1:] - total)[..., None]).swapaxes(-1, -2) @ write
    passed = mx.exp(total)[..., None]
    rows: list[mx.array] = []
    for n in range(value.shape[2]):
        rows.append(fresh[:, :, n] + passed[:, :, n] * (read[:, :, n] @ state.swapaxes(-1, -2)))
        state = passed[:, :, n, -1:] * state + added[:, :, n]
    return mx.concatenate(rows, axis=2), state

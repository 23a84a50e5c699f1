"""The halves of a decoder's layer as one operation each, and layers in a row as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from . import _native
else:
    from arriero_cpu import _native


def matrix(
    w: mx.array | None = None,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 0,
    bits: int = 0,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    bias: mx.array | None = None,
    packed: _native.Packed | None = None,
    exact: bool = True,
) -> _native.Matrix:
    """A matrix [N, K] that :func:`attention_part` or :func:`gated_part` holds: ``packed``, or ``w``.

    ``w`` is dense without ``scales``. ``bias`` [N] is added to the product, after the rounding to the result's dtype.
    ``exact=False`` allows products of packed weights what :func:`packed_matmul` says, if all that share their input
    allow it.
    """
    if packed is not None:
        if w is not None:
            raise ValueError("matrix() takes packed weights or w, not both")
        return _native.Matrix(packed, global_scale, bias, exact)
    if w is None:
        raise ValueError("matrix() needs packed weights or w")
    return _native.Matrix(w, scales, biases, group_size, bits, mode, global_scale, bias)


def attention_part(
    *,
    before: tuple[mx.array, float] | None,
    qkv: Sequence[_native.Matrix],
    query_norm: tuple[mx.array, float] | None = None,
    key_norm: tuple[mx.array, float] | None = None,
    out: _native.Matrix,
    after: tuple[mx.array, float] | None = None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    interleaved: bool = False,
    exact: bool = True,
) -> _native.AttentionPart:
    """The attention half of a layer as one operation, with the bits that its steps would give one by one.

    The steps: norm ``before``, products ``qkv`` (their rows together are the heads of q, k and v), norms of query and
    key heads, rotation, append to the buffers, causal attention, product ``out``, norm ``after``; norms are (gain,
    epsilon). The result is called as ``part(x, angles, buffers, lengths, positions, bases)``: x is [T, hidden],
    ``angles`` what :func:`rope_table` gives for the T tokens (or None), ``buffers`` holds keys and values
    [1, kv_heads, capacity, head_dim] of each span in turn, of x's dtype and written in place as :func:`kv_append` does;
    the rest as in :func:`attention`. It returns a list: the result [T, hidden], then the buffers. ``exact=False``
    allows products of packed weights what :func:`packed_matmul` says.
    """
    return _native.AttentionPart(
        before,
        list(qkv),
        query_norm,
        key_norm,
        out,
        after,
        heads,
        kv_heads,
        head_dim,
        scale,
        softcap or 0.0,
        window or 0,
        interleaved,
        exact,
    )


def gated_part(
    *,
    before: tuple[mx.array, float],
    gate_up: Sequence[_native.Matrix],
    down: _native.Matrix,
    after: tuple[mx.array, float] | None = None,
    gelu: bool = False,
    exact: bool = True,
) -> _native.GatedPart:
    """The feed-forward half of a layer as one operation, with the bits that its steps would give one by one.

    Called as ``part(x, branch)`` it returns ``h + after(down(act(gate) * up))`` with ``h = x + branch`` and gate and
    up the two halves of the products ``gate_up`` of ``before(h)``; act is silu, or gelu's tanh form. ``exact`` as in
    :func:`attention_part`.
    """
    return _native.GatedPart(before, list(gate_up), down, after, gelu, exact)


def stack(layers: Sequence[tuple[_native.AttentionPart, _native.GatedPart]]) -> _native.Stack:
    """Layers in a row as one operation, with the bits that their halves give one by one.

    Called as ``stack(x, angles, buffers, lengths, positions, bases, after)`` it returns x [T, hidden] behind the last
    layer. ``angles`` is a list with those of each layer; ``buffers`` holds keys and values of each span of each layer,
    and ``bases`` a position of each; the rest as in :func:`attention_part`. Buffers are written in place **and are
    not returned**: whatever reads them next must depend on the result. Writes that were handed to MLX before are seen;
    ``after`` names results of calls that may not have been. It can be called once ``ready`` says that the weights are
    computed.
    """
    return _native.Stack(list(layers))

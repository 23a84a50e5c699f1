"""Attention of prompts between products, on NVIDIA GPUs: a launch for the heads of each row, then MLX's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.attention import attention, planned_heads, spare
from arriero.kernels.cuda import prompt_heads as cuda
from arriero.kernels.cuda.attention import Shape
from arriero.kernels.cuda.heads import Form
from arriero.kernels.cuda.product import Norm

PLAIN = Form()


def takes(
    shape: Shape,
    form: Form,
    dtype: mx.Dtype,
    buffers: Sequence[mx.array],
    angles: mx.array | None,
    norms: Sequence[Norm | None],
    memo: dict[Any, Any],
    *,
    interleaved: bool = False,
) -> bool:
    """Whether `attend` computes this, for activations of `dtype`."""
    gpu = device.cuda()
    return (
        gpu is not None
        and gpu.in_place
        and dtype == mx.bfloat16
        and cuda.takes(shape, form, buffers, angles, norms, memo, interleaved=interleaved)
    )


def attend(
    shape: Shape,
    form: Form,
    rows: mx.array,
    angles: mx.array | None,
    buffers: Sequence[mx.array],
    *,
    lengths: Sequence[int],
    positions: Sequence[int],
    bases: Sequence[int],
    query_norm: Norm | None,
    key_norm: Norm | None,
    memo: dict[Any, Any],
    interleaved: bool = False,
    sinks: mx.array | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Rows `[T, width]` of heads in `form` to those of the output's product, `[T, heads · head_dim]`, and the filled
    buffers; a gate is left to the caller.

    The arguments are those of `AttentionPart`, and `takes` has accepted them. The buffers are written in place: only
    what was made of the returned ones sees the new tokens, and the given ones must not be used again.
    """
    outputs: list[mx.array] = []
    filled: list[mx.array] = []
    whole = planned_heads(shape.head_dim, rows.dtype)
    first = 0
    for i, (length, position, base) in enumerate(zip(lengths, positions, bases, strict=True)):
        place, mine = position - base, buffers[2 * i : 2 * i + 2]
        end = place + length
        # What `attention` would else do to the queries, by copies.
        padded = whole and length > 1 and shape.softcap is None
        before, behind = spare(place, length, mine[0].shape[2]) if padded else (0, 0)
        q, held = cuda.prepare(
            shape,
            form,
            rows,
            angles,
            mine,
            first=first,
            count=length,
            place=place,
            spare=(before, behind),
            query_norm=query_norm,
            key_norm=key_norm,
            memo=memo,
            interleaved=interleaved,
        )
        filled += held
        keys, values = held if whole else [buffer[..., :end, :] for buffer in held]
        y = attention(
            q,
            [keys],
            [values],
            scale=shape.scale,
            lengths=[q.shape[0]],
            positions=[position - before],
            bases=[base],
            window=shape.window,
            softcap=shape.softcap,
            sinks=sinks,
            memo=memo,
        )
        outputs.append((y[before : before + length] if before or behind else y).reshape(length, -1))
        first += length
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs), filled

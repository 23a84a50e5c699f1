"""The attention half of a decoder's layer: one operation on the CPU, three on NVIDIA GPUs, a dozen elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels import prompt_attention as prompts
from arriero.kernels.append import append
from arriero.kernels.attention import attention, planned
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Norm, Operand
from arriero.kernels.matrix import Matrix, divided, few, products
from arriero.kernels.rms_norm import rms_norm
from arriero.kernels.rope import normed_rope

__all__ = ["AttentionPart", "Norm", "NotReplayable"]


class NotReplayable(Exception):
    """What a forward did depends on its positions in a way that a recording of it would not follow."""


@dataclass(eq=False, slots=True)
class AttentionPart:
    """Norm, products, norms of heads, rotation, append, causal attention, product, norm; each norm may be missing.

    The rows of `qkv`, one matrix after another, are the heads of q, of k and of v.
    """

    qkv: Sequence[Matrix]
    out: Matrix
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    interleaved: bool = False
    before: Norm | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    after: Norm | None = None
    sinks: mx.array | None = None
    """As `attention` takes them."""
    _handles: dict[mx.Dtype, Any] = field(default_factory=dict)
    _cuda_shape: cuda.Shape | None = None
    _operands: list[Operand | None] = field(default_factory=list)

    def __call__(
        self,
        x: mx.array,
        angles: mx.array | None,
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        memo: dict[Any, Any],
    ) -> tuple[mx.array, Sequence[mx.array]]:
        """x `[T, hidden]` to the result `[T, hidden]` and the buffers with the new tokens in them.

        `lengths[i]` tokens belong to span i and stand from absolute position `positions[i]` on. `buffers` holds its
        keys and values, `[1, kv_heads, capacity, head_dim]`, one span after another; they begin at position `bases[i]`,
        have room for the new tokens, and are given up as `append` says. `angles` are those of `rope`, None for no
        rotation; `memo` is what the layers of one forward share.
        """
        handle = self.handle(x.dtype) if buffers[0].dtype == x.dtype else None
        if handle is not None:
            y, *buffers = handle(x, angles, buffers, lengths, positions, bases)
            return y, buffers
        where: dict[str, Any] = {"lengths": lengths, "positions": positions, "bases": bases, "memo": memo}
        gpu = device.cuda()
        if gpu is not None and gpu.in_place and x.dtype == mx.bfloat16 and self.takes_on_cuda(lengths, buffers, angles):
            return self._cuda(gpu, x, angles, buffers, **where)
        norms = [self.query_norm, self.key_norm]
        how: dict[str, Any] = {"memo": memo, "interleaved": self.interleaved}
        if prompts.takes(self._shape, prompts.PLAIN, x.dtype, buffers, angles, norms, **how):
            return self._prompt(x, angles, buffers, **where)
        if cuda.REPLAYED in memo:
            raise NotReplayable("attention of plain operations has its positions in its shapes")
        return self.graph(x, angles, buffers, **where)

    def few(self) -> tuple[Operand, Operand] | None:
        """The packed matrices of q, k and v and of the output; None where the first are not one, or a norm follows."""
        first, last = self._matrices()[0], self._matrices()[-1]
        if len(self.qkv) > 1 or self.before is None or self.after is not None or first is None or last is None:
            return None
        return first, last

    def attend_on_cuda(
        self,
        gpu: Gpu,
        qkv: mx.array,
        angles: mx.array | None,
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        memo: dict[Any, Any],
    ) -> tuple[mx.array, list[mx.array]]:
        """What is between the products: rows of q, k and v to those of the output's product, and the filled buffers."""
        return cuda.attend(
            gpu,
            self._shape,
            qkv,
            angles,
            buffers,
            lengths=lengths,
            positions=positions,
            bases=bases,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            memo=memo,
            sinks=self.sinks,
        )

    def takes_on_cuda(self, lengths: Sequence[int], buffers: Sequence[mx.array], angles: mx.array | None) -> bool:
        """Whether the CUDA kernel has this form of attention."""
        turned = angles is not None and self.interleaved
        sunk = self.sinks is not None and self.sinks.dtype != mx.bfloat16
        return not (turned or sunk) and cuda.takes(
            self._shape, lengths, buffers, angles, [self.query_norm, self.key_norm]
        )

    def _matrices(self) -> list[Operand | None]:
        """Those of q, k and v, and of the output."""
        if not self._operands:
            self._operands = [matrix.operand() for matrix in (*self.qkv, self.out)]
        return self._operands

    @property
    def _shape(self) -> cuda.Shape:
        if self._cuda_shape is None:
            self._cuda_shape = cuda.Shape(
                self.heads, self.kv_heads, self.head_dim, self.scale, self.window, self.softcap
            )
        return self._cuda_shape

    def _cuda(
        self,
        gpu: Gpu,
        x: mx.array,
        angles: mx.array | None,
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        memo: dict[Any, Any],
    ) -> tuple[mx.array, list[mx.array]]:
        """The same in three launches for few tokens: product with its norm, attention, product."""
        *first, last = self._matrices()
        made = [few(gpu, x, *pair, norm=self.before) for pair in zip(self.qkv, first, strict=True)]
        parts = [part for part in made if part is not None]
        if len(parts) < len(made):
            normed = x if self.before is None else rms_norm(x, *self.before)
            parts = [matrix(normed) for matrix in self.qkv]
        qkv = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
        y, filled = self.attend_on_cuda(
            gpu, qkv, angles, buffers, lengths=lengths, positions=positions, bases=bases, memo=memo
        )
        behind = few(gpu, y, self.out, last)
        y = self.out(y) if behind is None else behind
        return y if self.after is None else rms_norm(y, *self.after), filled

    def _prompt(
        self, x: mx.array, angles: mx.array | None, buffers: Sequence[mx.array], **where: Any
    ) -> tuple[mx.array, list[mx.array]]:
        """The same for many tokens: between the products a launch for the heads, and MLX's attention."""
        normed = x if self.before is None else rms_norm(x, *self.before)
        parts = [matrix(normed) for matrix in self.qkv]
        y, filled = prompts.attend(
            self._shape,
            prompts.PLAIN,
            parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1),
            angles,
            buffers,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            interleaved=self.interleaved,
            sinks=self.sinks,
            **where,
        )
        y = self.out(y)
        return y if self.after is None else rms_norm(y, *self.after), filled

    def graph(
        self,
        x: mx.array,
        angles: mx.array | None,
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        memo: dict[Any, Any],
    ) -> tuple[mx.array, list[mx.array]]:
        """The same, one operation after another."""
        heads = self._heads(x, self._widths)
        y, filled = self._attended(heads, angles, buffers, lengths=lengths, positions=positions, bases=bases, memo=memo)
        y = self.out(y)
        return y if self.after is None else rms_norm(y, *self.after), filled

    @property
    def _widths(self) -> list[int]:
        """Of the rows of q, of k and of v."""
        return [self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2]

    def _attended(
        self,
        heads: Sequence[mx.array],
        angles: mx.array | None,
        buffers: Sequence[mx.array],
        *,
        lengths: Sequence[int],
        positions: Sequence[int],
        bases: Sequence[int],
        memo: dict[Any, Any],
    ) -> tuple[mx.array, list[mx.array]]:
        """Rows of q, of k and of v, `[T, width]` each, to those of the output's product, and the filled buffers."""
        size = self.head_dim
        q, k, v = (part.reshape(-1, part.shape[-1] // size, size) for part in heads)
        q = normed_rope(q, self.query_norm, angles, interleaved=self.interleaved)
        k = normed_rope(k, self.key_norm, angles, interleaved=self.interleaved)
        # One transposition for all rows; a row that is alone needs no slice.
        new = k[None].swapaxes(1, 2), v[None].swapaxes(1, 2)
        filled: list[mx.array] = []
        held: list[mx.array] = []
        whole = planned(q)
        first = 0
        for i, (length, position, base) in enumerate(zip(lengths, positions, bases, strict=True)):
            for buffer, tokens in zip(buffers[2 * i : 2 * i + 2], new, strict=True):
                part = tokens if length == q.shape[0] else tokens[:, :, first : first + length]
                filled.append(append(buffer, part, position - base))
                # Keys behind the last query are hidden from all: some shapes only need them to be there.
                held.append(filled[-1] if whole else filled[-1][..., : position + length - base, :])
            first += length
        y = attention(
            q,
            held[0::2],
            held[1::2],
            scale=self.scale,
            lengths=lengths,
            positions=positions,
            bases=bases,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            memo=memo,
        )
        return y.reshape(-1, self.heads * size), filled

    def _heads(self, x: mx.array, widths: Sequence[int]) -> list[mx.array]:
        """The products with the matrices of q, k and v, `[T, width]`; on Apple GPUs with their norm in the launch."""
        if device.metal() and self.before is not None:
            made = [matrix.on_metal(x, norm=self.before) for matrix in self.qkv]
            given = [one.y for one in made if one is not None]
            if len(given) == len(made):
                return divided(given, widths)
        normed = x if self.before is None else rms_norm(x, *self.before)
        return products(normed, self.qkv, widths)

    def handle(self, dtype: mx.Dtype) -> Any:
        """The extension's version, made once; None where there is none for this device or these formats."""
        native = device.native()
        if native is None or self.sinks is not None:
            return None
        if dtype not in self._handles:
            matrices = [matrix.handle(native, dtype) for matrix in (*self.qkv, self.out)]
            self._handles[dtype] = None
            if all(matrix is not None for matrix in matrices):
                self._handles[dtype] = native.attention_part(
                    before=self.before,
                    qkv=matrices[:-1],
                    query_norm=self.query_norm,
                    key_norm=self.key_norm,
                    out=matrices[-1],
                    after=self.after,
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                    head_dim=self.head_dim,
                    scale=self.scale,
                    softcap=self.softcap,
                    window=self.window,
                    interleaved=self.interleaved,
                    exact=all(matrix.exact for matrix in (*self.qkv, self.out)),
                )
        return self._handles[dtype]

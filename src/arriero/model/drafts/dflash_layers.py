"""The layers of a block draft: context in, blocks through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.attention import attention
from arriero.kernels.cuda import attention as cuda
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.drafts.dflash_config import Config
from arriero.model.drafts.dflash_conv import GroupedDynamicConv
from arriero.model.drafts.dflash_placed import PLACED, Placed
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope
from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache


class ContextEncoder:
    """The target's outputs of several layers `[T, taps · hidden]`, as one context row a position: `norm(fc(taps))`.

    Laguna's drafts norm each tap by itself before.
    """

    def __init__(self, fc: Linear, norm: RMSNorm, tap_norms: list[RMSNorm]) -> None:
        self.fc = fc
        self.norm = norm
        self.tap_norms = tap_norms

    @classmethod
    def load(cls, checkpoint: Checkpoint, root: str, dtype: mx.Dtype, config: Config) -> Self:
        """`fc`, `hidden_norm`, and `aux_hidden_norms.N` where there are any; all or none."""
        hidden, count = config.hidden, len(config.taps)

        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(checkpoint, f"{root}{name}", dtype, eps=config.eps, width=hidden)

        normed = config.laguna or f"{root}aux_hidden_norms.0.weight" in checkpoint
        return cls(
            Linear.load(checkpoint, f"{root}fc", dtype, bias=False, shape=(hidden, count * hidden)),
            norm("hidden_norm"),
            [norm(f"aux_hidden_norms.{i}") for i in range(count)] if normed else [],
        )

    def __call__(self, taps: mx.array) -> mx.array:
        if self.tap_norms:
            parts = mx.split(taps, len(self.tap_norms), axis=-1)
            taps = mx.concatenate([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], axis=-1)
        return self.norm(self.fc(taps))


class Attention:
    """Queries of a block over its own keys and those of the context, which come from the same projections."""

    def __init__(
        self,
        config: AttentionConfig,
        rope: Rope,
        dtype: mx.Dtype,
        *,
        causal: bool,
        query: Linear,
        key_value: FusedLinear,
        out: Linear,
        query_norm: RMSNorm,
        key_norm: RMSNorm,
        gate: Linear | None,
    ) -> None:
        self.config = config
        self.rope = rope
        self.dtype = dtype
        self.causal = causal
        self.query = query
        self.key_value = key_value
        self.all_three = None if device.cuda() is None else FusedLinear([query, *key_value.parts])
        """Of queries, keys and values, for blocks that are placed."""
        self.out = out
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.gate = gate

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """`q_proj`, `k_proj`, `v_proj` (or `qkv_proj`), `o_proj`, `q_norm`, `k_norm`, and Laguna's `g_proj`."""
        c = config.attention[index]
        query, key, value = load_projections(checkpoint, prefix, dtype, c)

        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=config.eps, width=c.head_dim)

        gate = None
        if config.laguna:
            gate = Linear.load(checkpoint, f"{prefix}.g_proj", dtype, bias=False, shape=(c.heads, c.hidden))
        return cls(
            c,
            rope,
            dtype,
            causal=config.causal[index],
            query=query,
            key_value=FusedLinear([key, value]),
            out=Linear.load(
                checkpoint, f"{prefix}.o_proj", dtype, bias=c.out_bias, shape=(c.hidden, c.heads * c.head_dim)
            ),
            query_norm=norm("q_norm"),
            key_norm=norm("k_norm"),
            gate=gate,
        )

    def new_cache(self) -> KVCache | SlidingCache:
        """Keys and values of the context: everything, or the window."""
        c = self.config
        if c.window is None:
            return KVCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype)
        return SlidingCache(c.kv_heads, c.head_dim, c.head_dim, self.dtype, c.window)

    def extend(self, context: mx.array, batch: Batch, slot: int) -> None:
        """Append keys and values of context rows `[T, hidden]` to the spans' caches."""
        k, v = self._keys_values(context, batch)
        for span, cache in zip(batch.spans, batch.caches(slot), strict=True):
            part = slice(span.start, span.start + span.length)
            cache.append(k[:, :, part], v[:, :, part])

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """Rows of blocks `[T, hidden]` to the same; the caches are read only."""
        placed: Placed | None = batch.memo.get(PLACED)
        if placed is not None:
            return self.out(self._placed(x, placed, slot))
        c = self.config
        q = self.rope(self.query_norm(self.query(x).reshape(-1, c.heads, c.head_dim)), batch)
        k, v = self._keys_values(x, batch)
        keys, values, bases = [], [], []
        for span, cache in zip(batch.spans, batch.caches(slot), strict=True):
            part = slice(span.start, span.start + span.length)
            held_k, held_v, base = cache.view(span.position)
            keys.append(mx.concatenate([held_k, k[:, :, part]], axis=2))
            values.append(mx.concatenate([held_v, v[:, :, part]], axis=2))
            bases.append(base)
        y = attention(
            q,
            keys,
            values,
            scale=c.scale,
            lengths=[span.length for span in batch.spans],
            positions=[span.position for span in batch.spans],
            bases=bases,
            window=c.window,
            causal=self.causal,
            memo=batch.memo,
        )
        if self.gate is not None:
            # log(1 + eˣ), without overflow.
            gate = mx.logaddexp(self.gate(x).astype(mx.float32), 0.0)
            y = (y.astype(mx.float32) * gate[..., None]).astype(x.dtype)
        return self.out(y.reshape(-1, c.heads * c.head_dim))

    @property
    def shape(self) -> cuda.Shape:
        """As the CUDA kernel takes it."""
        c = self.config
        return cuda.Shape(c.heads, c.kv_heads, c.head_dim, c.scale, c.window, all_new=not self.causal)

    def _placed(self, x: mx.array, placed: Placed, slot: int) -> mx.array:
        """The same for a block whose keys, and those of the new states before it, the kernel puts into the caches."""
        gpu = device.cuda()
        assert gpu is not None
        assert self.all_three is not None
        # The states' queries are never read.
        parts = [matrix(mx.concatenate([placed.context, x])) for matrix in self.all_three.matrices]
        return cuda.behind(
            gpu,
            self.shape,
            parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1),
            placed.angles,
            placed.buffers[slot],
            placed.groups[slot],
            tokens=x.shape[0],
            query_norm=self.query_norm.pair,
            key_norm=self.key_norm.pair,
        )

    def _keys_values(self, x: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """Keys and values `[1, kv_heads, T, D]` at the batch's positions."""
        c = self.config
        k, v = (part.reshape(-1, c.kv_heads, c.head_dim) for part in self.key_value(x))
        k = self.rope(self.key_norm(k), batch)
        return k[None].swapaxes(1, 2), v[None].swapaxes(1, 2)


def load_projections(
    checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: AttentionConfig
) -> tuple[Linear, Linear, Linear]:
    """Of queries, keys and values, from three tensors or from one with their rows in this order."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    fused = f"{prefix}.qkv_proj"
    if f"{fused}.weight" not in checkpoint:
        query, key, value = (
            Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=config.qkv_bias, shape=(rows, config.hidden))
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        )
        return query, key, value
    whole = Linear.load(checkpoint, fused, dtype, bias=config.qkv_bias, shape=(q + 2 * kv, config.hidden))
    parts = [slice(0, q), slice(q, q + kv), slice(q + kv, None)]
    query, key, value = (
        Linear(whole.weight.rows(part), None if whole.bias is None else whole.bias[part]) for part in parts
    )
    return query, key, value


class Layer:
    """`x += attention(norm(x)); x += mlp(norm(x))`, in DFlash2 each between convolutions."""

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP,
        before: RMSNorm,
        between: RMSNorm,
        convs: Sequence[GroupedDynamicConv],
        *,
        context_normed: bool,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.before = before
        self.between = between
        self.convs = list(convs)
        self.context_normed = context_normed

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, index: int, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `layers.0`."""
        before, between = (
            RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=config.eps, width=config.hidden)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        convs = []
        if config.conv is not None:
            convs = [
                GroupedDynamicConv.load(checkpoint, f"{prefix}.{name}", dtype, config.conv, config.hidden)
                for name in ("attention_conv", "mlp_conv")
            ]
        mlp = GatedMLP.load(
            checkpoint,
            f"{prefix}.mlp",
            dtype,
            hidden=config.hidden,
            intermediate=config.intermediate,
            activation=config.activation,
            bias=False,
        )
        attention = Attention.load(checkpoint, f"{prefix}.self_attn", dtype, config, index, rope)
        return cls(attention, mlp, before, between, convs, context_normed=config.laguna)

    def extend(self, context: mx.array, batch: Batch, slot: int) -> None:
        """Append context rows to the spans' caches; only Laguna's drafts norm them as a layer's input."""
        self.attention.extend(self.before(context) if self.context_normed else context, batch, slot)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        normed = self.before(x)
        if not self.convs:
            x, normed = self.between.of_sum(x, self.attention(normed, batch, slot))
            return x + self.mlp(normed)
        around_attention, around_mlp = self.convs
        taken, kernel = around_attention.before(normed, batch)
        x = around_attention.after(x, self.attention(taken, batch, slot), kernel, batch)
        taken, kernel = around_mlp.before(self.between(x), batch)
        return around_mlp.after(x, self.mlp(taken), kernel, batch)

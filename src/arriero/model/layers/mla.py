"""Multi-head latent attention: all heads share one cached vector a token, which is key and value at once.

Each head's key is `[W_k c ‖ r]` and its value `W_v c`, with a latent c and a rotated r that all heads share. Here W_k
is moved over to the query and W_v behind the sum (the absorbed form): the cache holds `[c ‖ r]` only, and attention is
that of many query heads over one wide key head. Prompts and single steps are computed alike. The other form, which
makes every head's keys and values first, rounds otherwise, and a token's bits would depend on its chunk.

What that costs a prompt: `2 · (2 · rank + rotated)` operations a query, key and head where the other form takes
`2 · (nope + rotated + value)`, but `2 · rank · (nope + value)` more a key, head and chunk. With DeepSeek-V3's sizes
that is 3.4 times as much between the projections without those products; with them it is less up to chunks of 170
tokens, and 1.9 times as much at 512. Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels import device
from arriero.kernels.attention import attention
from arriero.kernels.cuda import latent as cuda
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import Operand
from arriero.kernels.embedding import dequantize
from arriero.kernels.matrix import Matrix, few
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.attention import spans
from arriero.model.layers.config import Fields
from arriero.model.layers.experts import expert_product
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.weight import Weight
from arriero.runner.caches.full import KVCache

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the configuration's `rms_norm_eps` is."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Shape and options of one latent attention layer; widths are numbers of elements."""

    hidden: int
    heads: int
    query_rank: int | None
    """Width of the queries' own latent; None where they are projected from the hidden state."""
    rank: int
    """Width of the latent of keys and values."""
    nope: int
    """Width of a head's query and key that is not rotated."""
    rotated: int
    value: int
    """Width of a head's value."""
    scale: float
    bias: bool
    """Whether the projections from and to the hidden state have biases."""

    @classmethod
    def read(cls, fields: Fields, rope: RopeConfig, *, hidden: int, heads: int) -> Self:
        """From the fields of DeepSeek's configurations; CheckpointError names one that is missing or contradicts."""
        kv_heads = fields.integer("num_key_value_heads", heads)
        if kv_heads != heads:
            raise fields.wrong(
                "num_key_value_heads", f"num_attention_heads ({heads}): a latent serves all heads", kv_heads
            )
        if rope.partial != 1:
            raise fields.wrong("partial_rotary_factor", "1: `qk_rope_head_dim` says what is rotated", rope.partial)
        nope, rotated = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        return cls(
            hidden=hidden,
            heads=heads,
            query_rank=fields.optional_integer("q_lora_rank"),
            rank=fields.integer("kv_lora_rank"),
            nope=nope,
            rotated=rotated,
            value=fields.integer("v_head_dim"),
            scale=(nope + rotated) ** -0.5 * yarn_gain(rope) ** 2,
            bias=fields.flag("attention_bias", False),
        )

    @property
    def width(self) -> int:
        """Of what is cached of a token."""
        return self.rank + self.rotated

    def cache_bytes(self, dtype: mx.Dtype, context_length: int) -> tuple[int, int]:
        """Bytes for each token of a row, and bytes that a row takes however long it is."""
        del context_length
        return self.width * dtype.size, 0


def yarn_gain(rope: RopeConfig) -> float:
    """What YaRN's `mscale_all_dim` multiplies queries and keys by, beside the magnitude of their rotated parts."""
    fields = Fields(rope.parameters or {}, f"config.json: {rope.kind} rope")
    if rope.kind != "yarn" or not fields.get("mscale_all_dim"):
        return 1.0
    original = fields.integer("original_max_position_embeddings", rope.context_length or 4096)
    factor = fields.number("factor", max(1.0, rope.context_length / original))
    return 0.1 * fields.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """Each head's vector through a matrix of its own."""

    weight: Weight
    """`[heads, out, in]`."""

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, heads, in]` to `[T, heads, out]`."""
        return self.by_head(x.swapaxes(0, 1)).swapaxes(0, 1)

    def by_head(self, x: mx.array) -> mx.array:
        """`[heads, T, in]` to `[heads, T, out]`."""
        heads, tokens, width = x.shape
        if self.weight.quantization is None and device.cuda() is not None:
            return x @ self.weight.data.swapaxes(-1, -2)
        indices = mx.repeat(mx.arange(heads, dtype=mx.uint32), tokens)
        y = expert_product(x.reshape(heads * tokens, width), self.weight, indices, sorted_indices=True)
        return y.reshape(heads, tokens, -1)


class LatentAttention:
    """Projections to latents, their norms, rotation, attention over one shared key head, output projection."""

    def __init__(
        self,
        config: LatentConfig,
        rope: Rope,
        dtype: mx.Dtype,
        *,
        query: Linear,
        query_norm: RMSNorm | None,
        query_up: Linear | None,
        latent: Linear,
        latent_norm: RMSNorm,
        key_up: HeadLinear,
        value_up: HeadLinear,
        out: Linear,
    ) -> None:
        self.config = config
        self.rope = rope
        self.dtype = dtype
        self.inputs = FusedLinear([query, latent])
        self.query_norm = query_norm
        self.query_up = query_up
        self.latent_norm = latent_norm
        self.key_up = key_up
        self.value_up = value_up
        self.out = out
        c = config
        self.shape = cuda.Shape(c.heads, c.rank, c.rotated, c.nope, c.scale, rope.interleaved)
        self.before: RMSNorm | None = None
        self._operands: list[tuple[Matrix, Operand | None]] = []

    def surround(self, before: RMSNorm) -> None:
        """Take in the norm that stands before it: from now on calls include it."""
        self.before = before

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: LatentConfig, rope: Rope) -> Self:
        """Under `prefix`: `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`; `kv_a_proj_with_mqa`,
        `kv_a_layernorm`; `kv_b_proj`, or `embed_q` and `unembed_out`; `o_proj`. CheckpointError naming the tensor.
        """
        c = config
        heads_width = c.heads * (c.nope + c.rotated)

        def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=bias, shape=(rows, columns))

        def norm(name: str, width: int) -> RMSNorm:
            return RMSNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=LATENT_EPS, width=width)

        if c.query_rank is None:
            query, query_norm, query_up = linear("q_proj", heads_width, c.hidden), None, None
        else:
            query = linear("q_a_proj", c.query_rank, c.hidden, bias=c.bias)
            query_norm = norm("q_a_layernorm", c.query_rank)
            query_up = linear("q_b_proj", heads_width, c.query_rank)
        key_up, value_up = load_up(checkpoint, prefix, dtype, c)
        return cls(
            c,
            rope,
            dtype,
            query=query,
            query_norm=query_norm,
            query_up=query_up,
            latent=linear("kv_a_proj_with_mqa", c.width, c.hidden, bias=c.bias),
            latent_norm=norm("kv_a_layernorm", c.rank),
            key_up=key_up,
            value_up=value_up,
            out=linear("o_proj", c.hidden, c.heads * c.value, bias=c.bias),
        )

    def new_cache(self) -> KVCache:
        """Memory of one row: a latent and a rotated key a token, and no values."""
        return KVCache(1, self.config.width, 0, self.dtype)

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """`[T, hidden]` to `[T, hidden]`; appends to the spans' caches of `slot`."""
        gpu = device.cuda()
        if gpu is not None and gpu.in_place and x.dtype == mx.bfloat16:
            lengths, _ = spans(batch)
            if cuda.takes(gpu, self.shape, lengths, self.rope.angles(batch), self.latent_norm.pair):
                return self._few(gpu, x, batch, slot)
        c = self.config
        x = x if self.before is None else self.before(x)
        q, latent = self.inputs(x)
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q_nope, q_rotated = mx.split(q.reshape(-1, c.heads, c.nope + c.rotated), [c.nope], axis=-1)
        content, rotated = mx.split(latent, [c.rank], axis=-1)
        q = mx.concatenate([self.key_up(q_nope), self.rope(q_rotated, batch)], axis=-1)
        shared = mx.concatenate([self.latent_norm(content), self.rope(rotated[:, None], batch)[:, 0]], axis=-1)
        y = attend_shared(q, shared, batch, slot, value_width=c.rank, scale=c.scale)
        return self.out(self.value_up(y).reshape(-1, c.heads * c.value))

    def _few(self, gpu: Gpu, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """The same for few tokens of each row, with all between the products in one launch."""
        c = self.config
        if not self._operands:
            matrices = [
                *self.inputs.matrices,
                *([] if self.query_up is None else [self.query_up.matrix]),
                self.out.matrix,
            ]
            self._operands = [(matrix, matrix.operand()) for matrix in matrices]
        *inputs, out = self._operands
        up = None if self.query_up is None else inputs.pop()
        parts = [_product(gpu, x, of, self.before) for of in inputs]
        queries, fresh = parts[0], parts[-1]
        begin = fresh.shape[1] - c.width
        if up is not None:
            queries = _product(gpu, queries[:, : self.inputs.sizes[0]], up, self.query_norm)
        edge = c.heads * (c.nope + c.rotated)
        q = queries if queries.shape[1] == edge else queries[:, :edge]
        absorbed = self.key_up.by_head(q.reshape(-1, c.heads, c.nope + c.rotated)[..., : c.nope].swapaxes(0, 1))
        lengths, positions = spans(batch)
        caches = batch.caches(slot)
        held = [cache.reserve(length) for cache, length in zip(caches, lengths, strict=True)]
        y, filled = cuda.attend(
            gpu,
            self.shape,
            absorbed,
            queries,
            fresh,
            self.rope.angles(batch),
            self.latent_norm.pair,
            [keys for keys, _, _ in held],
            begin=begin,
            lengths=lengths,
            positions=positions,
            bases=[base for _, _, base in held],
            memo=batch.memo,
        )
        for keys, (_, nothing, _), cache, length in zip(filled, held, caches, lengths, strict=True):
            cache.commit(keys, nothing, length)
        return _product(gpu, self.value_up(y).reshape(-1, c.heads * c.value), out, None)


def _product(gpu: Gpu, x: mx.array, of: tuple[Matrix, Operand | None], norm: RMSNorm | None) -> mx.array:
    """`norm(x) @ Wᵀ (+ bias)`, in one launch for few rows."""
    matrix, packed = of
    made = few(gpu, x, matrix, packed, norm=None if norm is None else norm.pair)
    return made if made is not None else matrix(x if norm is None else norm(x))


def attend_shared(
    q: mx.array, shared: mx.array, batch: Batch, slot: int, *, value_width: int, scale: float
) -> mx.array:
    """Append each span's shared vectors to its cache of `slot`, then causal attention over what it holds.

    q `[T, heads, D]`, shared `[T, D]`, whose first `value_width` elements are the value too; returns
    `[T, heads, value_width]` in q's dtype.
    """
    lengths, positions = spans(batch)
    keys: list[mx.array] = []
    bases: list[int] = []
    first = 0
    for length, cache in zip(lengths, batch.caches(slot), strict=True):
        new = shared[None, None, first : first + length]
        held, _, base = cache.append(new, mx.zeros((1, 1, length, 0), shared.dtype))
        keys.append(held)
        bases.append(base)
        first += length
    return attention(
        q,
        keys,
        [held[..., :value_width] for held in keys],
        scale=scale,
        lengths=lengths,
        positions=positions,
        bases=bases,
        memo=batch.memo,
    )


def load_up(
    checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: LatentConfig
) -> tuple[HeadLinear, HeadLinear]:
    """What turns a head's query into a query of latents, `[heads, rank, nope]`, and a latent into the head's value,
    `[heads, value, rank]`.

    MLX's tools and GGUF files store both so (`embed_q`, `unembed_out`), and they stay packed as they are. Hugging Face
    has one matrix (`kv_b_proj`): its rows for values stay packed; those for keys are read across their groups, and so
    decoded, whatever their format is.
    """
    c = config
    shapes = {"embed_q": (c.heads, c.rank, c.nope), "unembed_out": (c.heads, c.value, c.rank)}
    if any(f"{prefix}.{name}.weight" in checkpoint for name in shapes):
        found = []
        for name, shape in shapes.items():
            weight = checkpoint.weight(f"{prefix}.{name}.weight").astype(dtype)
            expect_shape(f"{prefix}.{name}.weight", weight.shape, shape)
            found.append(HeadLinear(weight))
        return found[0], found[1]
    name = f"{prefix}.kv_b_proj.weight"
    both = checkpoint.weight(name).astype(dtype)
    expect_shape(name, both.shape, (c.heads * (c.nope + c.value), c.rank))
    by_head = _each(both, lambda array: array.reshape(c.heads, c.nope + c.value, -1))
    keys = dense(by_head.rows(slice(0, c.nope)), dtype).swapaxes(-1, -2)
    values = _each(by_head.rows(slice(c.nope, None)), mx.contiguous)
    return HeadLinear(Weight(mx.contiguous(keys))), HeadLinear(values)


def dense(weight: Weight, dtype: mx.Dtype) -> mx.array:
    """The numbers of a weight, in `dtype`; CheckpointError when it is packed and has no scales."""
    how = weight.quantization
    if how is None:
        return weight.data.astype(dtype)
    if weight.scales is None:
        raise CheckpointError("a packed matrix has no scales")
    values = dequantize(
        weight.data, weight.scales, weight.biases, group_size=how.group_size, bits=how.bits, mode=how.mode
    )
    if weight.global_scale is not None:
        values = values * weight.global_scale
    return values.astype(dtype)


def _each(weight: Weight, change: Callable[[mx.array], mx.array]) -> Weight:
    """The same change to the arrays that have a row for each row of the matrix."""
    return replace(
        weight,
        data=change(weight.data),
        scales=None if weight.scales is None else change(weight.scales),
        biases=None if weight.biases is None else change(weight.biases),
    )

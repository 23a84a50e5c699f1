"""The mixture of experts of gpt-oss: chosen by logits, clamped, biased, and published as MXFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels import device
from arriero.kernels.cuda.router import Choice
from arriero.kernels.expert_part import ExpertPart
from arriero.kernels.sparse_part import SparsePart
from arriero.kernels.topk import top_k_values
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.expert_rows import through_experts
from arriero.model.layers.experts import expert_product, load_bank
from arriero.model.layers.linear import Linear, expect_shape, matrix
from arriero.model.layers.norm import RMSNorm
from arriero.model.weight import Quantization, Weight, concatenate_rows

BLOCK = 32
"""Codes that share an exponent."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How many experts there are, how many of them a token gets, their width, and the shape of their activation."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    alpha: float
    limit: float

    @classmethod
    def read(cls, fields: Fields, *, hidden: int, intermediate: int) -> Self:
        """CheckpointError names a field that is missing or wrong."""
        experts = fields.integer("num_local_experts" if fields.has("num_local_experts") else "num_experts", 128)
        top_k = fields.integer("num_experts_per_tok", 4)
        if top_k > experts:
            raise fields.wrong("num_experts_per_tok", f"at most the number of experts ({experts})", top_k)
        return cls(
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            intermediate=intermediate,
            alpha=fields.number("swiglu_alpha", 1.702),
            limit=fields.number("swiglu_limit", 7.0),
        )


@device.fused
def clamped_swiglu(gate: mx.array, up: mx.array, alpha: float, limit: float) -> mx.array:
    """`g σ(α g) (u + 1)` with `g = min(gate, limit)` and u within ± limit, in float32; the result has gate's dtype."""
    g = mx.minimum(gate.astype(mx.float32), limit)
    u = mx.clip(up.astype(mx.float32), -limit, limit)
    return (g * mx.sigmoid(alpha * g) * (u + 1)).astype(gate.dtype)


class Router:
    """The `top_k` experts of the highest logits, weighed by the softmax of those alone."""

    def __init__(self, gate: Linear, top_k: int) -> None:
        self.gate = gate
        self.top_k = top_k

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        logits, chosen = top_k_values(self.gate(x).astype(mx.float32), self.top_k)
        return chosen.astype(mx.uint32), mx.softmax(logits, axis=-1, precise=True)


@dataclass(frozen=True, slots=True)
class BiasedBank:
    """One matrix and one bias for each expert."""

    weight: Weight
    bias: mx.array
    """`[experts, out]`."""

    def __call__(self, x: mx.array, experts: mx.array, *, ascending: bool) -> mx.array:
        """Rows x `[R, in]` through experts `[R]` or `[R, k]`: `[R, out]` or `[R, k, out]`."""
        return expert_product(x, self.weight, experts, sorted_indices=ascending) + self.bias[experts]


class ClampedExperts:
    """A bank of biased experts: `Σ weight · (down(clamped_swiglu(gate(x), up(x))))`.

    The rows of gate and up take turns in one matrix, as they are published, or come one after the other, or are two
    matrices where their formats differ.
    """

    def __init__(
        self, config: ExpertsConfig, gate_up: Sequence[BiasedBank], down: BiasedBank, *, by_turns: bool = False
    ) -> None:
        self.config = config
        self.gate_up = list(gate_up)
        self.down = down
        self.by_turns = by_turns
        self.part = ExpertPart(
            [matrix(bank.weight, bank.bias) for bank in gate_up],
            matrix(down.weight, down.bias),
            "silu",
            (config.alpha, config.limit),
            by_turns,
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: ExpertsConfig) -> Self:
        """Banks under `prefix`, e.g. `model.layers.0.mlp`.

        As published (`experts.gate_up_proj_blocks` and `_scales`), as transformers holds them dense
        (`experts.gate_up_proj`, in by out), or as MLX's tools and GGUF files do (`gate_proj` and `up_proj`, or
        `gate_up_proj.weight` with their rows by turns).
        """
        c, experts = config, f"{prefix}.experts"
        if f"{experts}.gate_proj.weight" in checkpoint:
            wide, narrow = (c.experts, c.intermediate, c.hidden), (c.experts, c.hidden, c.intermediate)
            gate, up, down = (
                BiasedBank(
                    load_bank(checkpoint, prefix, name, dtype, shape),
                    _bias(checkpoint, f"{experts}.{name}.bias", dtype, shape[:2]),
                )
                for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", narrow))
            )
            joined = concatenate_rows([gate.weight, up.weight])
            both = [gate, up] if joined is None else [BiasedBank(joined, mx.concatenate([gate.bias, up.bias], axis=-1))]
            return cls(config, both, down)
        by_rows = f"{experts}.gate_up_proj.weight" in checkpoint
        by_blocks = f"{experts}.gate_up_proj_blocks" in checkpoint

        def bank(name: str, shape: tuple[int, int, int]) -> BiasedBank:
            if by_rows:
                weight = load_bank(checkpoint, prefix, name, dtype, shape)
            elif by_blocks:
                weight = _blocks(checkpoint, f"{experts}.{name}", shape)
            else:
                weight = _transposed(checkpoint, f"{experts}.{name}", dtype, shape)
            bias = f"{experts}.{name}.bias" if by_rows else f"{experts}.{name}_bias"
            return BiasedBank(weight, _bias(checkpoint, bias, dtype, shape[:2]))

        gate_up = bank("gate_up_proj", (c.experts, 2 * c.intermediate, c.hidden))
        return cls(config, [gate_up], bank("down_proj", (c.experts, c.hidden, c.intermediate)), by_turns=True)

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """x `[T, hidden]`, experts `[T, k]` and weights float32 `[T, k]`, to `[T, hidden]` in x's dtype."""
        fused = self.part(x, chosen, weights)
        return through_experts(x, chosen, weights, self._run) if fused is None else fused

    def _run(self, x: mx.array, experts: mx.array, *, ascending: bool) -> mx.array:
        c = self.config
        outputs = [bank(x, experts, ascending=ascending) for bank in self.gate_up]
        if self.by_turns:
            gate, up = outputs[0][..., 0::2], outputs[0][..., 1::2]
        else:
            gate, up = outputs if len(outputs) == 2 else mx.split(outputs[0], 2, axis=-1)
        inner = clamped_swiglu(gate, up, c.alpha, c.limit).reshape(experts.size, -1)
        return self.down(inner, experts.reshape(-1), ascending=ascending)


class SparseMLP:
    """The router and its experts in place of a feed-forward layer."""

    def __init__(self, router: Router, experts: ClampedExperts) -> None:
        self.router = router
        self.experts = experts
        self.part = SparsePart(router.gate.matrix, Choice(router.top_k, normalise=True), experts.part)

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: ExpertsConfig) -> Self:
        """`router` and `experts` under `prefix`."""
        shape = (config.experts, config.hidden)
        gate = Linear.load(checkpoint, f"{prefix}.router", dtype, bias=True, shape=shape)
        return cls(Router(gate, config.top_k), ClampedExperts.load(checkpoint, prefix, dtype, config))

    def __call__(self, x: mx.array) -> mx.array:
        few = self.part(x)
        return self.experts(x, *self.router(x)) if few is None else few

    def after(self, x: mx.array, branch: mx.array, norm: RMSNorm) -> mx.array:
        """`h + self(norm(h))` with `h = x + branch`."""
        few = self.part(x, branch, norm.pair)
        if few is not None:
            return few
        x, normed = norm.of_sum(x, branch)
        return x + self.experts(normed, *self.router(normed))


def _blocks(checkpoint: Checkpoint, name: str, shape: tuple[int, int, int]) -> Weight:
    """The codes of `name_blocks` (16 bytes for 32 codes, the first in the low half) are MLX's; no byte moves."""
    blocks, scales = checkpoint.tensor(f"{name}_blocks"), checkpoint.tensor(f"{name}_scales")
    groups = (*shape[:2], shape[2] // BLOCK)
    if shape[2] % BLOCK:
        raise CheckpointError(f"tensor {name}_blocks: rows of {shape[2]} numbers are no blocks of {BLOCK}")
    expect_shape(f"{name}_blocks", tuple(blocks.shape), (*groups, BLOCK // 2))
    expect_shape(f"{name}_scales", tuple(scales.shape), groups)
    if blocks.dtype != mx.uint8 or scales.dtype != mx.uint8:
        raise CheckpointError(f"tensors {name}_blocks and _scales are {blocks.dtype} and {scales.dtype}, not uint8")
    return Weight(blocks.flatten(-2).view(mx.uint32), Quantization("mxfp4", 4, BLOCK), scales)


def _transposed(checkpoint: Checkpoint, name: str, dtype: mx.Dtype, shape: tuple[int, int, int]) -> Weight:
    """Dense matrices stored in by out; packed ones would have their groups along the wrong axis."""
    held = checkpoint.weight(name)
    if held.quantization is not None:
        raise CheckpointError(
            f"tensor {name} is packed as {held.quantization.name}, but its rows are inputs here, so that its groups "
            "run the wrong way; use the published MXFP4 model, a GGUF file or one quantised for MLX"
        )
    expect_shape(name, held.shape, (shape[0], shape[2], shape[1]))
    return Weight(mx.contiguous(held.data.swapaxes(-1, -2)).astype(dtype))


def _bias(checkpoint: Checkpoint, name: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    values = checkpoint.tensor(name)
    expect_shape(name, tuple(values.shape), shape)
    return values.astype(dtype)

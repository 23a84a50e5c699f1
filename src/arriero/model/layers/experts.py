"""Mixtures of experts: the router and the bank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.activation import sigmoid_gate
from arriero.kernels.cuda.router import Choice
from arriero.kernels.device import native
from arriero.kernels.expert_part import ExpertPart
from arriero.kernels.gather_matmul import (
    gather_gated,
    gather_matmul,
    gather_packed_matmul,
    gather_quantized_matmul,
)
from arriero.kernels.sparse_part import SparsePart
from arriero.kernels.topk import top_k
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import Linear, expect_shape, matrix
from arriero.model.layers.mlp import Activation, GatedMLP, gated
from arriero.model.layers.norm import RMSNorm
from arriero.model.weight import Weight, concatenate_rows, stack_experts

SORT_FROM = 64
"""Tokens from which sorting them by expert pays."""


@dataclass(frozen=True)
class SparseConfig:
    """The mixture of experts of a Qwen configuration, and the layers that have one."""

    experts: int
    top_k: int
    intermediate: int
    normalise: bool
    layers: frozenset[int]

    @classmethod
    def read(cls, fields: Fields, layers: int, *, normalise: bool) -> Self:
        """`normalise` is what a missing `norm_topk_prob` means.

        `num_local_experts` is a newer name of `num_experts`.
        """
        renamed = not fields.has("num_experts") and fields.has("num_local_experts")
        experts = fields.integer("num_local_experts" if renamed else "num_experts")
        top_k = fields.integer("num_experts_per_tok")
        if top_k > experts:
            raise fields.wrong("num_experts_per_tok", f"at most the number of experts ({experts})", top_k)
        step = fields.integer("decoder_sparse_step", 1)
        dense = fields.get("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(isinstance(index, int) for index in dense):
            raise fields.wrong("mlp_only_layers", "a list of layer numbers", dense)
        return cls(
            experts=experts,
            top_k=top_k,
            intermediate=fields.integer("moe_intermediate_size"),
            normalise=fields.flag("norm_topk_prob", normalise),
            layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
        )


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `top_k` experts a token by softmax."""

    gate: Linear
    top_k: int
    normalise: bool
    """Whether the chosen weights are made to sum to one."""

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x `[T, hidden]` to experts, uint32 `[T, k]`, and their weights, float32 `[T, k]`."""
        scores = mx.softmax(self.gate(x).astype(mx.float32), axis=-1, precise=True)
        chosen = best_experts(scores, self.top_k)
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return chosen, weights


def best_experts(scores: mx.array, count: int) -> mx.array:
    """The `count` experts of the highest scores `[T, experts]`, uint32 `[T, count]`, in an order that only the row's
    scores decide.

    A partition sorts whole rows: 2.6 ms for the 10 best of 512 rows of 512 on the CPU; the extension takes 0.5.
    """
    if native() is not None:
        return top_k(scores, count).astype(mx.uint32)
    return mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count].astype(mx.uint32)


def expert_product(x: mx.array, bank: Weight, indices: mx.array, *, sorted_indices: bool = False) -> mx.array:
    """Rows x `[R, in]` through the experts `indices` `[R]` or `[R, k]`: `[R, out]` or `[R, k, out]`, in x's dtype."""
    packed = bank.packed()
    if packed is not None:
        return gather_packed_matmul(x, packed, indices, global_scale=bank.global_scale, exact=bank.exact)
    if bank.quantization is None:
        return gather_matmul(x, bank.data, indices, sorted_indices=sorted_indices)
    if bank.scales is None:
        raise CheckpointError("a packed bank of experts has no scales")
    how = bank.quantization
    return gather_quantized_matmul(
        x,
        bank.data,
        bank.scales,
        bank.biases,
        indices=indices,
        group_size=how.group_size,
        bits=how.bits,
        mode=how.mode,
        global_scale=bank.global_scale,
        sorted_indices=sorted_indices,
        exact=bank.exact,
    )


class Experts:
    """A bank of gated feed-forward experts: `Σ weight · down(activation(gate(x)) · up(x))`.

    Each bank carries its own format and its own global scales; the gate's scale is applied before the activation.
    """

    def __init__(self, gate: Weight, up: Weight, down: Weight, activation: Activation) -> None:
        self.intermediate = gate.shape[1]
        joined = concatenate_rows([gate, up])
        self.gate_up = [gate, up] if joined is None else [joined]
        self.down = down
        for bank in (*self.gate_up, down):
            bank.packed()
        self.activation: Activation = activation
        self.part = ExpertPart([matrix(bank) for bank in self.gate_up], matrix(down), activation)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        *,
        experts: int,
        hidden: int,
        intermediate: int,
        activation: Activation = "silu",
    ) -> Self:
        """Banks under `prefix`, as any of the published layouts.

        `experts.N.gate_proj.weight` one by one; `experts.gate_proj.weight`, `experts.switch_glu.gate_proj.weight` or
        `switch_mlp.gate_proj.weight` stacked; or `experts.gate_up_proj` with gate's rows before up's.
        """
        wide, narrow = (experts, intermediate, hidden), (experts, hidden, intermediate)
        fused = f"{prefix}.experts.gate_up_proj"
        name = next((n for n in (fused, f"{fused}.weight") if n in checkpoint), None)
        if name is not None:
            both = checkpoint.weight(name).astype(dtype)
            expect_shape(name, both.shape, (experts, 2 * intermediate, hidden))
            gate, up = both.rows(slice(0, intermediate)), both.rows(slice(intermediate, None))
        else:
            gate = load_bank(checkpoint, prefix, "gate_proj", dtype, wide)
            up = load_bank(checkpoint, prefix, "up_proj", dtype, wide)
        down = load_bank(checkpoint, prefix, "down_proj", dtype, narrow)
        return cls(gate, up, down, activation)

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """x `[T, hidden]`, experts `[T, k]` and weights float32 `[T, k]`, to `[T, hidden]` in x's dtype."""
        fused = self.part(x, chosen, weights)
        if fused is not None:
            return fused
        tokens, top_k = chosen.shape
        if tokens < SORT_FROM:
            inner = self._inner(x, chosen)
            if inner is None:
                gate, up = self._gate_up(x, chosen, ascending=False)
                inner = gated(self.activation, gate, up)
            inner = inner.reshape(tokens * top_k, -1)
            y = expert_product(inner, self.down, chosen.reshape(-1))
        else:
            flat = chosen.reshape(-1)
            order = mx.argsort(flat)
            experts = flat[order]
            gate, up = self._gate_up(x[order // top_k], experts, ascending=True)
            y = expert_product(gated(self.activation, gate, up), self.down, experts, sorted_indices=True)
            y = y[mx.argsort(order)]
        y = y.reshape(tokens, top_k, -1)
        return (weights.astype(y.dtype)[:, None, :] @ y).squeeze(1)

    def _inner(self, x: mx.array, chosen: mx.array) -> mx.array | None:
        """What the down matrices take, `[T, k, intermediate]`, in one launch; None where no kernel does that."""
        bank = self.gate_up[0]
        if len(self.gate_up) > 1 or bank.packed() is not None or bank.quantization is None or bank.scales is None:
            return None
        how = bank.quantization
        return gather_gated(
            x,
            bank.data,
            bank.scales,
            bank.biases,
            indices=chosen,
            group_size=how.group_size,
            bits=how.bits,
            mode=how.mode,
            global_scale=bank.global_scale,
            activation=self.activation,
        )

    def _gate_up(self, x: mx.array, indices: mx.array, *, ascending: bool) -> list[mx.array]:
        outputs = [expert_product(x, bank, indices, sorted_indices=ascending) for bank in self.gate_up]
        return outputs if len(outputs) == 2 else list(mx.split(outputs[0], [self.intermediate], axis=-1))


class SparseMLP:
    """A router and its experts in place of a feed-forward layer."""

    def __init__(self, router: Router, experts: Experts) -> None:
        self.router = router
        self.experts = experts
        self.part = sparse_part(router, experts)

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


class SharedSparseMLP:
    """A mixture of experts beside one that every token takes, weighed by `sigmoid(gate(x))`."""

    def __init__(self, sparse: SparseMLP, shared: GatedMLP, gate: Linear) -> None:
        self.sparse = sparse
        self.shared = shared
        self.gate = gate
        self.part = sparse_part(sparse.router, sparse.experts, shared, gate)

    def __call__(self, x: mx.array) -> mx.array:
        few = self.part(x)
        return self._by_operations(x) if few is None else few

    def after(self, x: mx.array, branch: mx.array, norm: RMSNorm) -> mx.array:
        """`h + self(norm(h))` with `h = x + branch`."""
        few = self.part(x, branch, norm.pair)
        if few is not None:
            return few
        x, normed = norm.of_sum(x, branch)
        return x + self._by_operations(normed)

    def _by_operations(self, x: mx.array) -> mx.array:
        return self.sparse(x) + sigmoid_gate(self.shared(x), self.gate(x))


def sparse_part(
    router: Router, experts: Experts, shared: GatedMLP | None = None, gate: Linear | None = None
) -> SparsePart:
    """All of a mixture as kernels take it; an expert that every token takes has the others' activation."""
    alike = shared is None or shared.activation == experts.activation
    return SparsePart(
        router.gate.matrix,
        Choice(router.top_k, router.normalise),
        experts.part if alike else None,
        one_gate=None if gate is None else gate.matrix,
        one_gate_up=() if shared is None else shared.gate_up.matrices,
        one_down=None if shared is None else shared.down.matrix,
    )


def load_bank(checkpoint: Checkpoint, prefix: str, name: str, dtype: mx.Dtype, shape: tuple[int, int, int]) -> Weight:
    """The matrices `name` of all experts under `prefix`, `[experts, out, in]`, stacked or one by one in the file."""
    for stacked in (
        f"{prefix}.experts.{name}",
        f"{prefix}.experts.{name}.weight",
        f"{prefix}.experts.switch_glu.{name}.weight",
        f"{prefix}.switch_mlp.{name}.weight",
    ):
        if stacked in checkpoint:
            bank = checkpoint.weight(stacked).astype(dtype)
            expect_shape(stacked, bank.shape, shape)
            return bank
    weights = []
    for index in range(shape[0]):
        single = f"{prefix}.experts.{index}.{name}.weight"
        weights.append(checkpoint.weight(single).astype(dtype))
        expect_shape(single, weights[-1].shape, shape[1:])
    bank_or_none = stack_experts(weights)
    if bank_or_none is None:
        raise CheckpointError(f"the experts' tensors {prefix}.experts.*.{name}.weight differ in format")
    return bank_or_none

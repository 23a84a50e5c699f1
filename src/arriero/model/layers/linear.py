"""Linear layers over dense or packed matrices, alone or several fused into one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.matrix import Matrix
from arriero.model.checkpoint import Checkpoint
from arriero.model.weight import Weight, concatenate_rows


def matrix(weight: Weight, bias: mx.array | None = None) -> Matrix:
    """A weight as kernels take it, global scale included."""
    packed = weight.packed()
    if packed is not None:
        return Matrix(packed=packed, global_scale=weight.global_scale, bias=bias, exact=weight.exact)
    how = weight.quantization
    if how is None:
        return Matrix(weight.data, bias=bias)
    if weight.scales is None:
        raise CheckpointError("a packed matrix has no scales")
    return Matrix(
        weight.data,
        weight.scales,
        weight.biases,
        group_size=how.group_size,
        bits=how.bits,
        mode=how.mode,
        global_scale=weight.global_scale,
        bias=bias,
        exact=weight.exact,
    )


def product(x: mx.array, weight: Weight) -> mx.array:
    """`x @ weight.T` for x `[..., in]`, in x's dtype, global scale included."""
    return matrix(weight)(x)


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ Wᵀ (+ bias)`."""

    weight: Weight
    bias: mx.array | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        *,
        bias: bool | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Self:
        """`prefix.weight`, and `prefix.bias` when it must (True), must not (False) or may (None) exist.

        A dense matrix takes the activations' `dtype`; `shape` is what the configuration says, `(out, in)`. Raises
        CheckpointError naming the tensor.
        """
        weight = checkpoint.weight(f"{prefix}.weight").astype(dtype)
        if shape is not None:
            expect_shape(f"{prefix}.weight", weight.shape, shape)
        name = f"{prefix}.bias"
        vector = None
        if bias or (bias is None and name in checkpoint):
            vector = checkpoint.tensor(name).astype(dtype)
            expect_shape(name, tuple(vector.shape), (weight.shape[0],))
        return cls(weight, vector)

    @property
    def matrix(self) -> Matrix:
        """As kernels take it."""
        return matrix(self.weight, self.bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.matrix(x)


class FusedLinear:
    """Several linear layers of the same input: one product where their formats match, else one each.

    Groups run along the input axis, so stacking rows changes no number.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.sizes = [part.weight.shape[0] for part in parts]
        joined = concatenate_rows([part.weight for part in parts])
        biases = [part.bias for part in parts]
        same = all(b is None for b in biases) or all(b is not None for b in biases)
        if joined is None or not same:
            self.parts = list(parts)
        else:
            vectors = [b for b in biases if b is not None]
            self.parts = [Linear(joined, mx.concatenate(vectors) if vectors else None)]
        for part in self.parts:
            part.weight.packed()

    @property
    def matrices(self) -> list[Matrix]:
        """As kernels take them: one, or one a part."""
        return [part.matrix for part in self.parts]

    def __call__(self, x: mx.array) -> list[mx.array]:
        if len(self.parts) > 1:
            return [part(x) for part in self.parts]
        edges = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return list(mx.split(self.parts[0](x), edges, axis=-1))


def expect_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """CheckpointError when a tensor's shape contradicts the configuration."""
    if found != expected:
        raise CheckpointError(
            f"tensor {name} has shape {list(found)}, but the configuration says {list(expected)}; "
            "the checkpoint and its config.json do not belong together"
        )

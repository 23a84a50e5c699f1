"""The token table and the output head."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.embedding import take_packed_rows, take_quantized_rows, take_rows
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Features
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.weight import Weight

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table `[vocab, hidden]`, dense or packed."""

    weight: Weight
    dtype: mx.Dtype

    def __post_init__(self) -> None:
        self.weight.packed()

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, shape: tuple[int, int] | None = None
    ) -> Self:
        """`prefix.weight`; CheckpointError naming the tensor."""
        weight = checkpoint.weight(f"{prefix}.weight").astype(dtype)
        if shape is not None:
            expect_shape(f"{prefix}.weight", weight.shape, shape)
        return cls(weight, dtype)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Ids `[T]` to rows `[T, hidden]`, without any scale."""
        packed = self.weight.packed()
        if packed is not None:
            return take_packed_rows(packed, tokens, dtype=self.dtype, global_scale=self.weight.global_scale)
        how = self.weight.quantization
        if how is None:
            return take_rows(self.weight.data, tokens, self.dtype)
        if self.weight.scales is None:
            raise CheckpointError("a packed embedding has no scales")
        return take_quantized_rows(
            self.weight.data,
            self.weight.scales,
            self.weight.biases,
            tokens,
            group_size=how.group_size,
            bits=how.bits,
            mode=how.mode,
            dtype=self.dtype,
            global_scale=self.weight.global_scale,
        )

    def as_linear(self) -> Linear:
        """The tied output head: the same weight, held once whatever its layout."""
        return Linear(self.weight)


def put_features(x: mx.array, features: Sequence[Features]) -> mx.array:
    """x `[T, hidden]` with the rows of images in their places; the other rows keep their bits."""
    if not features:
        return x
    parts: list[mx.array] = []
    done = 0
    for feature in features:
        if feature.start > done:
            parts.append(x[done : feature.start])
        parts.append(feature.rows.astype(x.dtype))
        done = feature.start + feature.rows.shape[0]
    if done < x.shape[0]:
        parts.append(x[done:])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def load_head(
    checkpoint: Checkpoint, embedding: Embedding, names: Sequence[str], dtype: mx.Dtype, *, tied: bool
) -> Linear:
    """The output head: the embedding when tied, else the first of `names` that exists.

    A tied model with a stray head uses the embedding and says so. An untied one without a head is a CheckpointError.
    """
    present = [name for name in names if f"{name}.weight" in checkpoint]
    if tied:
        if present:
            log.warning(
                "the configuration ties the output head to the embedding, but the checkpoint also holds %s.weight; "
                "the embedding is used",
                present[0],
            )
        return embedding.as_linear()
    if not present:
        raise CheckpointError(
            f"the checkpoint has no {' or '.join(f'{n}.weight' for n in names)}, and its configuration says that the "
            "output head is not tied to the embedding (tie_word_embeddings: false)"
        )
    return Linear.load(checkpoint, present[0], dtype, shape=embedding.weight.shape)  # type: ignore[arg-type]

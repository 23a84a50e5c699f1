"""The output head of Gemma 4's smaller assistants: only tokens of the best groups are scored."""

from __future__ import annotations

from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.topk import top_k
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import Linear, expect_shape


class CentroidHead:
    """Scores of the tokens whose centroids score best.

    `ordering` `[groups, size]` lists the tokens of each group, of which `chosen` are scored.
    """

    def __init__(self, centroids: Linear, ordering: mx.array, table: Embedding, chosen: int) -> None:
        self.centroids = centroids
        self.ordering = ordering
        self.table = table
        self.chosen = chosen

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, table: Embedding, *, groups: int, chosen: int
    ) -> Self:
        """`centroids` and `token_ordering`, a permutation of the vocabulary, under `prefix`."""
        vocab, hidden = table.weight.shape
        ordering = checkpoint.tensor(f"{prefix}.token_ordering").astype(mx.int32)
        expect_shape(f"{prefix}.token_ordering", tuple(ordering.shape), (vocab,))
        if not mx.array_equal(mx.sort(ordering), mx.arange(vocab, dtype=mx.int32)):
            raise CheckpointError(f"tensor {prefix}.token_ordering does not name each of the {vocab} tokens once")
        centroids = Linear.load(checkpoint, f"{prefix}.centroids", dtype, bias=False, shape=(groups, hidden))
        return cls(centroids, ordering.reshape(groups, -1), table, chosen)

    def __call__(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """hidden `[n, hidden]` to scores `[n, m]` and the tokens int32 `[n, m]` that they are of."""
        groups = top_k(self.centroids(hidden), self.chosen)
        tokens = self.ordering[groups].reshape(hidden.shape[0], -1)
        rows = self.table(tokens.reshape(-1)).reshape(*tokens.shape, -1)
        return (rows @ hidden[:, :, None])[..., 0], tokens

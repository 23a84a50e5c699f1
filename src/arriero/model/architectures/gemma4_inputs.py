"""What each layer of a small Gemma 4 gets besides the hidden state: a vector from the token and its embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.config import Fields
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import Activation, gated
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.shape import DecoderShape

KEY = "gemma 4 layer inputs"
"""Where a forward's memo keeps them, `[T, layers, width]`."""


@dataclass(frozen=True)
class InputsConfig:
    """`width` numbers for each layer, out of a table of `vocab` rows."""

    width: int
    vocab: int
    padding: int
    """The token whose row those of images get."""

    @classmethod
    def read(cls, fields: Fields, shape: DecoderShape, *, default: int) -> Self | None:
        """None where the layers get nothing besides."""
        width = fields.integer("hidden_size_per_layer_input", default, minimum=0)
        vocab = fields.integer("vocab_size_per_layer_input", shape.vocab, minimum=0)
        if width and vocab < shape.vocab:
            raise fields.wrong("vocab_size_per_layer_input", f"at least vocab_size ({shape.vocab})", vocab)
        padding = fields.integer("pad_token_id", 0, minimum=0)
        if width and padding >= vocab:
            raise fields.wrong("pad_token_id", f"a token below {vocab}", padding)
        return cls(width, vocab, padding) if width else None


class LayerInputs:
    """The vectors of all layers: a row of a table of their own plus a projection of the token's embedding."""

    def __init__(
        self, table: Embedding, projection: Linear, norm: RMSNorm, layers: int, width: int, padding: int
    ) -> None:
        self.table = table
        self.projection = projection
        self.norm = norm
        self.layers = layers
        self.width = width
        self.padding = padding

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, root: str, dtype: mx.Dtype, config: InputsConfig, shape: DecoderShape
    ) -> Self:
        """`embed_tokens_per_layer`, `per_layer_model_projection` and `per_layer_projection_norm` under `root`."""
        total = shape.layers * config.width
        return cls(
            Embedding.load(checkpoint, f"{root}embed_tokens_per_layer", dtype, shape=(config.vocab, total)),
            Linear.load(
                checkpoint, f"{root}per_layer_model_projection", dtype, bias=False, shape=(total, shape.hidden)
            ),
            # The projection is divided by √hidden before it is normed, which only makes this eps weigh more.
            RMSNorm.load(
                checkpoint,
                f"{root}per_layer_projection_norm",
                dtype,
                eps=shape.eps * shape.hidden,
                width=config.width,
            ),
            shape.layers,
            config.width,
            config.padding,
        )

    def __call__(self, batch: Batch, x: mx.array) -> None:
        """From the scaled embeddings x `[T, hidden]`, images' in their places, into the batch's memo."""
        split = (-1, self.layers, self.width)
        of_token = self.table(self._tokens(batch)).reshape(split) * self.width**0.5
        batch.memo[KEY] = (self.norm(self.projection(x).reshape(split)) + of_token) * 0.5**0.5

    def _tokens(self, batch: Batch) -> mx.array:
        """The tokens, those of images as padding."""
        if not batch.features:
            return batch.tokens
        seen = np.zeros(batch.tokens.shape[0], np.bool_)
        for feature in batch.features:
            seen[feature.start : feature.start + feature.rows.shape[0]] = True
        return mx.where(mx.array(seen), self.padding, batch.tokens)


def given(batch: Batch, index: int) -> mx.array:
    """What one layer gets, `[T, width]`."""
    found: mx.array = batch.memo[KEY][:, index]
    return found


class LayerInput:
    """A layer's last step: its vector, gated by the hidden state and projected."""

    def __init__(self, gate: Linear, projection: Linear, norm: RMSNorm, activation: Activation) -> None:
        self.gate = gate
        self.projection = projection
        self.norm = norm
        self.activation: Activation = activation

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: InputsConfig,
        shape: DecoderShape,
        activation: Activation,
    ) -> Self:
        """`per_layer_input_gate`, `per_layer_projection` and `post_per_layer_input_norm` under `prefix`."""
        down, up = (config.width, shape.hidden), (shape.hidden, config.width)
        return cls(
            Linear.load(checkpoint, f"{prefix}.per_layer_input_gate", dtype, bias=False, shape=down),
            Linear.load(checkpoint, f"{prefix}.per_layer_projection", dtype, bias=False, shape=up),
            RMSNorm.load(checkpoint, f"{prefix}.post_per_layer_input_norm", dtype, eps=shape.eps, width=shape.hidden),
            activation,
        )

    def __call__(self, x: mx.array, vector: mx.array) -> mx.array:
        return self.norm(self.projection(gated(self.activation, self.gate(x), vector)))

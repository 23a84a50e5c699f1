"""BERT and RoBERTa: encoders with learned positions and post-norm layers, for embeddings of texts.

Sources: Devlin et al., 2018 (arXiv:1810.04805); Liu et al., 2019 (arXiv:1907.11692). All MiniLM, bge, e5 and the older
gte are of this family. RoBERTa's positions begin behind its padding's id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import EncoderFacts
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.encoder import BiasedNorm, WholeAttention, gelu, gelu_tanh, refuse_causal
from arriero.model.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    eps: float
    positions: int
    """Rows of the table of positions."""
    first_position: int
    token_types: int
    activation: Callable[[mx.array], mx.array]

    @property
    def context_length(self) -> int:
        """Tokens of a text at most."""
        return self.positions - self.first_position

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        architecture = check_config(values)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden % heads:
            raise fields.wrong("num_attention_heads", f"a divisor of hidden_size ({hidden})", heads)
        kind = fields.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise fields.wrong("position_embedding_type", '"absolute"', kind)
        name = fields.get("hidden_act", "gelu")
        if name not in ACTIVATIONS:
            raise fields.wrong("hidden_act", "one of " + ", ".join(ACTIVATIONS), name)
        padding = fields.integer("pad_token_id", 1, minimum=0) if "Roberta" in architecture else -1
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden=hidden,
            intermediate=fields.integer("intermediate_size"),
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            eps=fields.number("layer_norm_eps", 1e-12),
            positions=fields.integer("max_position_embeddings"),
            first_position=padding + 1,
            token_types=fields.integer("type_vocab_size", 2),
            activation=ACTIVATIONS[name],
        )
        if config.context_length < 1:
            raise fields.wrong("max_position_embeddings", f"more than {config.first_position}", config.positions)
        refuse_causal(fields)
        fields.finish(architecture)
        return config


class Layer:
    """Attention and a network, each added to its input and then normalised."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config) -> None:
        """Tensors under `prefix`, e.g. `encoder.layer.0`."""
        hidden, inner = config.hidden, config.intermediate

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=True, shape=(out, width))

        def norm(name: str) -> BiasedNorm:
            return BiasedNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=config.eps, width=hidden)

        q, k, v = (linear(f"attention.self.{name}", hidden, hidden) for name in ("query", "key", "value"))
        self.attention = WholeAttention(q, k, v, linear("attention.output.dense", hidden, hidden), heads=config.heads)
        self.attention_norm = norm("attention.output.LayerNorm")
        self.up = linear("intermediate.dense", inner, hidden)
        self.down = linear("output.dense", hidden, inner)
        self.output_norm = norm("output.LayerNorm")
        self.activation = config.activation

    def __call__(self, x: mx.array, lengths: Sequence[int], memo: dict[Any, Any]) -> mx.array:
        x = self.attention_norm(x + self.attention(x, lengths, memo))
        return self.output_norm(x + self.down(self.activation(self.up(x))))


class Model:
    """The whole network; its pooler and any head are left out."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, config: Config) -> None:
        stem = _stem(checkpoint)
        table = f"{stem}embeddings"
        self.config = config
        self.words = Embedding.load(
            checkpoint, f"{table}.word_embeddings", dtype, shape=(config.vocab_size, config.hidden)
        )
        self.places = Embedding.load(
            checkpoint, f"{table}.position_embeddings", dtype, shape=(config.positions, config.hidden)
        )
        types = Embedding.load(
            checkpoint, f"{table}.token_type_embeddings", dtype, shape=(config.token_types, config.hidden)
        )
        self.first_type = types(mx.array([0], mx.int32))
        self.norm = BiasedNorm.load(checkpoint, f"{table}.LayerNorm", dtype, eps=config.eps, width=config.hidden)
        self.layers = [Layer(checkpoint, f"{stem}encoder.layer.{i}", dtype, config) for i in range(config.layers)]
        self.facts = EncoderFacts(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            layers=config.layers,
            context_length=config.context_length,
            dtype=dtype,
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        return cls(checkpoint, dtype, Config.read(checkpoint.config))

    def encode(self, tokens: mx.array, lengths: Sequence[int]) -> mx.array:
        """Final states `[T, hidden]` of packed texts."""
        first = self.config.first_position
        positions = np.concatenate([np.arange(first, first + length, dtype=np.int32) for length in lengths])
        x = self.norm(self.words(tokens) + self.first_type + self.places(mx.array(positions)))
        memo: dict[Any, Any] = {}
        for layer in self.layers:
            x = layer(x, lengths, memo)
        return x

    def finish(self, pooled: mx.array) -> mx.array:
        """Nothing stands behind the pooling."""
        return pooled

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the model owns."""
        return arrays(self)


def _stem(checkpoint: Checkpoint) -> str:
    """What stands before the tensors' names: some files hold a head beside the encoder."""
    for stem in ("bert.", "roberta."):
        if f"{stem}embeddings.word_embeddings.weight" in checkpoint:
            return stem
    return ""

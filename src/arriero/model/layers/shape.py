"""The hyper-parameters that every decoder's configuration has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import mlx.core as mx

from arriero.model.contract import ModelFacts
from arriero.model.layers.config import Fields
from arriero.model.layers.rope import RopeConfig

LayerType = Literal["full_attention", "sliding_attention"]
MAX_LAYERS = 4096
MAX_HEAD_DIM = 1 << 16
"""Far above any model: what a damaged configuration may ask memory for, before a tensor contradicts it."""
LAYER_TYPES: tuple[LayerType, LayerType] = ("full_attention", "sliding_attention")


class Remembering(Protocol):
    """The configuration of a layer that has a cache."""

    def cache_bytes(self, dtype: mx.Dtype, context_length: int) -> tuple[int, int]:
        """Bytes for each token of a row, and bytes that a row takes however long it is."""
        ...


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder; `context_length` in tokens."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    intermediate: int
    """Of the dense feed-forward layers; 0 where there are none."""
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    context_length: int
    tied: bool

    @classmethod
    def read(
        cls,
        fields: Fields,
        architecture: str,
        *,
        eps: float = 1e-6,
        context_length: int = 2048,
        tied: bool = False,
        heads: tuple[int, int] | None = None,
        head_dim: int | None = None,
        vocab: int | None = None,
        dense: bool = True,
    ) -> DecoderShape:
        """From a configuration; the arguments are the architecture's defaults, `heads` those of queries and keys;
        `dense` says whether any layer has a dense feed-forward part.

        CheckpointError names a field that is missing or contradicts another.
        """
        hidden = fields.integer("hidden_size")
        count = fields.integer("num_attention_heads", *(heads[:1] if heads else ()))
        kv_heads = fields.integer("num_key_value_heads", heads[1] if heads else count)
        if count % kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({count})", kv_heads)
        if head_dim is None and not fields.has("head_dim") and hidden % count:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({count})", hidden)
        return cls(
            architecture=architecture,
            vocab=fields.integer("vocab_size", *(() if vocab is None else (vocab,))),
            hidden=hidden,
            layers=fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
            intermediate=fields.integer("intermediate_size") if dense else 0,
            heads=count,
            kv_heads=kv_heads,
            head_dim=fields.integer(
                "head_dim", hidden // count if head_dim is None else head_dim, maximum=MAX_HEAD_DIM
            ),
            eps=fields.number("rms_norm_eps", eps),
            context_length=fields.integer("max_position_embeddings", context_length),
            tied=fields.flag("tie_word_embeddings", tied),
        )

    def facts(self, dtype: mx.Dtype, attentions: Sequence[Remembering], rope: RopeConfig | None) -> ModelFacts:
        """What the engine needs to know, with the caches of these attention layers; None: no positions."""
        context = max(self.context_length, 0 if rope is None else rope.extended_length)
        sizes = [attention.cache_bytes(dtype, context) for attention in attentions]
        return ModelFacts(
            architecture=self.architecture,
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            layers=self.layers,
            context_length=context,
            dtype=dtype,
            cache_bytes_per_token=sum(token for token, _ in sizes),
            cache_bytes_fixed=sum(fixed for _, fixed in sizes),
        )


def windows(fields: Fields, layers: int) -> list[int | None]:
    """The sliding window of each layer where `use_sliding_window` turns windows on, as Qwen configurations say it.

    By `layer_types`, else from layer `max_window_layers` on.
    """
    types = fields.strings("layer_types", layers, LAYER_TYPES)
    window = fields.optional_integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, minimum=0)
    if not fields.flag("use_sliding_window", False) or window is None:
        return [None] * layers
    sliding = [t == "sliding_attention" for t in types] if types else [index >= first for index in range(layers)]
    return [window if slides else None for slides in sliding]

"""ModernBERT: an encoder with pre-norm layers, gated networks, rotary positions and windows on most layers.

Source: Warner et al., 2024 (arXiv:2412.13663). The newer gte and nomic's and IBM's newer encoders are of this kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.kernels.rope import rope
from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import EncoderFacts
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.encoder import WholeAttention, refuse_causal
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.norm import LayerNorm
from arriero.model.layers.rope import Rope, RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "norm_bias": (False,),
    "hidden_activation": ("gelu",),
}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    eps: float
    context_length: int
    kinds: tuple[str, ...]
    """Of each layer."""
    reach: int
    """Tokens that a windowed layer sees on either side."""
    thetas: Mapping[str, float]
    """Of the rotary embedding of each kind."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        fields = Fields(values)
        architecture = check_config(values)
        for name, allowed in _FIXED.items():
            if fields.has(name) and fields.get(name) not in allowed:
                raise fields.wrong(name, " or ".join(map(repr, allowed)), fields.get(name))
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden % heads:
            raise fields.wrong("num_attention_heads", f"a divisor of hidden_size ({hidden})", heads)
        layers, every = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", 3)
        kinds = fields.strings("layer_types", layers, (FULL, SLIDING))
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden=hidden,
            intermediate=fields.integer("intermediate_size"),
            heads=heads,
            eps=fields.number("norm_eps", 1e-5),
            context_length=fields.integer("max_position_embeddings"),
            kinds=tuple(kinds or [SLIDING if i % every else FULL for i in range(layers)]),
            reach=fields.integer("local_attention", 128) // 2,
            thetas=_thetas(fields),
        )
        refuse_causal(fields)
        fields.finish(architecture)
        return config


def _thetas(fields: Fields) -> dict[str, float]:
    """Under the names of either age of the files."""
    thetas = {}
    parameters = fields.section("rope_parameters") or {}
    for kind, name, default in ((FULL, "global_rope_theta", 160000.0), (SLIDING, "local_rope_theta", 10000.0)):
        held = parameters.get(kind)
        if isinstance(held, dict):
            if held.get("rope_type", "default") != "default":
                raise fields.wrong("rope_parameters", "of the type 'default'", held)
            thetas[kind] = Fields(held, f"{fields.where}: rope_parameters.{kind}").number("rope_theta")
        else:
            thetas[kind] = fields.number(name, default)
    return thetas


class Layer:
    """Attention and a gated network, each over its normalised input and added to it."""

    def __init__(self, checkpoint: Checkpoint, index: int, dtype: mx.Dtype, config: Config, stem: str) -> None:
        prefix, hidden, inner = f"{stem}layers.{index}", config.hidden, config.intermediate

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=False, shape=(out, width))

        joined, wide = linear("attn.Wqkv", 3 * hidden, hidden), linear("mlp.Wi", 2 * inner, hidden)
        q, k, v = (Linear(joined.weight.rows(slice(i * hidden, (i + 1) * hidden))) for i in range(3))
        gate, up = (Linear(wide.weight.rows(slice(i * inner, (i + 1) * inner))) for i in range(2))
        self.kind = config.kinds[index]
        reach = config.reach if self.kind == SLIDING else None
        out = linear("attn.Wo", hidden, hidden)
        self.attention = WholeAttention(q, k, v, out, heads=config.heads, reach=reach)
        self.mlp = GatedMLP(gate, up, linear("mlp.Wo", hidden, inner), "gelu")
        self.mlp_norm = LayerNorm.load(checkpoint, f"{prefix}.mlp_norm", dtype, eps=config.eps, width=hidden)
        self.attention_norm = (
            LayerNorm.load(checkpoint, f"{prefix}.attn_norm", dtype, eps=config.eps, width=hidden) if index else None
        )
        """The first layer's input is normalised already."""

    def __call__(self, x: mx.array, lengths: Sequence[int], memo: dict[Any, Any], angles: mx.array) -> mx.array:
        def turn(heads: mx.array) -> mx.array:
            return rope(heads, angles)

        normalised = x if self.attention_norm is None else self.attention_norm(x)
        x = x + self.attention(normalised, lengths, memo, turn)
        return x + self.mlp(self.mlp_norm(x))


class Model:
    """The whole network; any head is left out."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, config: Config) -> None:
        stem = "model." if "model.embeddings.tok_embeddings.weight" in checkpoint else ""
        self.words = Embedding.load(
            checkpoint, f"{stem}embeddings.tok_embeddings", dtype, shape=(config.vocab_size, config.hidden)
        )

        def norm(name: str) -> LayerNorm:
            return LayerNorm.load(checkpoint, f"{stem}{name}", dtype, eps=config.eps, width=config.hidden)

        self.norm, self.final_norm = norm("embeddings.norm"), norm("final_norm")
        self.layers = [Layer(checkpoint, index, dtype, config, stem) for index in range(len(config.kinds))]
        width = config.hidden // config.heads
        self.ropes = {kind: Rope(RopeConfig(theta), width) for kind, theta in config.thetas.items()}
        self.facts = EncoderFacts(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            layers=len(config.kinds),
            context_length=config.context_length,
            dtype=dtype,
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        return cls(checkpoint, dtype, Config.read(checkpoint.config))

    def encode(self, tokens: mx.array, lengths: Sequence[int]) -> mx.array:
        """Final states `[T, hidden]` of packed texts."""
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        angles = {kind: mx.array(turned.table(positions)) for kind, turned in self.ropes.items()}
        x = self.norm(self.words(tokens))
        memo: dict[Any, Any] = {}
        for layer in self.layers:
            x = layer(x, lengths, memo, angles[layer.kind])
        return self.final_norm(x)

    def finish(self, pooled: mx.array) -> mx.array:
        """Nothing stands behind the pooling."""
        return pooled

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the model owns."""
        return arrays(self)

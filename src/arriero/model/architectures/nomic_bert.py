"""Nomic's BERT: an encoder with rotary positions, gated networks and post-norm layers, for embeddings of texts.

Source: Nussbaum et al., 2024 (arXiv:2402.01613). Files name their tensors and fields as GPT-2's kin does, or as
transformers has them now; both are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.kernels.rope import rope
from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import EncoderFacts
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.encoder import BiasedNorm, WholeAttention, refuse_causal
from arriero.model.layers.linear import Linear
from arriero.model.layers.mlp import GatedMLP
from arriero.model.layers.rope import Rope, RopeConfig

# Fields under the names of the published files, with what transformers calls them and what they must be, if anything.
_OTHER_NAMES = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "hidden_act": ("silu", "gelu"),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None, 1, 1.0),
    "causal": (False,),
    "use_rms_norm": (False, None),
    "parallel_block": (False,),
    "num_experts": (0, None),
    "moe_every_n_layers": (0, -1, None),
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
    context_length: int
    token_types: int
    rope: RopeConfig

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        renamed = {_OTHER_NAMES.get(name, name): value for name, value in values.items()}
        fields = Fields(renamed)
        architecture = check_config(values)
        for name, allowed in _FIXED.items():
            if name in renamed and fields.get(name) not in allowed:
                raise fields.wrong(name, " or ".join(map(repr, allowed)), renamed[name])
        if "activation_function" not in renamed and fields.get("hidden_act", "silu") != "silu":
            raise fields.wrong("hidden_act", "'silu'", renamed["hidden_act"])
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden % heads or fields.integer("head_dim", hidden // heads) != hidden // heads:
            raise fields.wrong("num_attention_heads", f"a divisor of hidden_size ({hidden})", heads)
        context = fields.integer("max_position_embeddings")
        if "rotary_emb_base" in renamed:
            turned = RopeConfig(fields.number("rotary_emb_base"))
        else:
            turned = RopeConfig.read(fields, theta=1000.0, context_length=context)
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden=hidden,
            intermediate=fields.integer("intermediate_size", 4 * hidden),
            layers=fields.integer("num_hidden_layers"),
            heads=heads,
            eps=fields.number("layer_norm_eps", 1e-12),
            context_length=context,
            token_types=fields.integer("type_vocab_size", 2),
            rope=turned,
        )
        refuse_causal(fields)
        fields.finish(architecture)
        return config


@dataclass(frozen=True)
class Names:
    """What tensors are called."""

    embedding_norm: str
    layer: str
    norms: tuple[str, str]
    out: str
    gate: str
    up: str
    down: str
    qkv: str | None
    """One matrix for all three; None where there are three."""


PUBLISHED = Names(
    "emb_ln",
    "encoder.layers",
    ("norm1", "norm2"),
    "attn.out_proj",
    "mlp.fc12",
    "mlp.fc11",
    "mlp.fc2",
    "attn.Wqkv",
)
TRANSFORMERS = Names(
    "embeddings.LayerNorm",
    "layers",
    ("post_attention_layernorm", "post_mlp_layernorm"),
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    None,
)


class Layer:
    """Attention and a gated network, each added to its input and then normalised."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, names: Names) -> None:
        """Tensors under `prefix`, e.g. `encoder.layers.0`."""
        hidden, inner = config.hidden, config.intermediate

        def linear(name: str, out: int, width: int) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=False, shape=(out, width))

        parts = self._qkv(checkpoint, prefix, dtype, config, names)
        self.attention = WholeAttention(*parts, linear(names.out, hidden, hidden), heads=config.heads)
        gate, up = linear(names.gate, inner, hidden), linear(names.up, inner, hidden)
        self.mlp = GatedMLP(gate, up, linear(names.down, hidden, inner), "silu")
        self.attention_norm, self.output_norm = (
            BiasedNorm.load(checkpoint, f"{prefix}.{name}", dtype, eps=config.eps, width=hidden) for name in names.norms
        )

    @staticmethod
    def _qkv(
        checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, names: Names
    ) -> tuple[Linear, Linear, Linear]:
        hidden = config.hidden
        if names.qkv is None:
            q, k, v = (
                Linear.load(checkpoint, f"{prefix}.self_attn.{name}_proj", dtype, bias=False, shape=(hidden, hidden))
                for name in "qkv"
            )
            return q, k, v
        joined = Linear.load(checkpoint, f"{prefix}.{names.qkv}", dtype, bias=False, shape=(3 * hidden, hidden))
        q, k, v = (Linear(joined.weight.rows(slice(i * hidden, (i + 1) * hidden))) for i in range(3))
        return q, k, v

    def __call__(self, x: mx.array, lengths: Sequence[int], memo: dict[Any, Any], angles: mx.array) -> mx.array:
        def turn(heads: mx.array) -> mx.array:
            return rope(heads, angles)

        x = self.attention_norm(x + self.attention(x, lengths, memo, turn))
        return self.output_norm(x + self.mlp(x))


class Model:
    """The whole network; its pooler and any head are left out."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, config: Config) -> None:
        names = next((n for n in (PUBLISHED, TRANSFORMERS) if f"{n.embedding_norm}.weight" in checkpoint), None)
        if names is None:
            raise CheckpointError(f"{checkpoint.label}: tensor emb_ln.weight is missing: not a file of NomicBert's")
        shape = (config.vocab_size, config.hidden)
        self.words = Embedding.load(checkpoint, "embeddings.word_embeddings", dtype, shape=shape)
        types = Embedding.load(
            checkpoint, "embeddings.token_type_embeddings", dtype, shape=(config.token_types, config.hidden)
        )
        self.first_type = types(mx.array([0], mx.int32))
        self.norm = BiasedNorm.load(checkpoint, names.embedding_norm, dtype, eps=config.eps, width=config.hidden)
        self.layers = [Layer(checkpoint, f"{names.layer}.{i}", dtype, config, names) for i in range(config.layers)]
        self.rope = Rope(config.rope, config.hidden // config.heads)
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
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        angles = mx.array(self.rope.table(positions))
        x = self.norm(self.words(tokens) + self.first_type)
        memo: dict[Any, Any] = {}
        for layer in self.layers:
            x = layer(x, lengths, memo, angles)
        return x

    def finish(self, pooled: mx.array) -> mx.array:
        """Nothing stands behind the pooling."""
        return pooled

    def parameters(self) -> Iterable[mx.array]:
        """Every array that the model owns."""
        return arrays(self)

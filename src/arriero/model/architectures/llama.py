"""Llama and Mistral: pre-norm layers of grouped-query attention and SwiGLU.

Honours explicit head sizes, biases, every rope scaling of `layers/rope.py` and Mistral's sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.model.architectures import check_config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, ModelFacts
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder, find_root, report_unused
from arriero.model.layers.embedding import Embedding, load_head
from arriero.model.layers.mlp import ACTIVATIONS, Activation, GatedMLP
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    intermediate: int
    activation: Activation
    eps: float
    context_length: int
    tied: bool
    mlp_bias: bool | None
    rope: RopeConfig
    attention: AttentionConfig

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        fields = Fields(values)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
        if not fields.has("head_dim") and hidden % heads:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({heads})", hidden)
        head_dim = fields.integer("head_dim", hidden // heads)
        context = fields.integer("max_position_embeddings", 2048)
        window = fields.optional_integer("sliding_window") if architecture == "MistralForCausalLM" else None
        bias = True if fields.flag("attention_bias", False) else None
        rope = RopeConfig.read(fields, theta=10000.0, context_length=context)
        config = cls(
            architecture=architecture,
            vocab=fields.integer("vocab_size"),
            hidden=hidden,
            layers=fields.integer("num_hidden_layers"),
            intermediate=fields.integer("intermediate_size"),
            activation=fields.choice(["hidden_act"], "silu", ACTIVATIONS),  # type: ignore[arg-type]
            eps=fields.number("rms_norm_eps", 1e-6),
            context_length=max(context, rope.extended_length),
            tied=fields.flag("tie_word_embeddings", False),
            mlp_bias=True if fields.flag("mlp_bias", False) else None,
            rope=rope,
            attention=AttentionConfig(
                hidden=hidden,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                window=window,
                qkv_bias=bias,
                out_bias=bias,
            ),
        )
        fields.finish(architecture)
        return config


class Layer:
    """`x += attention(norm(x)); x += mlp(norm(x))`."""

    def __init__(self, attention: GroupedAttention, mlp: GatedMLP, before: RMSNorm, between: RMSNorm) -> None:
        self.attention = attention
        self.mlp = mlp
        self.before = before
        self.between = between

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, rope: Rope) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`."""
        return cls(
            GroupedAttention.load(checkpoint, f"{prefix}.self_attn", dtype, config.attention, rope),
            GatedMLP.load(
                checkpoint,
                f"{prefix}.mlp",
                dtype,
                hidden=config.hidden,
                intermediate=config.intermediate,
                activation=config.activation,
                bias=config.mlp_bias,
            ),
            RMSNorm.load(checkpoint, f"{prefix}.input_layernorm", dtype, eps=config.eps, width=config.hidden),
            RMSNorm.load(checkpoint, f"{prefix}.post_attention_layernorm", dtype, eps=config.eps, width=config.hidden),
        )

    def new_cache(self) -> Cache:
        return self.attention.new_cache()

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        x = x + self.attention(self.before(x), batch, slot)
        return x + self.mlp(self.between(x))


class Model(Decoder):
    """The whole network."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        root = find_root(checkpoint)
        rope = Rope(config.rope, config.attention.head_dim)
        embedding = Embedding.load(checkpoint, f"{root}embed_tokens", dtype, shape=(config.vocab, config.hidden))
        layers = [
            Layer.load(checkpoint, f"{root}layers.{index}", dtype, config, rope) for index in range(config.layers)
        ]
        model = cls(
            facts(config, dtype),
            embedding=embedding,
            layers=layers,
            norm=RMSNorm.load(checkpoint, f"{root}norm", dtype, eps=config.eps, width=config.hidden),
            head=load_head(checkpoint, embedding, [f"{root}lm_head", "lm_head"], dtype, tied=config.tied),
        )
        report_unused(checkpoint, config.architecture)
        return model


def facts(config: Config, dtype: mx.Dtype) -> ModelFacts:
    """What the engine needs to know."""
    token, fixed = config.attention.cache_bytes(dtype, config.context_length)
    return ModelFacts(
        architecture=config.architecture,
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        layers=config.layers,
        context_length=config.context_length,
        dtype=dtype,
        cache_bytes_per_token=token * config.layers,
        cache_bytes_fixed=fixed * config.layers,
    )

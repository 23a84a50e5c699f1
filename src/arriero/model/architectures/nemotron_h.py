"""Nemotron-H and the text of Nemotron 3: one norm and one mixer a layer, of four kinds in any pattern.

Most mixers are Mamba-2, a few are attention without positions; feed-forward networks and mixtures of experts are
layers of their own. Nothing is gated but Mamba's output, and networks square what is positive.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.model.architectures import check_config
from arriero.model.architectures.nemotron_h_experts import ExpertsConfig, LatentExperts, PlainMLP
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache
from arriero.model.layers.attention import AttentionConfig, GroupedAttention
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import Decoder, report_unused
from arriero.model.layers.embedding import Embedding, load_head
from arriero.model.layers.mamba2 import Mamba2, Mamba2Config
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.shape import DecoderShape

log = logging.getLogger(__name__)

Kind = Literal["mamba", "attention", "mlp", "moe"]
KINDS: dict[str, Kind] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
"""Letters of a pattern and names of a list, and what they mean."""

NAMES = (("backbone.", "embeddings", "norm_f"), ("model.", "embeddings", "norm_f"), ("model.", "embed_tokens", "norm"))
"""Root, token table and final norm: as published, as transformers renames them, as GGUF files are read."""

DRAFTS = r"^mtp\."
CACHE_SCALES = r"\.[kv]_proj\.[kv]_scale$"
"""Factors for caches of 8 bits, which nothing here uses."""


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    kinds: list[Kind]
    """Of each layer."""
    attention: AttentionConfig
    mamba: Mamba2Config
    mlp_bias: bool
    experts: ExpertsConfig | None
    drafts: int
    """Layers of the head that predicts several tokens."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        kinds = read_kinds(Fields(values))
        eps = values.get("layer_norm_epsilon") or values.get("rms_norm_eps") or 1e-5
        fields = Fields({**values, "num_hidden_layers": len(kinds), "rms_norm_eps": eps})
        # Read here: what they say is in `kinds`.
        for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
            fields.get(name)
        shape = DecoderShape.read(
            fields,
            check_config(values),
            eps=1e-5,
            context_length=4096,
            heads=(32, 8),
            head_dim=fields.integer("attention_head_dim", 128),
            dense="mlp" in kinds,
        )
        for name, only in (("mamba_hidden_act", "silu"), ("mlp_hidden_act", "relu2")):
            if fields.get(name, only) != only:
                raise fields.wrong(name, only, fields.get(name))
        for name in ("residual_in_fp32", "mamba_proj_bias"):
            if fields.flag(name, False):
                raise fields.wrong(name, "false", True)
        bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
        config = cls(
            shape=shape,
            kinds=kinds,
            attention=AttentionConfig(
                hidden=shape.hidden,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                qkv_bias=bias,
                out_bias=bias,
            ),
            mamba=read_mamba(fields, shape),
            mlp_bias=mlp_bias,
            experts=ExpertsConfig.read(fields, hidden=shape.hidden, bias=mlp_bias) if "moe" in kinds else None,
            drafts=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        )
        fields.get("num_local_experts")
        fields.finish(shape.architecture)
        return config


def read_kinds(fields: Fields) -> list[Kind]:
    """What each layer is, by a list of names or a string of letters.

    CheckpointError for a name that we don't know and for a number of layers that contradicts.
    """
    name = next(
        (n for n in ("layers_block_type", "layer_types", "hybrid_override_pattern") if fields.has(n)),
        "layers_block_type",
    )
    given = fields.get(name)
    if not isinstance(given, list | str) or not given or any(not isinstance(k, str) or k not in KINDS for k in given):
        raise fields.wrong(name, "kinds of layers out of " + ", ".join(KINDS), given)
    layers = fields.integer("num_hidden_layers", len(given))
    if layers != len(given):
        raise fields.wrong(name, f"as long as num_hidden_layers ({layers})", given)
    return [KINDS[kind] for kind in given]


def read_mamba(fields: Fields, shape: DecoderShape) -> Mamba2Config:
    """The mixer's shape; defaults are the reference implementation's."""
    heads, groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if heads % groups:
        raise fields.wrong("n_groups", f"a divisor of mamba_num_heads ({heads})", groups)
    return Mamba2Config(
        hidden=shape.hidden,
        heads=heads,
        head_dim=fields.integer("mamba_head_dim", 64),
        groups=groups,
        state=fields.integer("ssm_state_size", 128),
        taps=fields.integer("conv_kernel", 4, minimum=2),
        eps=shape.eps,
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
        limits=read_limits(fields),
    )


def read_limits(fields: Fields) -> tuple[float, float]:
    """The least and the greatest time step; `time_step_min` and `time_step_max` are for initial values only.

    Infinity may be written as an object, since JSON has no such number.
    """
    given = fields.get("time_step_limit", [0.0, math.inf])
    if isinstance(given, list | tuple) and len(given) == 2:
        low, high = (float("inf") if bound == {"__float__": "Infinity"} else bound for bound in given)
        numbers = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in (low, high))
        if numbers and 0 <= low < high:
            return float(low), float(high)
    raise fields.wrong("time_step_limit", "two rising numbers from 0 on", given)


class Layer:
    """`x += mixer(norm(x))`."""

    def __init__(self, norm: RMSNorm, mixer: Mamba2 | GroupedAttention | PlainMLP | LatentExperts) -> None:
        self.norm = norm
        self.mixer = mixer
        if isinstance(mixer, GroupedAttention):
            mixer.surround(norm)

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Config, kind: Kind) -> Self:
        """Tensors under `prefix`, e.g. `backbone.layers.0`."""
        shape, mixer = config.shape, f"{prefix}.mixer"
        norm = RMSNorm.load(checkpoint, f"{prefix}.norm", dtype, eps=shape.eps, width=shape.hidden)
        if kind == "mamba":
            return cls(norm, Mamba2.load(checkpoint, mixer, dtype, config.mamba))
        if kind == "attention":
            return cls(norm, GroupedAttention.load(checkpoint, mixer, dtype, config.attention, None))
        if kind == "moe" and config.experts is not None:
            return cls(norm, LatentExperts.load(checkpoint, mixer, dtype, config.experts))
        return cls(
            norm,
            PlainMLP.load(
                checkpoint,
                mixer,
                dtype,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                bias=config.mlp_bias,
            ),
        )

    def new_cache(self) -> Cache | None:
        """The mixer's memory; None where it has none."""
        return self.mixer.new_cache() if isinstance(self.mixer, Mamba2 | GroupedAttention) else None

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        if isinstance(self.mixer, GroupedAttention):
            return x + self.mixer(x, batch, slot)
        normed = self.norm(x)
        return x + (self.mixer(normed, batch, slot) if isinstance(self.mixer, Mamba2) else self.mixer(normed))


def left_out(checkpoint: Checkpoint, config: Config) -> re.Pattern[str]:
    """Which tensors are known and not loaded; says what that means.

    GGUF files hold the head for drafts as layers past the last.
    """
    pattern = DRAFTS
    if checkpoint.dialect == "gguf" and config.drafts:
        layers = range(config.shape.layers, config.shape.layers + config.drafts)
        pattern += rf"|^(model\.layers|blk)\.({'|'.join(map(str, layers))})\."
    count = sum(re.search(pattern, name) is not None for name in checkpoint.names())
    if count:
        log.info(
            "the head that predicts several tokens is not loaded: drafts of this family are not in this version "
            "(%d tensors)",
            count,
        )
    return re.compile(f"{pattern}|{CACHE_SCALES}")


class Model(Decoder):
    """The whole network; a head for drafts is left out."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint with activations of `dtype`."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        names = next((names for names in NAMES if f"{names[0]}{names[1]}.weight" in checkpoint), None)
        if names is None:
            looked = ", ".join(f"{root}{table}.weight" for root, table, _ in NAMES)
            raise CheckpointError(f"the checkpoint has no token embedding; looked for {looked}")
        root, table, norm = names
        embedding = Embedding.load(checkpoint, f"{root}{table}", dtype, shape=(shape.vocab, shape.hidden))
        facts = shape.facts(dtype, [config.attention] * config.kinds.count("attention"), None)
        states = config.kinds.count("mamba") * config.mamba.cache_bytes(dtype)
        model = cls(
            replace(facts, cache_bytes_fixed=facts.cache_bytes_fixed + states),
            embedding=embedding,
            layers=[
                Layer.load(checkpoint, f"{root}layers.{index}", dtype, config, kind)
                for index, kind in enumerate(config.kinds)
            ],
            norm=RMSNorm.load(checkpoint, f"{root}{norm}", dtype, eps=shape.eps, width=shape.hidden),
            head=load_head(checkpoint, embedding, ["lm_head", f"{root}lm_head"], dtype, tied=shape.tied),
        )
        report_unused(checkpoint, shape.architecture, left_out(checkpoint, config))
        return model

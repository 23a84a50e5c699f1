"""Sizes of a DFlash 2 draft, and the configuration that says them to whoever loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """What a draft and the target that it is made for must agree on, and what the draft chooses for itself."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    target_layers: int
    taps: tuple[int, ...]
    """Layers of the target, counted from 0, whose outputs the context is made of."""
    mask: int
    """The token that stands for those to guess."""
    layers: int = 2
    block: int = 8
    """Rows of a block: the anchor and the tokens that are guessed."""
    window: int = 512
    """Positions that a row sees, its own among them."""
    causal: bool = True
    """A row of a block sees only the rows before it, so that a shorter block guesses what a longer one starts with."""
    conv_taps: int = 2
    conv_group: int = 16
    rank: int = 32
    top_k: int = 16
    theta: float = 10000.0
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """The fields of config.json, named as in the published draft."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "is_causal": self.causal,
            "layer_types": ["sliding_attention"] * self.layers,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "sliding_window": self.window,
            "tie_word_embeddings": True,
            "vocab_size": self.vocab,
            "dflash_config": {
                "block_size": self.block,
                "conv_group_size": self.conv_group,
                "conv_kernel_size": self.conv_taps,
                "mask_token_id": self.mask,
                "selector_rank": self.rank,
                "selector_top_k": self.top_k,
                "target_layer_ids": list(self.taps),
            },
        }


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """`count` layers of `layers`, evenly from the second to the third last, as published drafts have them.

    ValueError where there are not so many.
    """
    if count > max(layers - 3, 1) or count < 1:
        raise ValueError(f"{count} taps of a model of {layers} layers; there can be {max(layers - 3, 1)}")
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))

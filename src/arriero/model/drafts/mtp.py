"""The head of Qwen 3.5, 3.6, 3.8 and Qwen3-Next that predicts the token after next: one more attention layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.model.architectures.qwen3_5 import Config, Layer
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, DraftFacts, Model, RowCaches, vision_of
from arriero.model.drafts.chain import ChainedHead
from arriero.model.layers.embedding import put_features
from arriero.model.layers.linear import Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.qwen_files import gains_are_baked, image_rope, load_norm
from arriero.model.layers.rope import Rope

ROOTS = ("mtp.", "model.mtp.", "language_model.mtp.")


@dataclass(frozen=True, slots=True)
class Names:
    """What a file calls the head's tensors, without `.weight`; `layer` is a prefix."""

    fc: str
    token_norm: str
    state_norm: str
    layer: str
    norm: str


def find(checkpoint: Checkpoint) -> Names | None:
    """The names of the head's tensors; None where the checkpoint holds none.

    GGUF files hold it as a layer past the last. CheckpointError where it has several layers.
    """
    if checkpoint.dialect == "gguf":
        return _find_gguf(checkpoint)
    root = next((root for root in ROOTS if f"{root}fc.weight" in checkpoint), None)
    if root is None:
        return None
    names = [name for name in checkpoint.names() if name.startswith(f"{root}layers.")]
    layers = {name.removeprefix(f"{root}layers.").partition(".")[0] for name in names}
    if layers != {"0"}:
        raise CheckpointError(
            f"the head for several tokens ({root}*) should have one layer, but the checkpoint holds {len(layers)}"
        )
    return Names(
        fc=f"{root}fc",
        token_norm=f"{root}pre_fc_norm_embedding",
        state_norm=f"{root}pre_fc_norm_hidden",
        layer=f"{root}layers.0",
        norm=f"{root}norm",
    )


def _find_gguf(checkpoint: Checkpoint) -> Names | None:
    config = Config.read(checkpoint.config)
    last = config.shape.layers
    root = f"blk.{last}.nextn."
    if f"{root}eh_proj.weight" not in checkpoint:
        return None
    if config.drafts != 1:
        raise CheckpointError(
            f"the head for several tokens should have one layer, but the file says {config.drafts} "
            "(nextn_predict_layers)"
        )
    return Names(
        fc=f"{root}eh_proj",
        token_norm=f"{root}enorm",
        state_norm=f"{root}hnorm",
        layer=f"model.layers.{last}",
        norm=f"{root}shared_head_norm",
    )


def read_config(checkpoint: Checkpoint, names: Names) -> Config:
    """The target's configuration for the head's one layer, which has attention and, as the tensors say, experts."""
    config = Config.read(checkpoint.config)
    sparse = config.sparse
    if sparse is not None:
        moe = f"{names.layer}.mlp.gate.weight" in checkpoint
        sparse = replace(sparse, layers=frozenset({0} if moe else ()))
    return replace(config, layer_types=["full_attention"], sparse=sparse)


class Head(ChainedHead):
    """`h' = norm(layer(fc([norm(embed(token)) ; norm(h)])))`, with the target's table and output head.

    h is the target's final-normed state, and h' takes its place for the next token. Norms are centred, the token's half
    comes first. Source: the released checkpoints' tensors, and DeepSeek-V3's report (2024), section 2.2, which a single
    shared layer simplifies.
    """

    def __init__(
        self,
        facts: DraftFacts,
        target: Model,
        *,
        fc: Linear,
        token_norm: RMSNorm,
        state_norm: RMSNorm,
        layer: Layer,
        norm: RMSNorm,
    ) -> None:
        super().__init__(facts, target)
        self.fc = fc
        self.token_norm = token_norm
        self.state_norm = state_norm
        self.layer = layer
        self.norm = norm

    @classmethod
    def load(cls, checkpoint: Checkpoint, names: Names, target: Model, dtype: mx.Dtype) -> Self:
        """Build from the target's own checkpoint."""
        config = read_config(checkpoint, names)
        baked = gains_are_baked(checkpoint)
        hidden, eps = config.shape.hidden, config.shape.eps

        def norm(name: str) -> RMSNorm:
            return load_norm(checkpoint, name, dtype, hidden, eps, baked=baked)

        token, _ = config.attention.cache_bytes(dtype, target.facts.context_length)
        facts = DraftFacts("mtp", None, lookahead=1, cache_bytes_per_token=token)
        rope = Rope(image_rope(config.rope, vision=vision_of(target) is not None), config.shape.head_dim)
        return cls(
            facts,
            target,
            fc=Linear.load(checkpoint, names.fc, dtype, bias=False, shape=(hidden, 2 * hidden)),
            token_norm=norm(names.token_norm),
            state_norm=norm(names.state_norm),
            layer=Layer.load(checkpoint, names.layer, dtype, config, 0, rope, baked=baked),
            norm=norm(names.norm),
        )

    def new_caches(self) -> RowCaches:
        """Keys and values of its layer."""
        cache: Cache = self.layer.new_cache()
        return [cache]

    def forward(self, batch: Batch, states: mx.array) -> mx.array:
        rows = put_features(self.target.embed(batch.tokens), batch.features)
        both = mx.concatenate([self.token_norm(rows), self.state_norm(states)], axis=-1)
        return self.norm(self.layer(self.fc(both), batch, 0))

    def logits(self, states: mx.array) -> mx.array:
        return self.target.logits(states)

    def parts(self) -> list[Any]:
        return [self.fc, self.token_norm, self.state_norm, self.layer, self.norm]

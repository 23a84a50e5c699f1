"""The head of Qwen3.8 Flash Next that predicts the token after next: a layer of indexed attention over the streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.rms_norm import rms_norm
from arriero.model.architectures.qwen4_exp import load_experts
from arriero.model.architectures.qwen4_exp_attention import IndexedAttention
from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.architectures.qwen4_exp_streams import StreamReader, StreamsConfig, settled, write
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, DraftFacts, Model, RowCaches, vision_of
from arriero.model.drafts.chain import ChainedHead
from arriero.model.drafts.mtp import ROOTS
from arriero.model.layers.config import Fields, text_fields
from arriero.model.layers.experts import SharedSparseMLP
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.qwen_files import gains_are_baked, image_rope, load_norm
from arriero.model.layers.rope import Rope, RopeConfig

Statistics = Literal["stream", "all"]
"""Over what a state is normed: each stream by itself, or all streams together. Implementations disagree, and only the
share of accepted tokens depends on it; the one public comparison found 70 % by stream against 63 %."""


def find(checkpoint: Checkpoint) -> str | None:
    """The prefix of the head's tensors; None where the checkpoint holds none."""
    return next((root for root in ROOTS if f"{root}fc_hidden.weight" in checkpoint), None)


def read_rope(config: Config, checkpoint: Checkpoint) -> RopeConfig:
    """The target's rotary embedding, with the base that `mtp` of the configuration names; it is checked besides."""
    fields = text_fields(checkpoint.config)
    section = fields.section("mtp")
    if section is None:
        return config.rope
    own = Fields(section, f"{fields.where}: mtp")
    kinds = own.get("layer_types", ["full_attention"])
    if kinds not in (["full_attention"], ["indexed_attention"]):
        raise own.wrong("layer_types", "one layer of full_attention", kinds)
    return replace(config.rope, theta=own.number("rope_theta", config.rope.theta))


class StateNorm:
    """`x / rms(x) · gain` of the streams, x `[T, streams, hidden]`, in its dtype."""

    def __init__(self, gain: mx.array, eps: float, statistics: Statistics) -> None:
        self.gain = gain
        self.eps = eps
        self.statistics = statistics

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, config: StreamsConfig, statistics: Statistics, *, baked: bool
    ) -> Self:
        """`prefix.weight` `[streams · hidden]`, stored around 0 unless the file is `baked`; the gain is float32."""
        weight = checkpoint.tensor(f"{prefix}.weight")
        expect_shape(f"{prefix}.weight", tuple(weight.shape), (config.width,))
        gain = weight.astype(mx.float32).reshape(config.count, config.hidden)
        return cls(gain if baked else gain + 1, config.eps, statistics)

    def __call__(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)
        if self.statistics == "all":
            wide = wide.reshape(x.shape[0], -1)
        return (rms_norm(wide, None, self.eps).reshape(x.shape) * self.gain).astype(x.dtype)


class StreamsHead(ChainedHead):
    """Streams `X_s = fc_hidden(norm(R)_s) + fc_embedding(norm(embed(token)))`, then one layer, then a mixer and the
    target's output head.

    R are the target's streams behind its last layer, before they are mixed; X behind the layer takes their place for
    the next token. The layer reads and writes streams as the target's do, with attention over chosen blocks and
    experts, and without n-grams. Source: the released checkpoints' tensors and their public implementations.
    """

    def __init__(
        self,
        facts: DraftFacts,
        target: Model,
        config: Config,
        *,
        token_norm: RMSNorm,
        state_norm: StateNorm,
        token_fc: Linear,
        state_fc: Linear,
        attention: IndexedAttention,
        experts: SharedSparseMLP,
        before: StreamReader,
        between: StreamReader,
        mixer: StreamReader,
    ) -> None:
        super().__init__(facts, target)
        self.streams = config.streams
        self.token_norm = token_norm
        self.state_norm = state_norm
        self.token_fc = token_fc
        self.state_fc = state_fc
        self.attention = attention
        self.experts = experts
        self.before = before
        self.between = between
        self.mixer = mixer

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        target: Model,
        dtype: mx.Dtype,
        *,
        statistics: Statistics = "stream",
    ) -> Self:
        """Tensors under `prefix`: those of a layer (`layers.0`), the two projections with their norms, the mixer."""
        config = Config.read(checkpoint.config)
        baked = gains_are_baked(checkpoint)
        shape, streams = config.shape, config.streams
        layer = f"{prefix}layers.0"
        extra = [n for n in checkpoint.names() if n.startswith(f"{prefix}layers.") and not n.startswith(f"{layer}.")]
        if extra:
            raise CheckpointError(
                f"the head for several tokens should have one layer, but the checkpoint has {extra[0]}"
            )

        def project(name: str) -> Linear:
            return Linear.load(checkpoint, f"{prefix}{name}", dtype, bias=False, shape=(shape.hidden, shape.hidden))

        def reader(name: str, *, writes: bool) -> StreamReader:
            return StreamReader.load(checkpoint, name, dtype, streams, baked=baked, writes=writes)

        token, _ = config.attention.cache_bytes(dtype, target.facts.context_length)
        token += config.index.width * dtype.size
        return cls(
            DraftFacts(
                "mtp",
                None,
                lookahead=1,
                state_width=streams.width,
                cache_bytes_per_token=token,
            ),
            target,
            config,
            token_norm=load_norm(
                checkpoint, f"{prefix}pre_fc_norm_embedding", dtype, shape.hidden, shape.eps, baked=baked
            ),
            state_norm=StateNorm.load(checkpoint, f"{prefix}pre_fc_norm_hidden", streams, statistics, baked=baked),
            token_fc=project("fc_embedding"),
            state_fc=project("fc_hidden"),
            attention=IndexedAttention.load(
                checkpoint,
                f"{layer}.self_attn",
                dtype,
                config.attention,
                config.index,
                Rope(image_rope(read_rope(config, checkpoint), vision=vision_of(target) is not None), shape.head_dim),
                eps=shape.eps,
                baked=baked,
            ),
            experts=load_experts(checkpoint, f"{layer}.mlp", dtype, config),
            before=reader(f"{layer}.attn_hyper_connection", writes=True),
            between=reader(f"{layer}.mlp_hyper_connection", writes=True),
            mixer=reader(f"{prefix}hyper_connection_mixer", writes=False),
        )

    def new_caches(self) -> RowCaches:
        """Keys and values, and index keys."""
        return [self.attention.main.new_cache(), self.attention.indexer.new_cache()]

    def forward(self, batch: Batch, states: mx.array) -> mx.array:
        c = self.streams
        # Where an image stands, the placeholder's row: the published head takes no image features.
        token = self.token_fc(self.token_norm(self.target.embed(batch.tokens)))
        normed = self.state_norm(states.reshape(-1, c.count, c.hidden))
        x = self.state_fc(normed.reshape(-1, c.hidden)).reshape(normed.shape) + token[:, None]
        taken, weights = self.before.read(x)
        streams = write(x, self.attention(taken, batch, 0, 1), weights)
        mixed, weights = self.between.read(streams)
        return settled(write(streams, self.experts(mixed), weights)).reshape(-1, c.width)

    def logits(self, states: mx.array) -> mx.array:
        c = self.streams
        return self.target.logits(self.mixer.mixed(states.reshape(-1, c.count, c.hidden)))

    def parts(self) -> list[Any]:
        return [
            self.token_norm,
            self.state_norm,
            self.token_fc,
            self.state_fc,
            self.attention,
            self.experts,
            self.before,
            self.between,
            self.mixer,
        ]

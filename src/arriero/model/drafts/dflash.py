"""DFlash: a block of masked tokens is guessed in one forward, over context made of the target's own states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.activation import softcap
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Draft, DraftFacts, Model, Pick, RowCaches, Span
from arriero.model.drafts.chain import single_span
from arriero.model.drafts.dflash_config import Config
from arriero.model.drafts.dflash_layers import ContextEncoder, Layer
from arriero.model.drafts.dflash_placed import PlacedBlocks
from arriero.model.drafts.fit import expect_same, expect_taken, expect_taps, expect_token
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope


class BlockDraft(Draft):
    """Rows `[anchor, mask, mask, …]` through layers that also see the context; row i guesses the token at its place.

    A context row is made of the target's taps at one position, so it never changes, and only context is in the caches.
    Source: Chen et al., DFlash (arXiv 2602.06036), and the released drafts' implementation; Laguna's, by its public
    implementations.
    """

    conditional = False
    whole = False

    def __init__(
        self,
        facts: DraftFacts,
        target: Model,
        config: Config,
        *,
        context: ContextEncoder,
        layers: list[Layer],
        norm: RMSNorm,
        table: Embedding | None,
        head: Linear | None,
    ) -> None:
        self.facts = facts
        self.target = target
        self.config = config
        self.context = context
        self.layers = layers
        self.norm = norm
        self.table = table
        self.head = head
        self.placed = PlacedBlocks(self)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Model, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint of its own; CheckpointError with both numbers when it is another model's."""
        config = Config.read(checkpoint.config)
        check_fit(config, target)
        root = "model." if "model.fc.weight" in checkpoint else ""
        rope = Rope(config.rope, config.attention[0].head_dim, interleaved=config.interleaved)
        sizes = [layer.cache_bytes(dtype, target.facts.context_length) for layer in config.attention]
        facts = DraftFacts(
            config.architecture,
            config.block - 1,
            taps=config.taps,
            conditional=cls.conditional,
            whole=cls.whole,
            cache_bytes_per_token=sum(token for token, _ in sizes),
            cache_bytes_fixed=sum(fixed for _, fixed in sizes),
        )
        draft = cls(
            facts,
            target,
            config,
            context=ContextEncoder.load(checkpoint, root, dtype, config),
            layers=[Layer.load(checkpoint, f"{root}layers.{i}", dtype, config, i, rope) for i in range(config.layers)],
            norm=RMSNorm.load(checkpoint, f"{root}norm", dtype, eps=config.eps, width=config.hidden),
            table=load_table(checkpoint, root, dtype, config, target),
            head=load_own_head(checkpoint, root, dtype, config, target),
        )
        draft.load_rest(checkpoint, root, dtype)
        expect_taken(checkpoint, config.architecture)
        return draft

    def load_rest(self, checkpoint: Checkpoint, root: str, dtype: mx.Dtype) -> None:
        """What a relative has besides."""

    def new_caches(self) -> RowCaches:
        """The context's keys and values of each layer."""
        caches: list[Cache | None] = [layer.attention.new_cache() for layer in self.layers]
        return caches

    def commit(self, batch: Batch, states: mx.array) -> None:
        if any(span.layout is not None for span in batch.spans):
            # Where the target places images on several axes, the draft counts tokens: images are in the taps.
            batch = Batch(batch.tokens, [replace(span, layout=None) for span in batch.spans])
        context = self.context(states)
        for slot, layer in enumerate(self.layers):
            layer.extend(context, batch, slot)

    def forward(self, batch: Batch) -> mx.array:
        """Blocks, one a span, to final-normed states `[T, hidden]`; a span stands where its caches end.

        The first row of a block is the anchor, whose state guesses nothing.
        """
        x = self.embed(batch.tokens)
        for slot, layer in enumerate(self.layers):
            x = layer(x, batch, slot)
        return self.norm(x)

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the draft's own table or the target's, `[n, hidden]`, scaled by what the draft's configuration says,
        else as the model that the table is of scales them.
        """
        if self.table is not None:
            return self.table(tokens) * (self.config.embedding_scale or 1.0)
        scale = self.config.embedding_scale
        return self.target.embed(tokens) * (self.target.facts.embedding_scale if scale is None else scale)

    def logits(self, states: mx.array) -> mx.array:
        """Final states `[n, hidden]` to logits `[n, vocab]`, with the draft's multiplier and soft cap only."""
        logits = self.target.raw_logits(states) if self.head is None else self.head(states)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        return logits if self.config.logit_cap is None else softcap(logits, self.config.logit_cap)

    def block(self, anchor: mx.array, count: int, span: Span) -> mx.array:
        """States `[count, hidden]` of the rows behind `anchor`, in a block at the end of the span's caches."""
        tokens = mx.concatenate([anchor.astype(mx.int32), mx.full((count,), self.config.mask, mx.int32)])
        where = Span(0, count + 1, span.position + span.length, span.caches)
        return self.forward(Batch(tokens, [where]))[1:]

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        span = single_span(batch, count, self.facts.limit)
        prepared = self.placed(span, states, anchor, count)
        if prepared is None:
            if span.length:
                self.commit(batch, states)
            prepared = self.prepared(self.block(anchor, count, span), anchor)
        return self.guess(prepared, pick)

    def prepared(self, states: mx.array, anchor: mx.array) -> list[mx.array]:
        """What `guess` needs of a block's final states `[count, hidden]` behind the token `anchor` `[1]`."""
        return [self.logits(states)]

    def guess(self, prepared: list[mx.array], pick: Pick) -> mx.array:
        """Tokens int32 `[count]` of a block, each row by itself."""
        (logits,) = prepared
        return pick(logits).astype(mx.int32)

    def parameters(self) -> Iterable[mx.array]:
        return list({id(array): array for array in arrays(self.parts())}.values())

    def parts(self) -> list[Any]:
        """The components that the draft owns."""
        return [self.context, self.layers, self.norm, self.table, self.head]


def check_fit(config: Config, target: Model) -> None:
    """CheckpointError when a draft was made for another model."""
    facts = target.facts
    expect_same("hidden_size", config.hidden, facts.hidden_size)
    if config.vocab is not None:
        expect_same("vocab_size", config.vocab, facts.vocab_size)
    if config.target_layers is not None:
        expect_same("the target's number of layers", config.target_layers, facts.layers)
    expect_taps(config.taps, target)
    expect_token("mask_token_id", config.mask, target)


def load_table(checkpoint: Checkpoint, root: str, dtype: mx.Dtype, config: Config, target: Model) -> Embedding | None:
    """The draft's own table of tokens, where it has one; CheckpointError when its configuration says otherwise."""
    name = f"{root}embed_tokens"
    there = f"{name}.weight" in checkpoint
    if config.own_table is not None and config.own_table is not there:
        raise CheckpointError(
            f"config.json: `has_embed_tokens` is {config.own_table}, but the checkpoint "
            f"{'holds' if there else 'does not hold'} {name}.weight"
        )
    if not there:
        return None
    return Embedding.load(checkpoint, name, dtype, shape=(target.facts.vocab_size, config.hidden))


def load_own_head(checkpoint: Checkpoint, root: str, dtype: mx.Dtype, config: Config, target: Model) -> Linear | None:
    """The draft's own output head: where `has_lm_head` says so, or there is one and it is not tied to a table.

    CheckpointError when the configuration asks for a head that is not there.
    """
    names = [name for name in dict.fromkeys(["lm_head", f"{root}lm_head"]) if f"{name}.weight" in checkpoint]
    wanted = bool(names) and not config.tied if config.own_head is None else config.own_head
    if not wanted:
        return None
    if not names:
        raise CheckpointError("config.json: `has_lm_head` is true, but the checkpoint does not hold lm_head.weight")
    return Linear.load(checkpoint, names[0], dtype, shape=(target.facts.vocab_size, config.hidden))

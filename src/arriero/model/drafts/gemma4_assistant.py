"""Gemma 4's assistant: a small stack that reads the target's keys and values and has none of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.attention import attention
from arriero.model.architectures import gemma4
from arriero.model.architectures.gemma4 import read_attention, read_kinds, read_ropes
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Draft, DraftFacts, Model, Pick, RowCaches, Span
from arriero.model.drafts import check_config
from arriero.model.drafts.chain import single_span
from arriero.model.drafts.fit import expect_same, expect_taken
from arriero.model.drafts.gemma4_centroids import CentroidHead
from arriero.model.layers.attention import AttentionConfig
from arriero.model.layers.config import Fields
from arriero.model.layers.decoder import arrays
from arriero.model.layers.embedding import Embedding
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.mlp import Activation, GatedMLP, activation
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.rope import Rope, RopeConfig
from arriero.model.layers.shape import DecoderShape, LayerType


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, from config.json."""

    shape: DecoderShape
    kinds: list[LayerType]
    attention: list[AttentionConfig]
    ropes: dict[LayerType, RopeConfig]
    activation: Activation
    backbone: int
    """Width of the target."""
    centroids: int
    """Groups of tokens of which only some are scored; 0 where all tokens are."""
    chosen: int
    """How many of them."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """CheckpointError names a field that is missing, wrong or not honoured."""
        architecture = check_config(values)
        outer = Fields(values)
        text = outer.section("text_config")
        if text is None:
            raise CheckpointError("config.json: `text_config` is missing")
        fields = Fields(text, "config.json: text_config")
        unified = architecture.startswith("Gemma4Unified")
        shape = DecoderShape.read(
            fields,
            architecture,
            context_length=262144 if unified else 131072,
            tied=True,
            heads=(8, 4),
            head_dim=256,
            vocab=262144,
        )
        # All layers share; a configuration without the number means that too.
        if fields.integer("num_kv_shared_layers", 0, minimum=0) not in (0, shape.layers):
            raise fields.wrong("num_kv_shared_layers", str(shape.layers), fields.get("num_kv_shared_layers"))
        for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            if fields.integer(name, 0, minimum=0):
                raise fields.wrong(name, "0", fields.get(name))
        if fields.flag("use_double_wide_mlp", False):
            raise fields.wrong("use_double_wide_mlp", "false", True)
        if not outer.flag("tie_word_embeddings", True):
            raise outer.wrong("tie_word_embeddings", "true", False)
        # A draft's scores have no cap, whatever the text model's configuration says; one query sees no future.
        fields.get("final_logit_softcapping")
        fields.get("use_bidirectional_attention")
        kinds = read_kinds(fields, shape.layers)
        ordered = outer.flag("use_ordered_embeddings", False)
        centroids = outer.integer("num_centroids", 2048) if ordered else 0
        chosen = outer.integer("centroid_intermediate_top_k", 32) if ordered else 0
        if ordered and (shape.vocab % centroids or chosen > centroids):
            raise outer.wrong(
                "num_centroids", f"a divisor of vocab_size ({shape.vocab}) of at least {chosen}", centroids
            )
        config = cls(
            shape=shape,
            kinds=kinds,
            attention=read_attention(fields, shape, kinds, fields.integer("sliding_window", 1024 if unified else 512)),
            ropes=read_ropes(fields, shape.context_length),
            activation=activation(fields, "hidden_activation", default="gelu_tanh"),
            backbone=outer.integer("backbone_hidden_size", 1536),
            centroids=centroids,
            chosen=chosen,
        )
        fields.finish(architecture)
        return config


def read_sources(config: Config, target: Model) -> list[int]:
    """The slot of the target's caches that each layer reads: those of the last layer of its kind that owns any.

    CheckpointError when the target is no Gemma 4, or its keys have another shape.
    """
    if not isinstance(target, gemma4.Model):
        raise CheckpointError(
            f"{config.shape.architecture} drafts for Gemma 4, but the model is {target.facts.architecture}"
        )
    owners: dict[bool, int] = {}
    attentions = [layer.attention for layer in target.layers if isinstance(layer, gemma4.Layer)]
    for slot, found in enumerate(attentions):
        if found.source == slot:
            owners[found.config.window is None] = slot
    sources = []
    for kind, own in zip(config.kinds, config.attention, strict=True):
        full = own.window is None
        if full not in owners:
            raise CheckpointError(f"the draft has a layer of {kind}, but no layer of the model keeps keys of that kind")
        slot = owners[full]
        theirs = attentions[slot].config
        for what in ("head_dim", "kv_heads", "window"):
            expect_same(f"{what} of {kind} layers", getattr(own, what), getattr(theirs, what))
        sources.append(slot)
    return sources


class Attention:
    """Queries over keys and values of the target: those of all committed positions, or of the last `window`."""

    def __init__(
        self, config: AttentionConfig, rope: Rope, source: int, *, query: Linear, query_norm: RMSNorm, out: Linear
    ) -> None:
        self.config = config
        self.rope = rope
        self.source = source
        self.query = query
        self.query_norm = query_norm
        self.out = out

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: AttentionConfig,
        rope: Rope,
        source: int,
        *,
        eps: float,
    ) -> Self:
        """`q_proj`, `q_norm` and `o_proj` under `prefix`."""
        width = config.heads * config.head_dim
        return cls(
            config,
            rope,
            source,
            query=Linear.load(
                checkpoint, f"{prefix}.q_proj", dtype, bias=config.qkv_bias, shape=(width, config.hidden)
            ),
            query_norm=RMSNorm.load(checkpoint, f"{prefix}.q_norm", dtype, eps=eps, width=config.head_dim),
            out=Linear.load(checkpoint, f"{prefix}.o_proj", dtype, bias=config.out_bias, shape=(config.hidden, width)),
        )

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x `[rows, hidden]`, one query a span, which stands at its position and sees what is before it."""
        c = self.config
        q = self.rope(self.query_norm(self.query(x).reshape(-1, c.heads, c.head_dim)), batch)
        # As the last committed position sees it: `window` keys, which a target's cache always holds.
        last = [span.position - 1 for span in batch.spans]
        held = [cache.view(end) for cache, end in zip(batch.caches(self.source), last, strict=True)]
        y = attention(
            q,
            [keys for keys, _, _ in held],
            [values for _, values, _ in held],
            scale=c.scale,
            lengths=[1] * len(last),
            positions=last,
            bases=[base for _, _, base in held],
            window=c.window,
            memo=batch.memo,
        )
        return self.out(y.reshape(-1, c.heads * c.head_dim))


class Layer:
    """`x += norm(attention(norm(x))); x += norm(mlp(norm(x)))`, times a stored number."""

    def __init__(self, attention: Attention, mlp: GatedMLP, norms: Sequence[RMSNorm], scalar: mx.array | None) -> None:
        self.attention = attention
        self.mlp = mlp
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.scalar = scalar

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        prefix: str,
        dtype: mx.Dtype,
        config: Config,
        index: int,
        rope: Rope,
        source: int,
    ) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0`; a `layer_scalar` may be missing."""
        shape = config.shape
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        scalar = None
        if f"{prefix}.layer_scalar" in checkpoint:
            scalar = checkpoint.tensor(f"{prefix}.layer_scalar").astype(dtype)
            expect_shape(f"{prefix}.layer_scalar", tuple(scalar.shape), (1,))
        own = config.attention[index]
        return cls(
            Attention.load(checkpoint, f"{prefix}.self_attn", dtype, own, rope, source, eps=shape.eps),
            GatedMLP.load(
                checkpoint,
                f"{prefix}.mlp",
                dtype,
                hidden=shape.hidden,
                intermediate=shape.intermediate,
                activation=config.activation,
                bias=False,
            ),
            [RMSNorm.load(checkpoint, f"{prefix}.{n}", dtype, eps=shape.eps, width=shape.hidden) for n in names],
            scalar,
        )

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        attended = self.after_attention(self.attention(self.before_attention(x), batch))
        x, normed = self.before_mlp.of_sum(x, attended)
        x = x + self.after_mlp(self.mlp(normed))
        return x if self.scalar is None else x * self.scalar


class Assistant(Draft):
    """`x = pre_projection([embed(token) · √backbone ; state])`, layers, `z = norm(x)`: scores are z's products with the
    own table, and `post_projection(z)` is the next state.

    The first state is the target's final-normed one of the position before the token. Every step of a round queries
    from the position of the first token: what is guessed has no keys. Source: the released models' implementation in
    transformers (`gemma4_assistant`), whose sliding layers see `window + 1` keys where the target hands over more than
    it keeps; here they see `window`.
    """

    def __init__(
        self,
        facts: DraftFacts,
        target: Model,
        *,
        table: Embedding,
        before: Linear,
        after: Linear,
        layers: list[Layer],
        norm: RMSNorm,
        groups: CentroidHead | None,
    ) -> None:
        self.facts = facts
        self.target = target
        self.table = table
        self.head = table.as_linear()
        self.before = before
        self.after = after
        self.layers = layers
        self.norm = norm
        self.groups = groups

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: Model, dtype: mx.Dtype) -> Self:
        """Build from a checkpoint of its own; CheckpointError with both numbers when it is another model's."""
        config = Config.read(checkpoint.config)
        shape = config.shape
        expect_same("backbone_hidden_size", config.backbone, target.facts.hidden_size)
        expect_same("vocab_size", shape.vocab, target.facts.vocab_size)
        sources = read_sources(config, target)
        turns = [(kind, own.head_dim) for kind, own in zip(config.kinds, config.attention, strict=True)]
        ropes = {turn: Rope(config.ropes[turn[0]], turn[1]) for turn in set(turns)}
        table = Embedding.load(checkpoint, "model.embed_tokens", dtype, shape=(shape.vocab, shape.hidden))
        groups = None
        if config.centroids:
            groups = CentroidHead.load(
                checkpoint, "masked_embedding", dtype, table, groups=config.centroids, chosen=config.chosen
            )
        draft = cls(
            DraftFacts(shape.architecture, None, lookahead=1, reads_target=True),
            target,
            table=table,
            before=Linear.load(
                checkpoint, "pre_projection", dtype, bias=False, shape=(shape.hidden, 2 * config.backbone)
            ),
            after=Linear.load(checkpoint, "post_projection", dtype, bias=False, shape=(config.backbone, shape.hidden)),
            layers=[
                Layer.load(checkpoint, f"model.layers.{i}", dtype, config, i, ropes[turns[i]], sources[i])
                for i in range(shape.layers)
            ],
            norm=RMSNorm.load(checkpoint, "model.norm", dtype, eps=shape.eps, width=shape.hidden),
            groups=groups,
        )
        if "lm_head.weight" in checkpoint:
            # Tied: some exports write the table twice.
            checkpoint.weight("lm_head.weight")
        expect_taken(checkpoint, shape.architecture)
        return draft

    def new_caches(self) -> RowCaches:
        """None: it reads the target's."""
        return []

    def forward(self, batch: Batch, states: mx.array) -> tuple[mx.array, mx.array]:
        """One token a span and the states before them `[rows, backbone]`, to the final `[rows, hidden]` and the next
        states.

        A span stands at the position of its row's first token that the target has not seen, and carries the target's
        caches. ValueError when they hold another number of positions.
        """
        for span in batch.spans:
            self._check(span)
        scale = self.target.facts.embedding_scale
        x = self.before(mx.concatenate([self.target.embed(batch.tokens) * scale, states], axis=-1))
        for layer in self.layers:
            x = layer(x, batch)
        z = self.norm(x)
        return z, self.after(z)

    def scores(self, final: mx.array) -> tuple[mx.array, mx.array | None]:
        """Scores `[n, m]` and the tokens that they are of; None = the whole vocabulary."""
        return (self.head(final), None) if self.groups is None else self.groups(final)

    def commit(self, batch: Batch, states: mx.array) -> None:
        """Nothing: what the target keeps is all that it needs."""

    def propose(self, batch: Batch, states: mx.array, anchor: mx.array, count: int, pick: Pick) -> mx.array:
        given = single_span(batch, count, None)
        span = Span(0, 1, given.position + given.length, given.caches)
        token, state, tokens = anchor, states[-1:], []
        for _ in range(count):
            final, state = self.forward(Batch(token.astype(mx.int32), [span]), state)
            token = pick(*self.scores(final))
            tokens.append(token)
        return mx.concatenate(tokens).astype(mx.int32)

    def parameters(self) -> Iterable[mx.array]:
        own = [self.table, self.before, self.after, self.layers, self.norm, self.groups]
        return list({id(array): array for array in arrays(own)}.values())

    def _check(self, span: Span) -> None:
        slot = self.layers[0].attention.source
        cache: Cache | None = span.caches[slot]
        if span.length != 1 or cache is None or cache.offset != span.position or span.position < 1:
            held = None if cache is None else cache.offset
            raise ValueError(
                f"the assistant takes one token at the position that follows the target's; the span has {span.length} "
                f"at {span.position}, and slot {slot} of the target holds {held} positions"
            )

"""What decoder-only models share: token rows in, a stack of layers, a final norm, a head."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, Self

import mlx.core as mx

from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.kernels.activation import softcap
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Cache, Hidden, ModelFacts, RowCaches, Vision
from arriero.model.layers.embedding import Embedding, load_head, put_features
from arriero.model.layers.linear import Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.pace import Pace
from arriero.model.layers.replay import Replay
from arriero.model.layers.shape import DecoderShape
from arriero.model.layers.stack import LayerStack
from arriero.model.weight import Weight

log = logging.getLogger(__name__)

HARMLESS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias|rope_freqs(\.weight)?)$"
)
"""Leftover tensors that older tools write and that hold nothing to load."""


class Layer(Protocol):
    """One layer of the stack, which owns the cache slot of its index."""

    def new_cache(self) -> Cache | None: ...

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array: ...


class Norm(Protocol):
    """`[T, hidden]` to the same, in x's dtype."""

    def __call__(self, x: mx.array) -> mx.array: ...


class Decoder:
    """A stack of layers with one cache slot each. Architectures build it in their `load`."""

    facts: ModelFacts
    vision: Vision | None = None
    """The tower of a model that takes images."""

    def __init__(
        self,
        facts: ModelFacts,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        embedding_scale: float | None = None,
        logit_cap: float | None = None,
    ) -> None:
        self.facts = replace(facts, embedding_scale=embedding_scale or 1.0)
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.head = head
        self.embedding_scale = embedding_scale
        self.logit_cap = logit_cap
        self._replay = Replay(self._by_layers)
        self._halves = [getattr(layer, "halves", None) for layer in self.layers]
        self._stacks: dict[tuple[int, int], LayerStack | None] = {}

    @classmethod
    def assemble(
        cls,
        checkpoint: Checkpoint,
        dtype: mx.Dtype,
        shape: DecoderShape,
        facts: ModelFacts,
        load_layer: Callable[[str, int], Layer],
        *,
        centred_norm: bool = False,
        baked_norm: bool | None = None,
        embedding_scale: float | None = None,
        logit_cap: float | None = None,
        left_out: re.Pattern[str] | None = None,
        load_norm: Callable[[str], Norm] | None = None,
    ) -> Self:
        """Load the table, the layers (`load_layer(prefix, index)`), the final norm and the head; report the rest.

        `load_norm(prefix)` gives the final norm where it is no RMS norm. Tensors that `left_out` finds are known, and
        not wanted; the architecture says so itself where it matters.
        """
        root = find_root(checkpoint)
        embedding = Embedding.load(checkpoint, f"{root}embed_tokens", dtype, shape=(shape.vocab, shape.hidden))
        norm: Norm
        if load_norm is not None:
            norm = load_norm(f"{root}norm")
        else:
            norm = RMSNorm.load(
                checkpoint,
                f"{root}norm",
                dtype,
                eps=shape.eps,
                width=shape.hidden,
                centred=centred_norm,
                baked=baked_norm,
            )
        outer = root.removesuffix("model.")
        heads = list(dict.fromkeys([f"{root}lm_head", f"{outer}lm_head", "lm_head"]))
        model = cls(
            facts,
            embedding=embedding,
            layers=[load_layer(f"{root}layers.{index}", index) for index in range(shape.layers)],
            norm=norm,
            head=load_head(checkpoint, embedding, heads, dtype, tied=shape.tied),
            embedding_scale=embedding_scale,
            logit_cap=logit_cap,
        )
        report_unused(checkpoint, shape.architecture, left_out)
        return model

    def new_caches(self) -> RowCaches:
        """Fresh caches for a row, one slot a layer."""
        return [layer.new_cache() for layer in self.layers]

    def forward(self, batch: Batch) -> Hidden:
        """Packed tokens `[T]` to final states `[T, hidden]`, and the taps in the order asked for."""
        if batch.features and self.vision is None:
            raise UnsupportedFeature(f"{self.facts.architecture} does not take images")
        return self._replay(batch)

    def _by_layers(self, batch: Batch) -> Hidden:
        """The forward, one operation after another; layers up to the next tap are one where they can be."""
        x = self.inputs(batch)
        pace = Pace(batch, len(self.layers))
        taps: dict[int, mx.array] = {}
        ends = sorted({*(index + 1 for index in batch.taps), len(self.layers)})
        for start, end in pairwise([0, *ends]):
            stack = self._stack(start, end)
            if stack is not None and stack.takes(x, batch):
                x = stack(x, batch)
            else:
                for index in range(start, end):
                    x = self.layers[index](x, batch, index)
                    pace.passed(index, x)
            if end - 1 in batch.taps:
                taps[end - 1] = x
        tapped = mx.concatenate([taps[index] for index in batch.taps], axis=-1) if batch.taps else None
        return Hidden(self.norm(x), tapped)

    def _stack(self, start: int, end: int) -> LayerStack | None:
        """These layers together; None where one of them is not made of two halves."""
        if (start, end) not in self._stacks:
            halves = [half for half in self._halves[start:end] if half is not None]
            self._stacks[start, end] = LayerStack(halves, start) if 0 < end - start == len(halves) else None
        return self._stacks[start, end]

    def inputs(self, batch: Batch) -> mx.array:
        """What the first layer takes: the tokens' rows `[T, hidden]`, scaled, and those of images in their places."""
        x = self.embedding(batch.tokens)
        # A Python number takes x's dtype, so the scale is rounded to it as in training.
        x = x if self.embedding_scale is None else x * self.embedding_scale
        return put_features(x, batch.features) if batch.features else x

    def logits(self, hidden: mx.array) -> mx.array:
        """`[n, hidden]` to `[n, vocab]` in the activations' dtype."""
        logits = self.head(hidden)
        return logits if self.logit_cap is None else softcap(logits, self.logit_cap)

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the token table, without scale."""
        return self.embedding(tokens)

    def raw_logits(self, hidden: mx.array) -> mx.array:
        """Head product without the soft cap."""
        return self.head(hidden)

    def parameters(self) -> Iterable[mx.array]:
        """Every array of the model, each once, as they are found: matrices are repacked on the way."""
        found: dict[int, mx.array] = {}
        for array in arrays(self):
            if id(array) not in found:
                found[id(array)] = array
                yield array


def arrays(value: Any) -> Iterator[mx.array]:
    """Every array that a component holds, through its attributes, lists and dataclasses."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, Weight):
        yield from value.arrays()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays(item)
    elif isinstance(value, dict):
        yield from arrays(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from arrays([getattr(value, f.name) for f in fields(value)])
    elif type(value).__module__.startswith("arriero.model."):
        yield from arrays(list(vars(value).values()))


def find_root(
    checkpoint: Checkpoint, roots: Sequence[str] = ("model.", "language_model.model.", "model.language_model.")
) -> str:
    """The prefix under which the text model's tensors are; CheckpointError when there is no token table."""
    for root in roots:
        if f"{root}embed_tokens.weight" in checkpoint:
            return root
    raise CheckpointError(
        "the checkpoint has no token embedding; looked for " + ", ".join(f"{root}embed_tokens.weight" for root in roots)
    )


def report_unused(checkpoint: Checkpoint, architecture: str, left_out: re.Pattern[str] | None = None) -> None:
    """One warning that lists the tensors that nobody has taken, numbers folded into `*`."""
    left = [name for name in checkpoint.unused() if not HARMLESS.search(name)]
    if left_out is not None:
        left = [name for name in left if not left_out.search(name)]
    if not left:
        return
    folded: dict[str, int] = {}
    for name in left:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        folded[pattern] = folded.get(pattern, 0) + 1
    listed = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in sorted(folded.items()))
    log.warning("%s does not use %d tensors of the checkpoint: %s", architecture, len(left), listed)

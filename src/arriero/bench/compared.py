"""Two models side by side: which they are, that they can be compared, and everything that is measured of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arriero.bench.quality import Quality, compare
from arriero.bench.weights import WeightErrors, weight_errors
from arriero.chat.tokenizer import Tokenizer
from arriero.errors import InvalidRequest, NotFound
from arriero.formats.gguf import shard_paths
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.runner.load import Loaded, activation_dtype, load
from arriero.source import FolderSource, GGUFSource, ModelSource
from arriero.store.store import Store

DEFAULT_TEXT = Path(__file__).parent / "text.txt"
"""Prose, lists, a dialogue and some code, written for this purpose: some 2,200 tokens."""

Progress = Callable[[str], None]
"""Takes what is being done now."""


@dataclass(frozen=True, slots=True)
class Side:
    """A model as it was asked for, and where its bytes are."""

    label: str
    source: ModelSource


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured of a candidate against a reference."""

    reference: str
    candidate: str
    reference_bytes: int
    """Of the files that a load reads."""
    candidate_bytes: int
    dtype: str
    """Of the activations of both."""
    text: str
    window: int
    quality: Quality
    weights: WeightErrors

    def to_json(self) -> dict[str, Any]:
        """Everything but the single predictions, as JSON has it: null for what is infinite."""
        plain = ("reference", "candidate", "reference_bytes", "candidate_bytes", "dtype", "text", "window")
        return {name: getattr(self, name) for name in plain} | {
            "quality": {n: v if math.isfinite(v) else None for n, v in self.quality.figures().items()},
            "weights": asdict(self.weights),
        }


def find(text: str, store: Store) -> Side:
    """A folder, a GGUF file (any part of several) or a stored model, in this order.

    Raises NotFound, and CheckpointError or StoreError for a part that is missing.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return Side(text, FolderSource(str(path)))
    if path.is_file():
        return Side(text, GGUFSource(tuple(str(part) for part in shard_paths(path))))
    try:
        return Side(text, store.get(text).source())
    except (NotFound, InvalidRequest):
        raise NotFound(
            f"'{text}' is no folder, no GGUF file and no stored model; see 'arriero list' for those that are stored"
        ) from None


def compare_models(
    reference: Side,
    candidate: Side,
    text: str,
    *,
    text_name: str,
    tokens: int = 0,
    window: int = 2048,
    dtype: str = "",
    progress: Progress = lambda _: None,
) -> Comparison:
    """Measure a candidate against a reference over a text, of which `tokens` > 0 reads no more than these.

    Both compute with activations of `dtype`, the reference's own when it is ''. Windows are cut to the shorter context.
    Raises InvalidRequest when the two cannot be compared, LoadError and its kin when one cannot be loaded.
    """
    ids, begin = _read(reference, candidate, text)
    ids = ids[:tokens] if tokens > 0 else ids
    opened = Checkpoint.open(reference.source), Checkpoint.open(candidate.source)
    sizes = opened[0].nbytes, opened[1].nbytes
    chosen = str(activation_dtype(dtype, opened[0])).removeprefix("mlx.core.")
    progress("comparing weights")
    weights = weight_errors(*opened)
    del opened
    progress(f"loading {reference.label}")
    first = _model(reference, chosen)
    progress(f"loading {candidate.label}")
    second = _model(candidate, chosen)
    window = min(window, *(model.facts.context_length - len(begin) for model in (first, second)))
    if len(ids) < 2 or window < 2:
        raise InvalidRequest(
            f"{text_name} has {len(ids)} tokens, read in windows of {window}: nothing is predicted; give a longer text"
        )
    _check_rows(reference, first, candidate, second)
    progress(f"reading {len(ids)} tokens")
    (quality,) = compare(first, [second], ids, begin=begin, window=window)
    return Comparison(
        reference.label, candidate.label, *sizes, chosen, text_name, window, quality=quality, weights=weights
    )


def _read(reference: Side, candidate: Side, text: str) -> tuple[list[int], list[int]]:
    """Ids of the text, and what stands before each window; InvalidRequest when the two vocabularies differ."""
    first, second = Tokenizer.open(reference.source), Tokenizer.open(candidate.source)
    both = f"{reference.label} and {candidate.label}"
    if first.vocab_size != second.vocab_size:
        raise InvalidRequest(
            f"{both} have vocabularies of {first.vocab_size} and {second.vocab_size} tokens; only models that share "
            "one can be compared token by token"
        )
    for index in range(first.vocab_size):
        if first.token_text(index) != second.token_text(index):
            raise InvalidRequest(
                f"{both} have different vocabularies: token {index} is {first.token_text(index)!r:.40} in one and "
                f"{second.token_text(index)!r:.40} in the other"
            )
    ids, others = first.encode(text), second.encode(text)
    if ids != others:
        at = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
        raise InvalidRequest(
            f"{both} share a vocabulary but cut the text differently, first at token {at}: compare models with the "
            "same tokenizer settings"
        )
    begin = first.encode("")
    return ids[len(begin) :], begin


def _model(side: Side, dtype: str) -> Model:
    loaded = load(side.source, dtype, lambda _: None)
    if not isinstance(loaded, Loaded):
        raise InvalidRequest(f"{side.label} makes vectors of texts and predicts no tokens: it has no perplexity")
    return loaded.model


def _check_rows(reference: Side, first: Model, candidate: Side, second: Model) -> None:
    if first.facts.vocab_size != second.facts.vocab_size:
        raise InvalidRequest(
            f"{reference.label} predicts one of {first.facts.vocab_size} tokens, {candidate.label} one of "
            f"{second.facts.vocab_size}; only models that share a vocabulary can be compared"
        )

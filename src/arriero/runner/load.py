"""From a source to a model that has answered once. Runs on the array thread."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import mlx.core as mx

from arriero.errors import LoadError, OutOfMemory
from arriero.kernels.device import cuda, native, on_cpu
from arriero.model.architectures import encodes, load_model, runs_through
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Draft, Encoder, Model
from arriero.runner.encoder_engine import EncoderEngine
from arriero.runner.engine import Engine
from arriero.runner.memory import readable
from arriero.runner.messages import Embed, Failed, Loading, SamplingOptions, Submit
from arriero.runner.row import reserved_bytes
from arriero.source import ModelSource

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.1
"""Least time between two reports while a model is built."""

PIECE_BYTES = 64 << 20
"""Weights evaluated between two progress reports."""

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

PREFILLS = ("exact", "int8")

WARM_UP_TOKENS = 33
WARM_UP_REPLY = 4
GPU_REPLY = 16
"""On NVIDIA GPUs long enough for rounds of whole blocks of drafts, which have kernels of their own."""
ROWS = 8
"""Side by side there, to warm up."""
STEPS_EACH = 3
"""Steps of each number of rows: an ordinary one, one that is recorded, one that is replayed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory."""

    model: Model
    weight_bytes: int
    """Of the model and its draft."""
    dtype: mx.Dtype
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder in memory."""

    encoder: Encoder
    weight_bytes: int
    dtype: mx.Dtype


class Progress:
    """Tells, each time that it is called, how much of a model is in memory, but not too often."""

    def __init__(self, total: int, report: Callable[[Loading], None]) -> None:
        """`total` is the bytes that are expected; whoever is still lazy has none in memory."""
        self._total = total
        self._report = report
        self._before = mx.get_active_memory()
        self._told = -math.inf

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._told >= REPORT_SECONDS:
            self._told = now
            done = max(0, mx.get_active_memory() - self._before)
            self._report(Loading(min(done, self._total), self._total, "weights"))


FindDraft = Callable[[Checkpoint, Model, mx.Dtype], "Draft | None"]
"""From a model and what it was built of to its draft."""


def load(
    source: ModelSource,
    dtype_name: str,
    report: Callable[[Loading], None],
    prefill: str = "",
    find_draft: FindDraft | None = None,
) -> Loaded | LoadedEncoder:
    """Open, build and evaluate; `report` is called before the first byte and again and again until the last.

    Building reads what has to be repacked, and evaluating the rest; until all is known, the total is that of the files.

    Raises LoadError and its kin for a checkpoint that cannot be loaded, a dtype or a prefill that we don't know.
    """
    exact = exact_prefill(prefill)
    report(Loading(0, 0, "opening"))
    started = time.monotonic()
    checkpoint = Checkpoint.open(source)
    checkpoint.exact = exact
    dtype = activation_dtype(dtype_name, checkpoint)
    if dtype == mx.float32:
        full_precision()
    progress = Progress(checkpoint.nbytes, report)
    checkpoint.on_load = progress
    model = load_model(checkpoint, dtype)
    draft = None
    if find_draft is not None and not isinstance(model, Encoder):
        draft = find_draft(checkpoint, model, dtype)
    unused = checkpoint.unused()
    if unused:
        log.info("%d tensors of the checkpoint are not used: %s", len(unused), ", ".join(unused[:8]))
    del checkpoint
    held: dict[int, mx.array] = {}
    for array in chain(model.parameters(), () if draft is None else draft.parameters()):
        held[id(array)] = array
        progress()
    arrays = list(held.values())
    total = sum(array.nbytes for array in arrays)
    done = 0
    for piece in _pieces(arrays):
        mx.eval(piece)
        done += sum(array.nbytes for array in piece)
        report(Loading(done, total, "weights"))
    seconds = time.monotonic() - started
    log.info("%s of weights in %.2f s, %.2f GB/s", readable(total), seconds, total / max(seconds, 1e-9) / 1e9)
    if isinstance(model, Encoder):
        return LoadedEncoder(model, total, dtype)
    return Loaded(model, total, dtype, draft)


def warm_up(engine: Engine) -> None:
    """Answer once, so that kernels are built and pages touched before the first request; raises LoadError."""
    reply = WARM_UP_REPLY if cuda() is None else GPU_REPLY
    length = min(WARM_UP_TOKENS, engine.limits.context_length - reply)
    if length < 1:
        raise LoadError(f"a context of {engine.limits.context_length} tokens is too short to answer anything")
    tokens = [i % engine.model.facts.vocab_size for i in range(length)]
    # On NVIDIA GPUs several rows have kernels of their own, which take the compiler seconds the first time, and steps
    # are recorded for each number of rows: they end one after another, so that all are.
    several = _side_by_side(engine, length + reply + STEPS_EACH * (ROWS - 1)) if cuda() is not None else 1
    for rows in sorted({1, several}):
        for row in range(rows):
            engine.submit(
                Submit(
                    id=f"warm-up {row}",
                    tokens=tokens,
                    max_tokens=reply + STEPS_EACH * row,
                    stop_tokens=[],
                    sampling=SamplingOptions(seed=0),
                )
            )
        while engine.busy:
            engine.step()
        failed = [message for message in engine.drain() if isinstance(message, Failed)]
        if rows > 1 and any(message.error == OutOfMemory.__name__ for message in failed):
            log.warning("memory is short: %d rows cannot be computed side by side", rows)
        elif failed:
            raise LoadError(f"the model is loaded but cannot answer: {failed[0].message}")


def _side_by_side(engine: Engine, tokens: int) -> int:
    """Rows of so many tokens to warm up with: those that an engine takes and that half of the free memory holds."""
    free = mx.get_memory_limit() - mx.get_active_memory()
    fit = free // (2 * max(1, reserved_bytes(tokens, engine.model.facts)))
    return max(1, min(engine.limits.max_rows, ROWS, fit))


def warm_up_encoder(engine: EncoderEngine) -> None:
    """As `warm_up`, with a text turned into a vector."""
    length = min(WARM_UP_TOKENS, engine.limits.context_length)
    engine.embed(
        Embed(id="warm-up", texts=[[i % engine.model.facts.vocab_size for i in range(length)]], pooling="mean")
    )
    while engine.busy:
        engine.step()
    for message in engine.drain():
        if isinstance(message, Failed):
            raise LoadError(f"the encoder is loaded but cannot answer: {message.message}")


def full_precision() -> None:
    """Keep float32 products in float32 on NVIDIA GPUs, which otherwise round their inputs to 11 bits (TF32).

    MLX reads the variable at its first product, so this comes before any; a user's own choice stands.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")


def exact_prefill(name: str) -> bool:
    """Whether products of many rows may not round their activations to 8 bits; LoadError for an unknown name."""
    if name not in ("", *PREFILLS):
        raise LoadError(f"the prefill '{name}' is not known; ARRIERO_PREFILL can be {' or '.join(PREFILLS)}")
    return name != "int8"


def activation_dtype(name: str, checkpoint: Checkpoint) -> mx.Dtype:
    """The dtype asked for, else the checkpoint's, else bfloat16, for encoders float32.

    Plain MLX on a CPU sums 16-bit products in 16 bits, so there float32 is the default whatever the checkpoint says;
    what runs through another package is plain MLX always.
    """
    if name:
        if name not in DTYPES:
            raise LoadError(f"the dtype '{name}' is not known; it can be {', '.join(DTYPES)}")
        return DTYPES[name]
    config = checkpoint.config
    if on_cpu() and (native() is None or runs_through(config) is not None):
        return mx.float32
    for holder in (config, config.get("text_config") or {}):
        declared = str(holder.get("dtype") or holder.get("torch_dtype") or "").removeprefix("torch.")
        if declared in DTYPES:
            return DTYPES[declared]
    # Encoders are small, their files often say nothing, and near texts differ by little.
    return mx.float32 if encodes(config) else mx.bfloat16


def _pieces(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    held = 0
    for array in arrays:
        piece.append(array)
        held += array.nbytes
        if held >= PIECE_BYTES:
            yield piece
            piece, held = [], 0
    if piece:
        yield piece

"""Models of published shapes with random weights, made on the device, and how fast the engine decodes with them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from arriero.bench.gpu_shapes import CONFIGS, Shape, packing, tensor_bytes, tensors
from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Encoder, Model, Span
from arriero.model.quantization import Quantization
from arriero.model.stored import TensorInfo
from arriero.model.weight import Weight
from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.rounds import keeps_states

__all__ = [
    "CONFIGS",
    "Decoding",
    "Quantization",
    "RandomCheckpoint",
    "decoding",
    "random_model",
    "random_weight",
    "verifying",
]

CHUNK = 2048
"""Prompt tokens of one forward, as the runner takes them on a GPU."""


class RandomCheckpoint(Checkpoint):
    """Stands for the files of a model: each tensor is made when it is asked for.

    Matrices are packed as `packing` says of `quantization`; vectors are ones, so gains, rates and scalars are plain.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        quantization: Quantization | None,
        named: Iterable[tuple[str, Shape]] | None = None,
    ) -> None:
        """`named` are the tensors and their shapes, by default those that the configuration means."""
        super().__init__("random weights", {}, dict(config), {}, "hf")
        self.quantization = quantization
        self.shapes = dict(tensors(config) if named is None else named)
        self.names_taken: set[str] = set()

    @property
    def nbytes(self) -> int:
        return round(sum(tensor_bytes(self.shapes[name], self.info(name).quantization) for name in self.shapes))

    def names(self) -> list[str]:
        return list(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def unused(self) -> list[str]:
        return [name for name in self.shapes if name not in self.names_taken]

    def info(self, name: str) -> TensorInfo:
        """CheckpointError for a name that the shape does not have."""
        if name not in self.shapes:
            raise CheckpointError(f"the shape has no tensor {name}")
        shape = self.shapes[name]
        how = packing(name, shape, self.config, self.quantization)
        return TensorInfo(name, "BF16" if how is None else "U32", shape, how, round(tensor_bytes(shape, how)))

    def tensor(self, name: str) -> mx.array:
        return self.weight(name).data

    def weight(self, name: str) -> Weight:
        """As `info`; evaluated, so that no more than one is in the making."""
        info = self.info(name)
        self.names_taken.add(name)
        if len(info.shape) == 1:
            return Weight(mx.ones(info.shape, mx.bfloat16))
        if info.quantization is None:
            made = Weight((mx.random.normal(info.shape) * info.shape[-1] ** -0.5).astype(mx.bfloat16))
        else:
            made = random_weight(info.shape, info.quantization)
        mx.eval([part for part in (made.data, made.scales, made.biases, made.global_scale) if part is not None])
        return made


def random_weight(shape: tuple[int, ...], how: Quantization) -> Weight:
    """Random codes with scales that make values of about `width ** -0.5`, on the device."""
    *outer, width = shape
    # MLX draws 31 bits at a time; an odd factor spreads them over 32.
    words = mx.random.randint(0, 1 << 30, (*outer, width * how.bits // 32)).astype(mx.uint32) * 2654435761
    groups = (*outer, width // how.group_size)
    size = width**-0.5
    if how.mode == "nvfp4":
        scales = mx.random.randint(44, 60, groups).astype(mx.uint8)
        count = outer[0] if len(outer) == 2 else 1
        factor = mx.full((count,) if len(outer) == 2 else (), size / 2.5, mx.float32)
        return Weight(words, how, scales, None, factor)
    if how.mode in ("mxfp4", "mxfp8"):
        # No code of E4M3 may be the one that is no number.
        words = words & 0xBFBFBFBF if how.mode == "mxfp8" else words
        exponent = 126 + round(math.log2(size))
        return Weight(words, how, mx.full(groups, exponent, mx.uint8))
    step = size / (2 ** (how.bits - 2))
    scales = (step * (0.9 + 0.2 * mx.random.uniform(shape=groups))).astype(mx.bfloat16)
    return Weight(words, how, scales, scales * -(2.0 ** (how.bits - 1)))


def random_model(config: Mapping[str, Any], quantization: Quantization | None) -> Model:
    """The model of a configuration with random weights, in memory."""
    model = load_model(RandomCheckpoint(config, quantization), mx.bfloat16)
    if isinstance(model, Encoder):
        raise TypeError(f"{model.facts.architecture} does not decode")
    mx.eval(list(model.parameters()))
    return model


@dataclass(frozen=True, slots=True)
class Decoding:
    """Medians of one setting."""

    rows: int
    context: int
    """Tokens of each row's prompt."""
    prefill: float
    """Prompt tokens a second of all rows together."""
    step: float
    """Seconds from one token of each row to the next."""

    @property
    def total(self) -> float:
        """New tokens a second of all rows together."""
        return self.rows / self.step


def decoding(model: Model, *, rows: int, context: int, tokens: int) -> Decoding:
    """Let the real engine read `rows` prompts of `context` tokens and write `tokens` greedily for each.

    Steps are timed while all rows decode, from one arrival of tokens to the next.
    """
    limits = Limits(model.facts.context_length, max_rows=rows, prefill_chunk=CHUNK)
    engine = Engine(model, Sampler(model.facts.vocab_size, model.facts.context_length), limits)
    greedy = SamplingOptions(temperature=0.0)
    started = time.perf_counter()
    for row in range(rows):
        prompt = [(row * 7919 + 31 * i + 11) % model.facts.vocab_size for i in range(context)]
        engine.submit(Submit(id=str(row), tokens=prompt, max_tokens=tokens, stop_tokens=[], sampling=greedy))
    first: float | None = None
    begun: set[str] = set()
    arrivals: list[float] = []
    while engine.busy:
        engine.step()
        came = {message.id for message in engine.drain() if isinstance(message, Tokens)}
        begun |= came
        now = time.perf_counter()
        if len(begun) == rows:
            first = now if first is None else first
            if len(came) == rows:
                arrivals.append(now)
    if first is None or len(arrivals) < 3:
        raise RuntimeError(f"{rows} rows of {tokens} tokens never decoded side by side")
    gaps = [b - a for a, b in pairwise(arrivals)]
    return Decoding(rows, context, rows * context / (first - started), statistics.median(gaps))


def verifying(model: Model, *, context: int, tokens: int, rounds: int = 24) -> float:
    """Median seconds of a forward of `tokens` tokens of one row, built, run and read, as a round of drafts has it.

    States are captured behind each token, so that any of them could be the last that stays.
    """
    caches = model.new_caches()
    stateful = [cache for cache in caches if cache is not None and keeps_states(cache)]
    prompt = mx.arange(context, dtype=mx.int32) % model.facts.vocab_size
    mx.eval(model.forward(Batch(prompt, [Span(0, context, 0, caches)])).final)
    times: list[float] = []
    new = mx.arange(tokens, dtype=mx.int32)
    for position in range(context, context + rounds * tokens, tokens):
        started = time.perf_counter()
        for cache in stateful:
            cache.plan(range(position + 1, position + tokens))
        final = model.forward(Batch(new, [Span(0, tokens, position, caches)])).final
        best = mx.argmax(model.logits(final), axis=-1)
        mx.eval(best, [array for cache in stateful for array in cache.state()])
        for cache in stateful:
            cache.take()
        times.append(time.perf_counter() - started)
    return statistics.median(times[rounds // 3 :])

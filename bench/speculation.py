"""What drafting costs and gains in the engine, against plain decoding and against the bare verification forward.

    python bench/speculation.py MODEL [--draft FOLDER] [--prompt 256] [--tokens 200] [--widths 1 2 4 7] [--rounds 3]

MODEL is a GGUF file or a folder. Every figure is a median over rounds of requests that take turns, plain and drafting.

- *full*: a free draft that is always right, at each width. Milliseconds of a round, of the same forward with the choice
  of the best token and nothing else, and what the engine adds to it.
- *none*: a free draft that is never right, with the depths that are measured: speed as a part of plain decoding's.
- *copy*: a prompt that asks for its own text again, copied from it: speed and tokens a round.
- *draft*: with `--draft`, or a head in MODEL's own checkpoint: the same on the text of `src/arriero/bench/text.txt`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from arriero.kernels.topk import argmax
from arriero.model.contract import Batch, Model, Span
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import load
from arriero.runner.messages import Finished, RunnerConfig, SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import DepthController, Depths
from arriero.runner.speculation.opening import open_draft
from arriero.runner.speculation.rounds import keeps_states
from arriero.runner.speculation.speculator import Speculator
from arriero.source import FolderSource, GGUFSource, ModelSource

GREEDY = SamplingOptions(temperature=0)


class Known:
    """Drafts what is known to follow, or anything else."""

    def __init__(self, text: Sequence[int], *, right: bool, vocab: int) -> None:
        self._text, self._right, self._vocab = list(text), right, vocab
        self.held = 0

    def extend(self, tokens: np.ndarray) -> None:
        self.held += len(tokens)

    def find(self, most: int) -> list[int]:
        coming = self._text[self.held : self.held + most]
        return coming if self._right else [(token + 1) % self._vocab for token in coming]


class Always:
    """One width."""

    def __init__(self, width: int) -> None:
        self.width = width

    def begin(self) -> None:
        """Nothing to prepare."""

    def next(self, most: int) -> int:
        return min(self.width, most)

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        """Nothing is learned."""


def answer(engine: Engine, prompt: list[int], count: int) -> tuple[float, list[int], Finished]:
    """Seconds of decoding, the reply, and its last message."""
    engine.submit(Submit(id="turn", tokens=prompt, max_tokens=count, stop_tokens=[], sampling=GREEDY))
    reply: list[int] = []
    end: Finished | None = None
    while engine.busy:
        engine.step()
        for message in engine.drain():
            if isinstance(message, Tokens):
                reply += message.tokens
            elif isinstance(message, Finished):
                end = message
    assert end is not None
    return end.decode_ns / 1e9, reply, end


def source_of(path: str) -> ModelSource:
    return FolderSource(path) if Path(path).is_dir() else GGUFSource((path,))


class Bench:
    """One loaded model and what is asked of it."""

    def __init__(self, model: Model, prompt: list[int], tokens: int, rounds: int) -> None:
        self.model, self.prompt, self.tokens, self.rounds = model, prompt, tokens, rounds
        self.limits = Limits(context_length=2 * len(prompt) + tokens + 64)
        self.vocab = model.facts.vocab_size

    def engine(self, make: Callable[[Sampler], Speculator] | None = None) -> Engine:
        sampler = Sampler(self.vocab, self.limits.context_length)
        return Engine(self.model, sampler, self.limits, speculator=None if make is None else make(sampler))

    def compare(self, engine: Engine, prompt: list[int]) -> tuple[float, float, float, Finished]:
        """Median tokens per second plainly and with an engine that drafts, in turns, the median of the pairs' ratios,
        and the last message.
        """
        plain, drafting = [], []
        basis = self.engine()
        for _ in range(self.rounds):
            plain.append(self.tokens / answer(basis, prompt, self.tokens)[0])
            seconds, _, end = answer(engine, prompt, self.tokens)
            drafting.append(self.tokens / seconds)
        ratios = [ours / basis for ours, basis in zip(drafting, plain, strict=True)]
        return statistics.median(plain), statistics.median(drafting), statistics.median(ratios), end

    def verification(self, width: int) -> float:
        """Milliseconds of a bare forward over a token and `width` drafts that all stay, with each line's best token."""
        caches = self.model.new_caches()
        captured = [cache for cache in caches if cache is not None and keeps_states(cache)]
        at = len(self.prompt)
        self.model.forward(Batch.of(np.array(self.prompt, np.int32), [Span(0, at, 0, caches)]))
        ids = np.array(self.prompt[: width + 1], np.int32)
        times = []
        for _ in range(max(self.tokens // (width + 1), 12)):
            started = time.perf_counter()
            for cache in captured:
                cache.plan(range(at + 1, at + width + 1))
            hidden = self.model.forward(Batch.of(ids, [Span(0, width + 1, at, caches)]))
            best = argmax(self.model.logits(hidden.final))
            mx.eval(best, [array for cache in captured for array in cache.state()])
            times.append(time.perf_counter() - started)
            for cache in captured:
                cache.take()
            at += width + 1
        return statistics.median(times[2:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 7])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="")
    options = parser.parse_args()
    source = source_of(options.model)
    config = RunnerConfig(source=source, endpoint="", draft=source_of(options.draft) if options.draft else None)
    loaded = load(
        source,
        options.dtype,
        lambda _: None,
        find_draft=lambda ckpt, model, dtype: open_draft(config, ckpt, model, dtype),
    )
    draw = random.Random(0)
    vocab = loaded.model.facts.vocab_size
    prompt = [draw.randrange(vocab // 8, vocab // 2) for _ in range(options.prompt)]
    bench = Bench(loaded.model, prompt, options.tokens, options.rounds)
    _, reply, _ = answer(bench.engine(), prompt, options.tokens)
    text = [*prompt, *reply]

    def scripted(right: bool, depths: Depths) -> Callable[[Sampler], Speculator]:
        def make(sampler: Sampler) -> Speculator:
            return Speculator(
                loaded.model, sampler, copies=lambda: Known(text, right=right, vocab=vocab), depths=depths
            )

        return make

    print("| case | plain tok/s | drafting tok/s | ratio | tokens a round | round ms | verify ms | added |")
    print("|---|---|---|---|---|---|---|---|")
    for width in options.widths:
        plain, speed, ratio, end = bench.compare(bench.engine(scripted(True, Always(width))), prompt)
        used = end.speculation
        assert used is not None
        per_round = 1 + used.accepted / used.rounds
        round_ms, verify_ms = 1e3 * per_round / speed, bench.verification(width)
        speeds = f"| full, {width} drafts | {plain:.1f} | {speed:.1f} | {ratio:.2f} "
        added = 100 * (round_ms / verify_ms - 1)
        print(f"{speeds}| {per_round:.2f} | {round_ms:.2f} | {verify_ms:.2f} | {added:.1f} % |")
    cases = {"none": (bench.engine(scripted(False, DepthController(8))), prompt)}
    copying = [*prompt[:128], *reply, *prompt[:128], *reply[:16]]
    cases["copy"] = (bench.engine(lambda sampler: Speculator(loaded.model, sampler)), copying)
    if loaded.draft is not None:
        drafted = loaded.draft
        cases[drafted.facts.architecture] = (
            bench.engine(lambda sampler: Speculator(loaded.model, sampler, drafted)),
            prompt,
        )
    for name, (engine, asked) in cases.items():
        plain, speed, ratio, end = bench.compare(engine, asked)
        used = end.speculation
        assert used is not None
        rate = f"{1 + used.accepted / used.rounds:.2f}" if used.rounds else "—"
        print(f"| {name} | {plain:.1f} | {speed:.1f} | {ratio:.3f} | {rate} | | | |")


if __name__ == "__main__":
    main()

"""What drafting costs and gains in the engine, against plain decoding and against the bare verification forward.

    python -m bench.speculation MODEL [--draft FOLDER] [--prompt 256] [--tokens 200] [--widths 1 2 4 7] [--rounds 5]

MODEL is a GGUF file or a folder. Plain and drafting requests run side by side in one process and take turns every few
tokens, so that noise of the machine hits both; ratios are of such neighbours, and medians over requests.

- *full*: a free draft that is always right, at each width. Each round beside the same bare forward with the choice of
  the best token and nothing else: what the engine adds, as the median of the pairs' ratios.
- *none*: a free draft that is never right, with the depths that are measured: speed of whole requests as a part of
  plain decoding's, the median and the worst. The first request also pays for finding that out.
- *copy*: a prompt that asks for its own text again, copied from it: speed and tokens a round.
- *draft*: with `--draft`, or a head in MODEL's own checkpoint: the same on random text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from arriero.kernels.topk import argmax
from arriero.model.contract import Batch, Model, Span
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import load
from arriero.runner.messages import Finished, RunnerConfig
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import DepthController, Depths
from arriero.runner.speculation.opening import open_draft
from arriero.runner.speculation.rounds import keeps_states
from arriero.runner.speculation.speculator import Speculator
from arriero.source import FolderSource, GGUFSource, ModelSource
from bench.turns import Stopwatch, Turn, in_turns


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

    def rest(self) -> int:
        return 0

    def observe(self, drafted: int, accepted: int, judged: int, produced: int, seconds: float) -> None:
        """Nothing is learned."""


def source_of(path: str) -> ModelSource:
    return FolderSource(path) if Path(path).is_dir() else GGUFSource((path,))


class Bare:
    """A bare forward over a token and drafts that all stay, with each line's best token, again and again."""

    def __init__(self, model: Model, prompt: Sequence[int], width: int) -> None:
        self._model, self._width = model, width
        self._caches = model.new_caches()
        self._captured = [cache for cache in self._caches if cache is not None and keeps_states(cache)]
        self._at = len(prompt)
        self._ids = np.array(prompt[: width + 1], np.int32)
        model.forward(Batch.of(np.array(prompt, np.int32), [Span(0, self._at, 0, self._caches)]))

    def forward(self) -> float:
        """Seconds of one."""
        started, at, width = time.perf_counter(), self._at, self._width
        for cache in self._captured:
            cache.plan(range(at + 1, at + width + 1))
        hidden = self._model.forward(Batch.of(self._ids, [Span(0, width + 1, at, self._caches)]))
        best = argmax(self._model.logits(hidden.final))
        mx.eval(best, [array for cache in self._captured for array in cache.state()])
        seconds = time.perf_counter() - started
        for cache in self._captured:
            cache.take()
        self._at += width + 1
        return seconds


class Rounds:
    """Bare forwards, as many as a request has rounds."""

    def __init__(self, bare: Bare, count: int) -> None:
        self._bare, self._left = bare, count

    def piece(self) -> tuple[int, float] | None:
        self._left -= 1
        return None if self._left < 0 else (1, self._bare.forward())


MakeSpeculator = Callable[[Sampler, Stopwatch], Speculator]


class Bench:
    """One loaded model and what is asked of it."""

    def __init__(self, model: Model, prompt: list[int], tokens: int, rounds: int, steps: int) -> None:
        self.model, self.prompt, self.tokens, self.rounds, self.steps = model, prompt, tokens, rounds, steps
        self.limits = Limits(context_length=2 * len(prompt) + 3 * tokens + 64)
        self.vocab = model.facts.vocab_size

    def engine(self, make: MakeSpeculator | None = None) -> tuple[Engine, Stopwatch]:
        sampler, watch = Sampler(self.vocab, self.limits.context_length), Stopwatch()
        speculator = None if make is None else make(sampler, watch)
        return Engine(self.model, sampler, self.limits, speculator=speculator), watch

    def turn(self, engine: tuple[Engine, Stopwatch], prompt: list[int], steps: int) -> Turn:
        return Turn(*engine, prompt, self.tokens, steps)

    def requests(self, make: MakeSpeculator, prompt: list[int]) -> tuple[list[float], float, Finished]:
        """Speed of each request as a part of plain decoding's, plain tokens a second, and the last message."""
        plain, drafting = self.engine(), self.engine(make)
        ratios, speeds = [], []
        for _ in range(self.rounds):
            mine = self.turn(drafting, prompt, self.steps)
            pairs = in_turns(self.turn(plain, prompt, self.steps), mine)
            ratios.append(pairs.speed_ratio())
            speeds.append(sum(n for n, _ in pairs.first) / sum(s for _, s in pairs.first))
            assert mine.end is not None
            end = mine.end
        return ratios, statistics.median(speeds), end

    def added(self, make: MakeSpeculator, width: int) -> tuple[float, float, Finished]:
        """A round's time as a multiple of a bare forward's beside it, milliseconds of that, and the last message."""
        ratios, bare = [], []
        drafting = self.engine(make)
        for _ in range(self.rounds):
            mine = self.turn(drafting, self.prompt, 1)
            left = (self.tokens - len(mine.reply)) // (width + 1)
            pairs = in_turns(mine, Rounds(Bare(self.model, self.prompt, width), left))
            ratios.append(pairs.median_ratio())
            bare += [seconds for _, seconds in pairs.second[2:]]
            assert mine.end is not None
            end = mine.end
        return statistics.median(ratios), 1e3 * statistics.median(bare), end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 7])
    parser.add_argument("--rounds", type=int, default=5, help="requests of a case")
    parser.add_argument("--steps", type=int, default=4, help="steps of an engine before it is the other's turn")
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
    bench = Bench(loaded.model, prompt, options.tokens, options.rounds, options.steps)
    first = bench.turn(bench.engine(), prompt, options.tokens)
    while first.piece() is not None:
        pass
    reply = first.reply
    text = [*prompt, *reply]

    def scripted(right: bool, depths: Callable[[], Depths]) -> MakeSpeculator:
        return lambda sampler, watch: Speculator(
            loaded.model,
            sampler,
            copies=lambda: Known(text, right=right, vocab=vocab),
            depths=depths(),
            clock=watch,
        )

    print("| case | a round by a bare forward | bare forward, ms | tokens a round |")
    print("|---|---|---|---|")
    for width in options.widths:
        ratio, milliseconds, end = bench.added(scripted(True, partial(Always, width)), width)
        print(f"| full, {width} drafts | {ratio:.3f} | {milliseconds:.2f} | {tokens_a_round(end)} |")
    copying = [*prompt[:128], *reply, *prompt[:128], *reply[:16]]
    cases: dict[str, tuple[MakeSpeculator, list[int]]] = {
        "none": (scripted(False, partial(DepthController, 8)), prompt),
        "copy": (lambda sampler, watch: Speculator(loaded.model, sampler, clock=watch), copying),
    }
    if loaded.draft is not None:
        drafted = loaded.draft
        cases[drafted.facts.architecture] = (
            lambda sampler, watch: Speculator(loaded.model, sampler, drafted, clock=watch),
            prompt,
        )
    print()
    print("| case | plain tok/s | speed by plain, median | worst of the requests | tokens a round |")
    print("|---|---|---|---|---|")
    for name, (make, asked) in cases.items():
        ratios, plain, end = bench.requests(make, asked)
        line = f"{plain:.1f} | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {tokens_a_round(end)}"
        print(f"| {name} | {line} |")


def tokens_a_round(end: Finished) -> str:
    used = end.speculation
    assert used is not None
    return f"{1 + used.accepted / used.rounds:.2f}" if used.rounds else "—"


if __name__ == "__main__":
    main()

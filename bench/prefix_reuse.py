"""Time to the first token of a conversation's second turn: cold, from memory, and from disk after a restart.

    python bench/prefix_reuse.py MODEL.gguf [--prompt 2000] [--reply 50] [--more 30] [--rounds 3] [--dtype bfloat16]

Each round: the first turn (`prompt` random tokens, `reply` generated), then the second turn (all of that and `more`
tokens) in the same engine, in a new engine over the folder on disk, and in one that knows nothing. Engines are new,
the loaded weights are shared. Medians, and ratios to cold.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from arriero.runner.engine import Engine, Limits
from arriero.runner.load import Loaded, load, warm_up
from arriero.runner.messages import Finished, SamplingOptions, Submit, Tokens
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.sampling import Sampler
from arriero.source import GGUFSource

GIB = 1 << 30


def engine_of(loaded: Loaded, context: int, disk: DiskTier | None = None) -> Engine:
    """A warm engine with an empty store in memory."""
    sampler = Sampler(loaded.model.facts.vocab_size, context)
    warm_up(Engine(loaded.model, sampler, Limits(context_length=context)))
    return Engine(loaded.model, sampler, Limits(context_length=context, prefix_bytes=2 * GIB), disk=disk)


def turn(engine: Engine, tokens: list[int], count: int) -> tuple[float, list[int], int]:
    """Seconds to the first token, the reply, and how many prompt tokens were known."""
    started, first, reply = time.perf_counter(), 0.0, []
    engine.submit(
        Submit(id="turn", tokens=tokens, max_tokens=count, stop_tokens=[], sampling=SamplingOptions(temperature=0))
    )
    known = -1
    while engine.busy:
        engine.step()
        for message in engine.drain():
            if isinstance(message, Tokens):
                first = first or time.perf_counter() - started
                reply += message.tokens
            elif isinstance(message, Finished):
                known = message.cached_tokens
    return first, reply, known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--reply", type=int, default=50)
    parser.add_argument("--more", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    loaded = load(GGUFSource((options.model,)), options.dtype, lambda _: None)
    context = options.prompt + options.reply + options.more + 64
    times: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    for number in range(options.rounds):
        draw = random.Random(number)
        prompt = [draw.randrange(1000, loaded.model.facts.vocab_size - 1000) for _ in range(options.prompt)]
        with tempfile.TemporaryDirectory() as folder:
            disk = DiskTier(Path(folder, "m"), 10 * GIB)
            engine = engine_of(loaded, context, disk)
            _, reply, _ = turn(engine, prompt, options.reply)
            disk.flush()
            shutil.copytree(Path(folder, "m"), Path(folder, "restarted"))
            second = [*prompt, *reply, *(draw.randrange(1000, 2000) for _ in range(options.more))]
            answers = {"memory": turn(engine, second, 8)}
            engine.close()
            engine = engine_of(loaded, context, DiskTier(Path(folder, "restarted"), 10 * GIB))
            answers["disk"] = turn(engine, second, 8)
            engine.close()
        answers["cold"] = turn(engine_of(loaded, context), second, 8)
        if len({tuple(answer[1]) for answer in answers.values()}) != 1:
            raise SystemExit(f"the replies differ: {answers}")
        for name, (seconds, _, known) in answers.items():
            times[name].append(seconds)
            print(f"round {number} {name}: {seconds * 1e3:.1f} ms, {known} of {len(second)} tokens known")
    cold = statistics.median(times["cold"])
    for name, seconds in times.items():
        print(f"{name:7} {statistics.median(seconds) * 1e3:8.1f} ms   {statistics.median(seconds) / cold:.3f} of cold")


if __name__ == "__main__":
    main()

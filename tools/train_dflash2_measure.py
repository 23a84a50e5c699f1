"""What a draft is worth in the engine: tokens of a round and speed, on questions that it was not trained on.

    python -m tools.train_dflash2_measure MODEL DRAFT [--tokens 160] [--guesses 7 3] [--temperatures 0 0.7]

MODEL is a GGUF file or a folder, DRAFT a folder. Each question is answered plainly and with the draft, in turn, in
alternating order; the first pair warms up.

- *tokens a round*: what a forward of the target gave, guesses that stayed and one more, over all rounds. There are
  guesses in every round that can have some.
- *plain*, *drafting*, *ratio*: tokens a second of decoding alone, all answers together.
- *by answer*, *pairs*: quartiles of tokens a round and of ratios, over answers.
- *work*: processor time of all threads a token, drafting over plain.
- *stay*: how often the guess of each place stayed, if those before it did.
- *copies* as guesses: they are copied from the text, without the draft, so that one sees how much the answers repeat
  themselves; rounds are then only those that found something to copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arriero.chat.messages import Conversation, Message
from arriero.chat.model_text import ModelText
from arriero.model.contract import Draft, Model
from arriero.runner.engine import Engine, Limits
from arriero.runner.load import Loaded, load
from arriero.runner.messages import Finished, RunnerConfig, SamplingOptions, Submit, Tokens
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import EveryRound
from arriero.runner.speculation.opening import open_draft
from arriero.runner.speculation.speculator import Speculator
from arriero.source import FolderSource, GGUFSource

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Write a short email to my landlord about a broken heating.",
    "Give me three tips for sleeping better.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "How do I cook rice so that it does not stick?",
    "Summarize the story of Romeo and Juliet in a few sentences.",
    "What is the difference between weather and climate?",
    "Write a poem about a lighthouse in winter.",
    "A train travels 180 km in two hours. How fast is it? Show your steps.",
    "What are the advantages and disadvantages of working from home?",
    "Translate 'good morning, my friends' into Spanish and explain each word.",
    "Who was Marie Curie?",
    "List five animals that live in the Arctic and one fact about each.",
    "How does a bicycle stay upright?",
    "Suggest a name and a slogan for a small bakery.",
)


HEADER = (
    "| temperature | guesses | tokens a round | by answer | plain | drafting | ratio | pairs | work | same | stay |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass
class Taken:
    """What answers together took."""

    tokens: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    """Seconds of all threads."""
    rounds: int = 0
    accepted: int = 0
    each: list[float] = field(default_factory=list)
    """Tokens of a round, by answer."""
    reached: list[int] = field(default_factory=list)
    stayed: list[int] = field(default_factory=list)

    def add(self, end: Finished, processor: float) -> None:
        """One answer, and what the processors spent on it; its first token came with the prompt."""
        self.tokens += end.generated_tokens - 1
        self.seconds += end.decode_ns / 1e9
        self.processor += processor
        used = end.speculation
        if used is None:
            return
        self.rounds += used.rounds
        if used.rounds:
            self.each.append(1 + used.accepted / used.rounds)
        self.accepted += used.accepted
        self.reached = summed(self.reached, used.reached_by_position)
        self.stayed = summed(self.stayed, used.accepted_by_position)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def per_round(self) -> float:
        """Tokens of a round; 1 where there were none."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def rates(self) -> list[float]:
        """How often a guess of each place stayed, if those before it did."""
        return [stayed / reached for stayed, reached in zip(self.stayed, self.reached, strict=True) if reached]


def summed(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Sums by place, of as many as the longer has."""
    most = max(len(first), len(second))
    return [sum(part[i] for part in (first, second) if i < len(part)) for i in range(most)]


@dataclass(frozen=True)
class Compared:
    """Answers to the same questions, plainly and drafting."""

    plain: Taken
    drafting: Taken
    ratios: list[float]
    """Of speeds, by pair."""
    same: int
    """Answers that were the plain ones."""

    @property
    def ratio(self) -> float:
        """Of speeds, all answers together."""
        return self.drafting.speed / self.plain.speed

    @property
    def work(self) -> float:
        """Of processor seconds a token: less depends on what else the machine does."""
        drafting, plain = self.drafting, self.plain
        return drafting.processor / drafting.tokens * plain.tokens / plain.processor


def answer(
    engine: Engine, prompt: list[int], most: int, stops: list[int], how: SamplingOptions
) -> tuple[list[int], Finished, float]:
    """The reply, its last message, and the processors' seconds behind the first token."""
    engine.submit(Submit(id="turn", tokens=prompt, max_tokens=most, stop_tokens=stops, sampling=how))
    reply: list[int] = []
    end: Finished | None = None
    begun: float | None = None
    while engine.busy:
        engine.step()
        for message in engine.drain():
            if isinstance(message, Tokens):
                begun = begun or time.process_time()
                reply += message.tokens
            elif isinstance(message, Finished):
                end = message
    if end is None or begun is None:
        raise RuntimeError("the engine ended without a token or a last message")
    return reply, end, time.process_time() - begun


def compare(
    plain: Engine,
    drafting: Engine,
    prompts: Sequence[list[int]],
    *,
    most: int,
    stops: list[int],
    how: SamplingOptions,
    rounds: int = 2,
) -> Compared:
    """Every prompt on both engines, one after the other, in alternating order; the first pair does not count."""
    engines, found = (plain, drafting), (Taken(), Taken())
    ratios, same = [], 0
    for engine in engines:
        answer(engine, prompts[0], most, stops, how)
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            replies, speeds = {}, {}
            for which in ((0, 1), (1, 0))[(turn + number) % 2]:
                replies[which], end, processor = answer(engines[which], prompt, most, stops, how)
                found[which].add(end, processor)
                speeds[which] = (end.generated_tokens - 1) / max(end.decode_ns / 1e9, 1e-9)
            same += replies[0] == replies[1]
            if speeds[0]:
                ratios.append(speeds[1] / speeds[0])
    return Compared(*found, ratios, same)


def engines(model: Model, limits: Limits, draft: Draft | None, guesses: int) -> tuple[Engine, Engine]:
    """One that decodes plainly and one that guesses so much in every round: with a draft, or without one by copying."""

    def engine(make: Callable[[Sampler], Speculator | None]) -> Engine:
        sampler = Sampler(model.facts.vocab_size, limits.context_length)
        return Engine(model, sampler, limits, speculator=make(sampler))

    def speculator(sampler: Sampler) -> Speculator:
        return Speculator(model, sampler, draft, cap=guesses, depths=EveryRound())

    return engine(lambda _: None), engine(speculator)


def main() -> None:
    """Load, answer, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--asked", type=Path, help="questions.json of the trainer, in place of those written by hand")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="at most")
    parser.add_argument("--guesses", type=int, nargs="+", default=[7, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.7])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="")
    options = parser.parse_args()
    source = GGUFSource((options.model,)) if options.model.endswith(".gguf") else FolderSource(options.model)
    config = RunnerConfig(source=source, endpoint="", draft=FolderSource(options.draft))
    loaded = load(
        source,
        options.dtype,
        lambda _: None,
        find_draft=lambda checkpoint, model, dtype: open_draft(config, checkpoint, model, dtype),
    )
    if not isinstance(loaded, Loaded):
        raise SystemExit(f"{options.model} makes vectors, no text")
    text = ModelText.open(source)
    asked = QUESTIONS if options.asked is None else json.loads(options.asked.read_text("utf-8"))
    prompts = [prompt_of(text, question) for question in asked[: options.questions]]
    limits = Limits(context_length=max(map(len, prompts)) + options.tokens + 64)
    print("\n".join(HEADER))
    for temperature in options.temperatures:
        for guesses in (*options.guesses, 0):
            draft = loaded.draft if guesses else None
            pair = engines(loaded.model, limits, draft, guesses or max(options.guesses))
            found = compare(
                *pair,
                prompts,
                most=options.tokens,
                stops=sorted(text.stop_ids),
                how=SamplingOptions(temperature=temperature),
                rounds=options.rounds,
            )
            print(row(f"{temperature:g}", str(guesses or "copies"), found), flush=True)


def prompt_of(text: ModelText, question: str) -> list[int]:
    """Tokens of a conversation that asks it."""
    return text.encode(text.render(Conversation(messages=[Message(role="user", content=question)])))


def quartiles(values: Sequence[float]) -> str:
    """The three, or a dash where there are too few."""
    return " ".join(f"{value:.2f}" for value in statistics.quantiles(values, n=4)) if len(values) > 1 else "—"


def row(temperature: str, guesses: str, found: Compared) -> str:
    """One line of the table."""
    places = " ".join(f"{rate:.2f}" for rate in found.drafting.rates)
    plain, drafting = found.plain, found.drafting
    return (
        f"| {temperature} | {guesses} | {drafting.per_round:.2f} | {quartiles(drafting.each)} | {plain.speed:.0f} | "
        f"{drafting.speed:.0f} | {found.ratio:.2f} | {quartiles(found.ratios)} | {found.work:.2f} | "
        f"{found.same}/{len(found.ratios)} | {places} |"
    )


if __name__ == "__main__":
    main()

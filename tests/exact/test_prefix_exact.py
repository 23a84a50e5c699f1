"""A row that begins from a stored prefix gives the tokens of the plain loop, for every architecture, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.source import FolderSource
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit

GOLDENS = Path(__file__).parents[1] / "model" / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "config.json").is_file())
PLENTY = 1 << 30


@pytest.fixture(params=NAMES, scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(Checkpoint.open(FolderSource(str(GOLDENS / request.param))), mx.float32)


def random_tokens(rng: random.Random, model: Model, count: int) -> list[int]:
    return [rng.randrange(model.facts.vocab_size) for _ in range(count)]


def test_turns_of_a_conversation_go_on_from_what_is_stored(model: Model) -> None:
    """Every turn keeps all before it, so all of it is known, whole states included: the reply's end is one."""
    rng = random.Random(5)
    turn = max(4, min(20, model.facts.context_length // 16))
    engine = make_engine(model, prefill_chunk=7, prefix_bytes=PLENTY)
    prompt = random_tokens(rng, model, turn)
    known = 0
    for number in range(4):
        engine.submit(submit(str(number), prompt, turn))
        reply = run(engine)[str(number)]
        assert reply.tokens == plain_loop(model, prompt, turn)
        assert reply.end.cached_tokens == known
        known = len(prompt) + turn - 1
        prompt = [*prompt, *reply.tokens, *random_tokens(rng, model, turn // 2)]


def test_branches_neighbours_cancels_and_little_memory_change_no_token(model: Model) -> None:
    rng = random.Random(11)
    longest = min(60, model.facts.context_length // 2)
    for budget in (PLENTY, 60_000):
        engine = make_engine(model, ahead=budget == PLENTY, prefill_chunk=9, max_rows=3, prefix_bytes=budget)
        stored: list[list[int]] = [random_tokens(rng, model, longest)]
        asked: dict[str, tuple[list[int], int]] = {}
        replies: dict = {}
        for number in range(14):
            base = rng.choice(stored)
            prompt = [*base[: rng.randrange(len(base) + 1)], *random_tokens(rng, model, rng.randrange(1, 8))][:longest]
            asked[str(number)] = prompt, rng.randrange(1, 9)
            engine.submit(submit(str(number), *asked[str(number)]))
            for _ in range(rng.randrange(6)):
                engine.step()
            if number % 5 == 4:
                engine.cancel(str(number - rng.randrange(2)))
            collect(engine, replies)
            stored += [[*asked[row][0], *reply.tokens] for row, reply in replies.items() if reply.reason == "length"]
        run(engine, replies)
        for row, (prompt, count) in asked.items():
            assert replies[row].tokens == plain_loop(model, prompt, count)[: len(replies[row].tokens)]
            assert replies[row].reason == "cancelled" or len(replies[row].tokens) == count
        assert engine.prefixes.nbytes <= budget
        restored = [reply.prefix.restored for reply in replies.values() if reply.prefix is not None]
        assert budget < PLENTY or sum(restored) > 0


def test_many_turns_with_room_for_few_states_restore_the_newest(model: Model) -> None:
    """S05: of whole states the oldest go, and never the one that the next turn needs."""
    facts = model.facts
    new, reply = 3, 2
    turns = min(30, (facts.context_length - 16) // (new + reply))
    assert turns >= 8
    rng = random.Random(2)
    budget = 8 * facts.cache_bytes_fixed + 512 * facts.cache_bytes_per_token
    engine = make_engine(model, prefix_bytes=budget)
    prompt, hits = random_tokens(rng, model, 10), []
    for _ in range(turns):
        engine.submit(submit("a", prompt, reply))
        answer = run(engine)["a"]
        hits.append(answer.end.cached_tokens == len(prompt) - new - 1)
        prompt = [*prompt, *answer.tokens, *random_tokens(rng, model, new)]
    assert engine.prefixes.nbytes <= budget
    assert hits == [False, *[True] * (turns - 1)]

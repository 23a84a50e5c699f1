"""A draft's caches among stored prefixes: restored to the target's length, and never with a pair of another text."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.contract import Batch, Draft, Model, Span
from arriero.model.drafts import load_head
from arriero.runner.engine import Engine, Limits
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.speculator import Speculator
from tests.helpers.drafts import cache_bits, target_of, with_head
from tests.helpers.engine_runs import plain_loop, run, submit
from tests.helpers.speculation import Widths, speculating

NAME = "mtp_qwen3_5"


@pytest.fixture(scope="module")
def model() -> Model:
    return target_of(NAME)


@pytest.fixture(scope="module")
def head(model: Model) -> Draft:
    found = load_head(with_head(NAME).typed(), model, mx.float32)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def prompt(model: Model) -> list[int]:
    rng = random.Random(2)
    return [rng.randrange(model.facts.vocab_size) for _ in range(40)]


def told(model: Model, head: Draft, tokens: list[int], length: int) -> list[np.ndarray]:
    """What the head's cache holds when it is told `length` positions at once."""
    caches, own = model.new_caches(), head.new_caches()
    states = model.forward(Batch(mx.array(tokens[:length], mx.int32), [Span(0, length, 0, caches)])).for_head
    head.commit(Batch(mx.array(tokens[1 : length + 1], mx.int32), [Span(0, length, 0, own)]), states)
    return cache_bits(own)


def decoding(engine: Engine) -> list[np.ndarray]:
    """The head's cache when the only row begins to decode."""
    for _ in range(50):
        if engine._rows and not engine._rows[0].prompt_left:
            break
        engine.step()
    return cache_bits(engine._rows[0].session.caches)


def expect(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert np.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("widths", [(0,), (3,)], ids=["parked", "drafting"])
def test_a_stop_token_that_the_next_turn_leaves_out_stays_in_no_pair(
    model: Model, head: Draft, prompt: list[int], widths: tuple[int, ...], ahead: bool
) -> None:
    """R-51, R-69."""
    reply = plain_loop(model, prompt, 20)
    stop = next(token for i, token in enumerate(reply) if i > 5 and token not in reply[:i])
    said = reply[: reply.index(stop)]
    other = next(token for token in range(model.facts.vocab_size) if token not in (stop, *said))
    engine = speculating(model, draft=head, widths=widths, ahead=ahead, prefix_bytes=1 << 26)
    engine.submit(submit("a", prompt, 20, stop=[stop]))
    assert run(engine)["a"].tokens == said
    turn = [*prompt, *said, other, 7, 9]
    engine.submit(submit("b", turn, 10))
    expect(decoding(engine), told(model, head, turn, len(turn) - 1))
    reply_b = run(engine)["b"]
    assert reply_b.tokens == plain_loop(model, turn, 10)
    # All but the last pair, whose second token is another one now.
    assert reply_b.end.cached_tokens >= len(prompt) - 5


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("widths", [(0,), (3,)], ids=["parked", "drafting"])
def test_a_turn_behind_a_stop_token_goes_on_where_the_reply_ended(
    model: Model, head: Draft, prompt: list[int], widths: tuple[int, ...], ahead: bool
) -> None:
    """The state behind the last pair that is known, though a step that nobody reads may have gone further."""
    reply = plain_loop(model, prompt, 20)
    stop = next(token for i, token in enumerate(reply) if i > 5 and token not in reply[:i])
    said = reply[: reply.index(stop)]
    engine = speculating(model, draft=head, widths=widths, ahead=ahead, prefix_bytes=1 << 26)
    engine.submit(submit("a", prompt, 20, stop=[stop]))
    assert run(engine)["a"].tokens == said
    turn = [*prompt, *said, stop, 7, 9]
    engine.submit(submit("b", turn, 10))
    expect(decoding(engine), told(model, head, turn, len(turn) - 1))
    later = run(engine)["b"]
    assert later.tokens == plain_loop(model, turn, 10)
    assert later.end.cached_tokens == len(prompt) + len(said)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_parked_draft_is_told_from_time_to_time_holds_no_token_that_nobody_has_read(
    model: Model, head: Draft, prompt: list[int], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arriero.runner.speculation.speculator.FLUSH", 4)
    said = plain_loop(model, prompt, 20)
    engine = speculating(model, draft=head, widths=(0,), ahead=ahead, prefix_bytes=1 << 26)
    engine.submit(submit("a", prompt, 20))
    assert run(engine)["a"].tokens == said
    turn = [*prompt, *said, 7, 9]
    engine.submit(submit("b", turn, 4))
    expect(decoding(engine), told(model, head, turn, len(turn) - 1))
    assert run(engine)["b"].end.cached_tokens == len(prompt) + len(said) - 1


def test_a_prompt_that_differs_is_reported_by_its_first_other_token(
    model: Model, head: Draft, prompt: list[int]
) -> None:
    engine = speculating(model, draft=head, prefix_bytes=1 << 26)
    engine.submit(submit("a", prompt, 2))
    run(engine)
    for at in (0, 1, 17):
        other = list(prompt)
        other[at] = (prompt[at] + 1) % model.facts.vocab_size
        engine.submit(submit(str(at), other, 1))
        used = run(engine)[str(at)].prefix
        assert used.matched == at
        assert used.stored[0] == prompt[at]


def test_a_cancelled_prompt_leaves_the_draft_level_with_its_target(
    model: Model, head: Draft, prompt: list[int]
) -> None:
    """R-46."""
    engine = speculating(model, draft=head, prefix_bytes=1 << 26, prefill_chunk=8)
    engine.submit(submit("a", prompt, 5))
    for _ in range(4):
        engine.step()
    engine.cancel("a")
    engine.submit(submit("b", prompt, 5))
    expect(decoding(engine), told(model, head, prompt, len(prompt) - 1))
    reply = run(engine)["b"]
    assert reply.tokens == plain_loop(model, prompt, 5)
    assert reply.end.cached_tokens > 0


def test_a_draft_comes_back_from_disk_with_its_target(
    model: Model, head: Draft, prompt: list[int], tmp_path: Path
) -> None:
    def engine() -> Engine:
        context = model.facts.context_length
        sampler = Sampler(model.facts.vocab_size, context)
        speculator = Speculator(model, sampler, head, depths=Widths(3))
        limits = Limits(context_length=context, prefix_bytes=1 << 26)
        return Engine(model, sampler, limits, None, DiskTier(tmp_path, 1 << 30), speculator)

    first = engine()
    first.submit(submit("a", prompt, 20))
    said = run(first)["a"].tokens
    first.close()
    turn = [*prompt, *said, 3, 1, 4]
    second = engine()
    second.submit(submit("b", turn, 10))
    expect(decoding(second), told(model, head, turn, len(turn) - 1))
    reply = run(second)["b"]
    assert reply.tokens == plain_loop(model, turn, 10)
    assert reply.end.cached_tokens == len(prompt) + len(said) - 1


def test_rows_that_share_a_beginning_read_it_once_with_a_draft_too(
    model: Model, head: Draft, prompt: list[int]
) -> None:
    long = [*prompt, *prompt[::-1], *prompt]
    engine = speculating(model, draft=head, prefix_bytes=1 << 26, prefill_chunk=16)
    prompts = {name: [*long, *tail] for name, tail in {"a": [1, 2], "b": [3, 4], "c": [1, 5]}.items()}
    for name, tokens in prompts.items():
        engine.submit(submit(name, tokens, 12))
    replies = run(engine)
    for name, tokens in prompts.items():
        assert replies[name].tokens == plain_loop(model, tokens, 12)
    assert sum(replies[name].end.cached_tokens > 64 for name in prompts) == 2

"""Every draft and every architecture, every width and pattern: the plain loop's tokens, bit for bit in float32.

The whole grid takes half an hour (`-m slow`); one draft of each kind runs always. Greedy replies of tiny random models
may repeat one token for ever, whatever their caches hold, so strong penalties keep the texts here moving.
"""

from __future__ import annotations

import random
import string
from typing import Any

import pytest

from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Finished, Grammar, SamplingOptions, Submit, Vocabulary
from arriero.runner.sampling import Sampler
from tests.helpers.draft_cases import ARCHITECTURES, DRAFTS, KINDS, drafting, model_of, plain, prompt_for
from tests.helpers.engine_runs import GREEDY, collect, run, submit
from tests.helpers.speculation import PATTERNS

MOVING = SamplingOptions(
    temperature=0.0, repeat_penalty=1.1, presence_penalty=1000.0, frequency_penalty=0.2, repeat_last_n=20
)
SEEDED = SamplingOptions(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repeat_penalty=1.1, seed=1234)
MIXED = (1, 2, 3, 4, 5, 6, 7, 8, 0)

SLOW = pytest.mark.slow
ALL = [*DRAFTS, *ARCHITECTURES]
EACH = [name if name in KINDS and name != "mtp_qwen4_exp" else pytest.param(name, marks=SLOW) for name in ALL]
"""Cases of which one of each kind always runs, but for the slowest."""
ALL_SLOW = [pytest.param(name, marks=SLOW) for name in ALL]


def expect_reply(name: str, sampling: SamplingOptions, pattern: str, widths: tuple[int, ...], count: int) -> None:
    prompt = prompt_for(name)
    count = min(count, model_of(name).facts.context_length - len(prompt))
    wanted = plain(name, prompt, count, sampling)
    engine = drafting(name, {tuple(prompt): wanted}, pattern, widths=widths)
    engine.submit(submit("a", prompt, count, sampling=sampling))
    reply = run(engine)["a"]
    assert reply.tokens == wanted
    used = reply.end.speculation
    assert used.rounds > 0
    assert used.accepted == {"always": used.drafted, "never": 0}.get(pattern, used.accepted)


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ALL_SLOW)
def test_one_width(name: str, pattern: str, width: int) -> None:
    expect_reply(name, MOVING, pattern, (width,), 120)


@pytest.mark.parametrize("sampling", [GREEDY, MOVING, SEEDED], ids=["greedy", "penalties", "seeded"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ALL_SLOW)
@pytest.mark.timeout(300)
def test_500_tokens_of_all_widths(name: str, pattern: str, sampling: SamplingOptions) -> None:
    """S08."""
    expect_reply(name, sampling, pattern, MIXED, 500)


@pytest.mark.parametrize("name", EACH)
def test_replies_that_move_of_all_widths(name: str) -> None:
    assert len(set(plain(name, prompt_for(name), 40, MOVING))) > 8
    expect_reply(name, MOVING, "alternating", MIXED, 40)


@pytest.mark.parametrize("pattern", ["always", pytest.param("alternating", marks=SLOW)])
@pytest.mark.parametrize("name", EACH)
def test_a_stop_token_within_a_round_ends_the_reply_and_stays_in_no_cache(name: str, pattern: str) -> None:
    prompt = prompt_for(name, 19)
    wanted = plain(name, prompt, 40, MOVING)
    firsts = [at for at, token in enumerate(wanted) if token not in wanted[:at]]
    for at in firsts[2:13:4]:
        engine = drafting(name, {tuple(prompt): wanted}, pattern, widths=(8, 5), prefix_bytes=1 << 26)
        engine.submit(submit("a", prompt, 40, stop=[wanted[at]], sampling=MOVING))
        reply = run(engine)["a"]
        assert (reply.tokens, reply.reason) == (wanted[:at], "stop")
        turn = [*prompt, *wanted[:at], 1, 2, 3]
        engine.submit(submit("b", turn, 6, sampling=MOVING))
        later = run(engine)["b"]
        assert later.tokens == plain(name, turn, 6, MOVING)


LETTERS = [letter.encode() for letter in string.ascii_letters + string.digits]


def in_grammar(row: str, prompt: list[int], sampling: SamplingOptions) -> Submit:
    text = "([a-z]{2}[A-Z0-9]){9}(yes|no)?"
    grammar = Grammar(kind="regex", text=text)
    stop = [len(LETTERS)]
    return Submit(id=row, tokens=prompt, max_tokens=60, stop_tokens=stop, sampling=sampling, grammar=grammar)


@pytest.mark.parametrize("sampling", [SEEDED, pytest.param(MOVING, marks=SLOW)], ids=["seeded", "penalties"])
@pytest.mark.parametrize("name", EACH)
def test_a_reply_in_a_grammar(name: str, sampling: SamplingOptions) -> None:
    model, prompt = model_of(name), prompt_for(name)
    vocab = model.facts.vocab_size
    vocabulary = Vocabulary(
        tokens=[*LETTERS, b"<end>", *[b""] * (vocab - len(LETTERS) - 1)], special=list(range(len(LETTERS), vocab))
    )
    basis = Engine(model, Sampler(vocab, 512), Limits(context_length=model.facts.context_length))
    basis.learn(vocabulary)
    basis.submit(in_grammar("a", prompt, sampling))
    wanted = run(basis)["a"]
    assert wanted.reason == "stop"
    assert len(wanted.tokens) >= 27
    for pattern in ("always", "random", "never"):
        engine = drafting(name, {tuple(prompt): wanted.tokens}, pattern, widths=(8, 3, 1))
        engine.learn(vocabulary)
        engine.submit(in_grammar("a", prompt, sampling))
        found = run(engine)["a"]
        assert (found.tokens, found.reason) == (wanted.tokens, "stop")
        assert pattern == "never" or found.end.speculation.rounds > 2


def schedule(rng: random.Random) -> list[dict[str, Any]]:
    """Rows that come, go and are cancelled beside the main one."""
    return [
        {
            "step": rng.randrange(30),
            "length": rng.randrange(1, 30),
            "count": rng.randrange(1, 12),
            "cancel": rng.choice([None, rng.randrange(12)]),
        }
        for _ in range(rng.randrange(1, 4))
    ]


def expect_schedule(name: str, seed: int) -> None:
    rng = random.Random(seed)
    others, ahead = schedule(rng), rng.random() < 0.5
    prompts = {"main": prompt_for(name, 12)}
    prompts |= {f"other {i}": prompt_for(name, other["length"], seed=i) for i, other in enumerate(others)}
    counts = {"main": 50} | {f"other {i}": other["count"] for i, other in enumerate(others)}
    wanted = {row: plain(name, prompt, counts[row], MOVING) for row, prompt in prompts.items()}
    replies = {tuple(prompt): wanted[row] for row, prompt in prompts.items()}
    engine = drafting(
        name,
        replies,
        rng.choice(sorted(PATTERNS)),
        widths=[rng.randrange(9) for _ in range(4)],
        ahead=ahead,
        prefix_bytes=rng.choice([0, 1 << 26]),
        prefill_chunk=rng.choice([4, 9, 64]),
    )
    found: dict[str, Any] = {}
    engine.submit(submit("main", prompts["main"], 50, sampling=MOVING))
    step = 0
    while engine.busy or any(other["step"] >= step for other in others):
        for i, other in enumerate(others):
            if other["step"] == step:
                engine.submit(submit(f"other {i}", prompts[f"other {i}"], other["count"], sampling=MOVING))
            if other["cancel"] is not None and other["step"] + other["cancel"] == step:
                engine.cancel(f"other {i}")
        engine.step()
        collect(engine, found)
        step += 1
    assert set(found) == set(prompts)
    for row, reply in found.items():
        assert isinstance(reply.end, Finished)
        assert reply.tokens == wanted[row][: len(reply.tokens)]
        assert reply.reason == "cancelled" or len(reply.tokens) == counts[row]
    # Whatever was cancelled when: what is stored of it is right.
    engine.submit(submit("again", prompts["main"], 50, sampling=MOVING))
    assert run(engine)["again"].tokens == wanted["main"]


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=SLOW) for seed in range(10, 15))])
def test_rows_that_join_leave_and_are_cancelled(name: str, seed: int) -> None:
    """S09."""
    expect_schedule(name, seed)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(
    "depths", [(1, 18, 30, 33), pytest.param(tuple(range(1, 48, 2)), marks=SLOW)], ids=["some", "any"]
)
def test_a_prefix_restored_at_any_depth(name: str, depths: tuple[int, ...]) -> None:
    first = prompt_for(name, 31)
    said = plain(name, first, 16, MOVING)
    for depth in depths:
        # Longer than the first text, so that a script can tell them apart.
        second = [*first, *said][:depth] + prompt_for(name, 54 - depth, seed=1)
        wanted = plain(name, second, 10, MOVING)
        engine = drafting(
            name, {tuple(second): wanted, tuple(first): said}, "random", widths=(4, 7, 1), prefix_bytes=1 << 26
        )
        engine.submit(submit("a", first, 16, sampling=MOVING))
        assert run(engine)["a"].tokens == said
        engine.submit(submit("b", second, 10, sampling=MOVING))
        reply = run(engine)["b"]
        assert reply.tokens == wanted
        assert reply.end.speculation.rounds > 0

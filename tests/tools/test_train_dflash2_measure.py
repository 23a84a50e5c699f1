"""The measurement of a draft in the engine, with golden ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from arriero.model.drafts import load_draft
from arriero.model.drafts.dflash_config import Config
from arriero.runner.engine import Limits
from arriero.runner.messages import Finished, SamplingOptions, SpeculationUsed
from tests.helpers.drafts import draft_checkpoint, target_ids, target_of
from tools.train_dflash2_measure import QUESTIONS, Compared, Taken, compare, engines, row
from tools.train_dflash2_shape import Shape, spread_taps

GREEDY = SamplingOptions(temperature=0)


def test_a_draft_and_copies_answer_like_plain_decoding_and_are_counted() -> None:
    target = target_of("dflash2")
    draft = load_draft(draft_checkpoint("dflash2"), target, mx.float32)
    ids = target_ids("dflash2")
    for guesses, drafting in ((3, draft), (4, None)):
        pair = engines(target, Limits(context_length=128), drafting, guesses)
        found = compare(*pair, [ids, [*ids[:9], *ids[:9]]], most=12, stops=[], how=GREEDY)
        assert found.same == len(found.ratios) == 4
        assert found.plain.tokens == found.drafting.tokens == 4 * 11
        assert found.plain.rounds == 0
        assert found.plain.processor > 0
        assert len(found.drafting.rates) <= guesses
        if drafting is not None:
            assert found.drafting.rounds >= 4 * 3
            assert found.drafting.tokens == pytest.approx(
                found.drafting.rounds * found.drafting.per_round, abs=4 * guesses
            )


def test_tokens_of_rounds_are_summed_over_answers() -> None:
    taken = Taken()
    for accepted, reached, stayed in ((5, [4, 3], [3, 2]), (1, [2, 1, 1], [1, 0, 0])):
        used = SpeculationUsed(
            kind="draft", rounds=len(reached) + 2, drafted=9, accepted=accepted, reached_by_position=reached,
            accepted_by_position=stayed, plain_steps=0, parked_ns=0,
        )  # fmt: skip
        end = Finished(
            id="a", reason="length", prompt_tokens=3, cached_tokens=0, generated_tokens=11, prefill_ns=0,
            decode_ns=500_000_000, speculation=used,
        )  # fmt: skip
        taken.add(end, 0.25)
    assert (taken.tokens, taken.seconds, taken.processor, taken.speed) == (20, 1.0, 0.5, 20.0)
    assert taken.per_round == pytest.approx(1 + 6 / 9)
    assert taken.each == pytest.approx([1 + 5 / 4, 1 + 1 / 5])
    assert taken.rates == pytest.approx([4 / 6, 2 / 4, 0])


def test_a_row_says_what_was_compared() -> None:
    plain, drafting = Taken(tokens=20, seconds=2, processor=4), Taken(tokens=20, seconds=1, processor=3, rounds=8)
    drafting.accepted, drafting.each, drafting.reached, drafting.stayed = 12, [2.0, 3.0], [8, 6], [6, 3]
    written = row("0.7", "3", Compared(plain, drafting, [1.0, 3.0], 1))
    assert written == "| 0.7 | 3 | 2.50 | 1.75 2.50 3.25 | 10 | 20 | 2.00 | 0.50 2.00 3.50 | 0.75 | 1/2 | 0.75 0.50 |"


def test_the_questions_differ() -> None:
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 16


def test_the_configuration_that_is_written_says_the_shape_to_the_loader() -> None:
    shape = Shape(
        hidden=64, heads=4, kv_heads=2, head_dim=16, inner=48, vocab=100, target_layers=9, taps=(1, 6), mask=3,
        layers=3, block=6, window=20, causal=True, conv_taps=3, conv_group=8, rank=5, top_k=4, theta=5000.0, eps=1e-5,
    )  # fmt: skip
    config: Any = Config.read(shape.config())
    assert (config.hidden, config.intermediate, config.vocab, config.eps) == (64, 48, 100, 1e-5)
    assert (config.taps, config.target_layers, config.mask, config.block) == ((1, 6), 9, 3, 6)
    assert config.causal == [True] * 3
    assert [(a.heads, a.kv_heads, a.head_dim, a.window) for a in config.attention] == [(4, 2, 16, 20)] * 3
    assert (config.conv.taps, config.conv.group, config.selector.rank, config.selector.top_k) == (3, 8, 5, 4)
    assert config.rope.theta == 5000.0


@pytest.mark.parametrize(("layers", "count", "taps"), [(30, 5, (1, 8, 14, 20, 27)), (9, 1, (4,)), (5, 2, (1, 2))])
def test_taps_are_spread_from_the_second_to_the_third_last_layer(
    layers: int, count: int, taps: tuple[int, ...]
) -> None:
    assert spread_taps(layers, count) == taps
    with pytest.raises(ValueError, match="taps of a model"):
        spread_taps(layers, layers - 2)

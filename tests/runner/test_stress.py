"""Everything at once: rows that come, go, share, draft and are cancelled at any moment, and every one is answered."""

from __future__ import annotations

import logging
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arriero.runner.engine import Engine, Limits
from arriero.runner.messages import Embed, Embedded, Failed, Finished, Grammar, Submit, Tokens, Vocabulary
from arriero.runner.prefix.disk import DiskTier
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.speculator import Speculator
from tests.helpers.draft_cases import KINDS, pair, plain, prompt_for
from tests.helpers.engine_runs import GREEDY, collect, make_engine, submit
from tests.helpers.speculation import Widths

SEEDS = range(int(os.environ.get("STRESS_SEEDS", "1")))
STEPS = 2000
"""More than any schedule takes; an engine that waits for what never comes is busy for ever."""
VOCABULARY = Vocabulary(tokens=[bytes((33 + i,)) for i in range(90)] + [b""] * 38, special=list(range(90, 128)))


class Asked:
    """Requests at random, and what has come back of them."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.rng = name, rng
        self.wanted: dict[str, list[int] | None] = {}
        self.said: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}

    @cache  # noqa: B019 - lives as long as the test
    def prompt(self, family: int, length: int) -> list[int]:
        return (prompt_for(self.name, 70, seed=family) * 2)[:length]

    def submit(self, engine: Engine) -> None:
        """A row whose prompt may begin like others, sometimes in a grammar; or texts for vectors."""
        rng, row = self.rng, str(len(self.wanted))
        family, length, count = rng.randrange(2), rng.choice([3, 20, 71, 90, 111]), rng.randrange(1, 14)
        prompt = self.prompt(family, length) + [rng.randrange(128) for _ in range(rng.randrange(4))]
        kind = rng.random()
        self.wanted[row], self.said[row] = None, []
        if kind < 0.1:
            engine.embed(Embed(id=row, texts=[prompt[:9], prompt[:2]], pooling="mean"))
            return
        grammar = Grammar(kind="regex", text="[a-z]{3,9}") if kind < 0.25 else None
        if grammar is None:
            self.wanted[row] = plain(self.name, prompt, count)
        request = Submit(
            id=row,
            tokens=prompt,
            max_tokens=count,
            stop_tokens=[127],
            sampling=GREEDY,
            grammar=grammar,
            boundaries=[len(prompt) // 2],
        )
        engine.submit(request)

    def take(self, engine: Engine) -> None:
        for message in engine.drain():
            row = message.id
            assert row not in self.ends, f"{message} after the end of row {row}"
            if isinstance(message, Tokens):
                self.said[row] += message.tokens
            elif isinstance(message, Finished | Failed | Embedded):
                self.ends[row] = message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["mtp_qwen3_5", "assistant_e2b", "dflash2"])
def test_every_request_is_answered_once_and_rightly(
    name: str, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert name in KINDS
    rng = random.Random(seed)
    model, draft = pair(name)
    vocab, context = model.facts.vocab_size, model.facts.context_length
    sampler = Sampler(vocab, context)
    speculator = Speculator(model, sampler, draft, depths=Widths(*(rng.randrange(6) for _ in range(5))))
    limits = Limits(
        context_length=context,
        max_rows=rng.choice([1, 2, 4]),
        prefill_chunk=rng.choice([8, 32]),
        prefix_bytes=rng.choice([60_000, 1 << 24]),
    )
    disk = DiskTier(tmp_path / "model", 1 << 22)
    engine = Engine(model, sampler, limits, rng.random() < 0.5, disk, speculator)
    engine.learn(VOCABULARY)
    asked = Asked(name, rng)
    steps = 0
    with caplog.at_level(logging.ERROR):
        while engine.busy or len(asked.wanted) < 24:
            if len(asked.wanted) < 24 and rng.random() < 0.25:
                for _ in range(rng.choice([1, 1, 3])):
                    asked.submit(engine)
            if rng.random() < 0.06 and asked.wanted:
                engine.cancel(rng.choice(list(asked.wanted)))
            if rng.random() < 0.02:
                engine.limit(0, rng.choice([0, 1 << 20]))
            engine.step()
            asked.take(engine)
            steps += 1
            assert steps < STEPS, f"{set(asked.wanted) - set(asked.ends)} are not answered"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert set(asked.ends) == set(asked.wanted)
    for row, end in asked.ends.items():
        if isinstance(end, Failed):
            assert end.error in ("Cancelled", "InvalidRequest"), end.message
            continue
        wanted = asked.wanted[row]
        if isinstance(end, Finished) and wanted is not None:
            stopped = wanted[: wanted.index(127)] if 127 in wanted else wanted
            assert asked.said[row] == stopped[: len(asked.said[row])]
            assert end.reason == "cancelled" or asked.said[row] == stopped
    counts = engine.counts()
    assert (counts.rows_running, counts.rows_waiting, counts.reserved_bytes) == (0, 0, 0)
    engine.close()


@pytest.mark.parametrize("asked", ["known", "read_ahead"])
def test_a_row_that_cannot_even_be_asked_whether_it_may_begin_is_over_and_others_run(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be asked again and again, by an engine that is busy for ever."""
    model, _ = pair("mtp_qwen3_5")
    engine = make_engine(model, prefix_bytes=1 << 24)
    whole = getattr(engine.prefixes, asked)
    broken = prompt_for("mtp_qwen3_5", 30, seed=5)

    def breaks(keys: np.ndarray) -> Any:
        if keys.tolist() == broken:
            raise RuntimeError("the store is broken")
        return whole(keys)

    monkeypatch.setattr(engine.prefixes, asked, breaks)
    engine.submit(submit("a", broken, 5))
    engine.submit(submit("b", prompt_for("mtp_qwen3_5"), 5))
    for _ in range(20):
        engine.step()
    assert not engine.busy
    replies = collect(engine)
    assert "the store is broken" in replies["a"].end.message
    assert replies["b"].tokens == plain("mtp_qwen3_5", prompt_for("mtp_qwen3_5"), 5)
    assert engine.counts().reserved_bytes == 0

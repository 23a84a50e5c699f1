"""Every architecture through the engine in float32: the plain loop's tokens, whatever chunks and neighbours."""

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


@pytest.fixture(params=NAMES, scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(Checkpoint.open(FolderSource(str(GOLDENS / request.param))), mx.float32)


def test_chunks_and_neighbours_change_no_token(model: Model) -> None:
    rng = random.Random(3)
    limit = model.facts.context_length
    length, count = min(37, limit // 3), min(200, limit // 2)
    prompt = [rng.randrange(model.facts.vocab_size) for _ in range(length)]
    expected = plain_loop(model, prompt, count)
    for chunk in (1, 7, 512):
        engine = make_engine(model, prefill_chunk=chunk)
        engine.submit(submit("main", prompt, count))
        replies: dict = {}
        for step in range(60):
            if step % 9 == 0:
                other = [rng.randrange(model.facts.vocab_size) for _ in range(rng.randrange(1, 40))]
                engine.submit(submit(f"n{step}", other, rng.randrange(1, 20)))
            if step % 14 == 13:
                engine.cancel(f"n{step - 4}")
            engine.step()
            collect(engine, replies)
        run(engine, replies)
        assert replies["main"].tokens == expected

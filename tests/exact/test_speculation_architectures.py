"""Every architecture with drafts of every width: the plain loop's tokens, and caches that go back to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from tests.helpers.engine_runs import plain_loop, run, submit
from tests.helpers.speculation import PATTERNS, speculating

GOLDENS = Path(__file__).parents[1] / "model" / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "config.json").is_file())


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_token_of_any_architecture(name: str) -> None:
    model = load_model(Checkpoint.open(FolderSource(str(GOLDENS / name))), mx.float32)
    rng = random.Random(name)
    limit = model.facts.context_length
    prompt = [rng.randrange(model.facts.vocab_size) for _ in range(min(21, limit // 3))]
    count = min(70, limit // 2)
    wanted = plain_loop(model, prompt, count)
    for pattern, widths in {"random": (3, 8, 1, 6, 0, 2, 7, 4, 5), "never": (1, 5, 8), "always": (8, 2)}.items():
        engine = speculating(
            model,
            replies={tuple(prompt): wanted},
            pattern=PATTERNS[pattern],
            widths=widths,
            prefix_bytes=1 << 26,
            prefill_chunk=8,
        )
        few = count if pattern == "random" else count // 3
        engine.submit(submit("a", prompt, few))
        reply = run(engine)["a"]
        assert reply.tokens == wanted[:few], pattern
        used = reply.end.speculation
        assert used.rounds > 0
        assert used.accepted == {"always": used.drafted, "never": 0}.get(pattern, used.accepted)
        # The next turn goes on from what the rounds left.
        turn = [*prompt, *wanted[:few], 1]
        engine.submit(submit("b", turn, 4))
        assert run(engine)["b"].tokens == plain_loop(model, turn, 4)

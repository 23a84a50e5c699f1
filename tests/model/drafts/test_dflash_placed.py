"""Blocks whose keys the CUDA kernel puts into the caches: the same guesses and caches as layer by layer.

The kernel is executed on the CPU; on a machine with an NVIDIA GPU, on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.gpu_drafts import random_draft, rounds
from arriero.bench.gpu_models import random_model
from arriero.kernels import device
from arriero.model.contract import Batch, RowCaches, Span
from arriero.model.drafts.dflash import BlockDraft
from arriero.model.drafts.dflash_placed import STATES
from tests.helpers.cuda import emulate
from tests.helpers.drafts import Picks
from tests.helpers.small_shapes import small, small_draft

SIZES = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 96, "head_dim": 64}
WINDOW = 40
WIDTH = 4 * SIZES["hidden_size"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, or one that is played."""
    if device.cuda() is None:
        emulate(monkeypatch)


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> BlockDraft:
    """A DFlash 2 of two layers with a window."""
    mx.random.seed(20261201)
    target = random_model(small("Qwen3-8B", **SIZES), None)
    own = small_draft("Qwen3-8B") | SIZES | {"sliding_window": WINDOW}
    made = random_draft(own, target, None)
    assert isinstance(made, BlockDraft)
    # What a block is, and not what is picked of it: that hangs on the last bit.
    monkeypatch.setattr(made, "prepared", lambda states, anchor: [states])
    monkeypatch.setattr(made, "guess", lambda prepared, pick: prepared[0])
    return made


@contextmanager
def plainly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the GPU's kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(device, "cuda", lambda: None)
        yield


class Row:
    """A draft's caches beside a text that is known."""

    def __init__(self, draft: BlockDraft) -> None:
        self.draft = draft
        self.caches: RowCaches = draft.new_caches()
        self.position = 0

    def commit(self, states: mx.array) -> None:
        self.draft.commit(Batch(mx.zeros((len(states),), mx.int32), [self.span(len(states))]), states)
        self.position += len(states)

    def propose(self, states: mx.array, anchor: int, count: int = 7) -> np.ndarray:
        """The states that the block's tokens are guessed by."""
        batch = Batch(mx.zeros((len(states),), mx.int32), [self.span(len(states))])
        found = self.draft.propose(batch, states, mx.array([anchor]), count, Picks())
        self.position += len(states)
        return np.array(found.astype(mx.float32))

    def span(self, length: int) -> Span:
        return Span(0, length, self.position, self.caches)

    def held(self) -> list[np.ndarray]:
        """Keys and values that a query at the end can see."""
        found = []
        for cache in self.caches:
            any_cache: Any = cache
            keys, values = any_cache.range(max(any_cache.oldest, self.position - WINDOW), self.position)
            found += [np.array(part.astype(mx.float32)) for part in (keys, values)]
        return found


def states_of(counts: Sequence[int]) -> list[mx.array]:
    """States of the target's taps for so many positions each."""
    return [mx.random.normal((count, WIDTH)).astype(mx.bfloat16) for count in counts]


def both(
    monkeypatch: pytest.MonkeyPatch, draft: BlockDraft, begin: int, counts: Sequence[int]
) -> Iterator[tuple[Row, Row, mx.array, int]]:
    """A row on the kernels and one without, and what each is to be told next."""
    placed, plain = Row(draft), Row(draft)
    (first,) = states_of([begin])
    placed.commit(first)
    with plainly(monkeypatch):
        plain.commit(first)
    for number, states in enumerate(states_of(counts)):
        yield placed, plain, states, 3 + number


def near(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    """Of bfloat16 layers, whose products plain MLX sums in 16 bits on the CPU."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert np.linalg.norm(a - b) <= 0.06 * np.linalg.norm(b)


@pytest.mark.parametrize("begin", [3, 250, 900])
def test_blocks_guess_what_they_guess_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, draft: BlockDraft, begin: int
) -> None:
    assert draft.placed._fits
    for placed, plain, states, anchor in both(monkeypatch, draft, begin, [1, 6, STATES]):
        found = placed.propose(states, anchor)
        assert draft.placed._next is not None
        with plainly(monkeypatch):
            near([found], [plain.propose(states, anchor)])
        near(placed.held(), plain.held())


def test_a_row_that_went_back_is_placed_anew(monkeypatch: pytest.MonkeyPatch, draft: BlockDraft) -> None:
    rows = list(both(monkeypatch, draft, 30, [5, 4]))
    placed, plain = rows[0][:2]
    placed.propose(rows[0][2], 7)
    for cache in placed.caches:
        assert cache is not None
        assert cache.rewind(30)
    placed.position = 30
    found = placed.propose(rows[1][2], 7)
    with plainly(monkeypatch):
        near([found], [plain.propose(rows[1][2], 7)])
    near(placed.held(), plain.held())


def test_what_has_another_form_is_built_layer_by_layer(draft: BlockDraft) -> None:
    row = Row(draft)
    (first, more, none) = states_of([20, STATES + 1, 0])
    row.commit(first)
    for states, count in ((more, 7), (more[:2], 3), (none, 7)):
        row.propose(states, 5, count)
        assert draft.placed._next is None
    assert [cache.offset for cache in row.caches if cache is not None] == [row.position] * 2


def test_a_prompt_goes_on_behind_placed_blocks(monkeypatch: pytest.MonkeyPatch, draft: BlockDraft) -> None:
    (more,) = states_of([300])
    for placed, plain, states, anchor in both(monkeypatch, draft, 12, [3]):
        placed.propose(states, anchor)
        with plainly(monkeypatch):
            plain.propose(states, anchor)
            plain.commit(more)
        placed.commit(more)
        near(placed.held(), plain.held())


def test_the_engine_keeps_the_drafts_that_are_right_in_placed_blocks() -> None:
    target = random_model(small("Qwen3-8B", **SIZES), None)
    draft = random_draft(small_draft("Qwen3-8B") | SIZES, target, None)
    assert isinstance(draft, BlockDraft)
    found = rounds(target, draft, right=3, context=4, tokens=28)
    assert found.share == 1
    assert draft.placed._next is not None

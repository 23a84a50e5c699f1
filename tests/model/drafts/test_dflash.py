"""Block drafts: the reference's numbers behind growing contexts, and the same bits whatever chunks and rewinds."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.contract import Batch, Layout, Model, Span
from arriero.model.drafts import load_draft
from arriero.model.drafts.dflash import BlockDraft
from arriero.model.drafts.dflash2 import SelectingBlockDraft
from arriero.runner.caches.sliding import SlidingCache
from tests.helpers.drafts import Picks, cache_bits, draft_checkpoint, golden_of, one_row, target_of, target_states
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

NAMES = ["dflash2", "dflash_full", "dflash_gemma4", "dflash_laguna", "dflash_mixed", "dflash_scaled"]
TOLERANCE = 1e-4


def load(checkpoint: MemoryCheckpoint, target: Model, dtype: mx.Dtype = mx.float32) -> BlockDraft:
    found = load_draft(checkpoint.typed(), target, dtype)
    assert isinstance(found, BlockDraft)
    return found


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str) -> Model:
    return target_of(name)


@pytest.fixture(scope="module")
def draft(name: str, target: Model) -> BlockDraft:
    return load(draft_checkpoint(name), target)


@pytest.fixture(scope="module")
def golden(name: str) -> dict[str, np.ndarray]:
    return golden_of(name)


@pytest.fixture
def taps(target: Model, draft: BlockDraft, golden: dict[str, np.ndarray]) -> mx.array:
    """What the target hands to the draft, for every token of the prompt."""
    found = target_states(target, golden["ids"].tolist(), draft.facts.taps)[0].taps
    assert found is not None
    return found


def block(draft: BlockDraft, anchor: int, count: int | None = None) -> list[int]:
    return [anchor] + [draft.config.mask] * (draft.config.block - 1 if count is None else count)


def far(draft: BlockDraft, length: int, seed: int = 3) -> mx.array:
    """Made-up taps `[length, taps · hidden]`."""
    width = draft.config.hidden * len(draft.config.taps)
    return mx.array(np.random.default_rng(seed).normal(0, 1, (length, width)).astype(np.float32))


def test_the_target_hands_over_the_references_taps(taps: mx.array, golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(np.array(taps), golden["taps"], rtol=0, atol=2 * TOLERANCE)


def test_blocks_give_the_references_states_and_logits(
    draft: BlockDraft, golden: dict[str, np.ndarray], taps: mx.array
) -> None:
    caches = draft.new_caches()
    for i, (low, high) in enumerate(golden["splits"].tolist()):
        draft.commit(one_row([0] * (high - low), low, caches), taps[low:high])
        states = draft.forward(one_row(block(draft, int(golden[f"anchor{i}"])), high, caches))
        np.testing.assert_allclose(np.array(states), golden[f"states{i}"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(np.array(draft.logits(states[1:])), golden[f"logits{i}"], rtol=0, atol=TOLERANCE)


def test_it_proposes_the_references_tokens_while_the_context_grows(
    draft: BlockDraft, golden: dict[str, np.ndarray], taps: mx.array
) -> None:
    caches = draft.new_caches()
    for i, (low, high) in enumerate(golden["splits"].tolist()):
        anchor, pick = mx.array([int(golden[f"anchor{i}"])]), Picks()
        batch = one_row([0] * (high - low), low, caches)
        tokens = draft.propose(batch, taps[low:high], anchor, draft.config.block - 1, pick)
        assert tokens.dtype == mx.int32
        assert tokens.tolist() == golden[f"path{i}"].tolist()
        assert {cache.offset for cache in caches if cache is not None} == {high}


def test_nothing_new_to_take_in_is_no_hindrance(
    draft: BlockDraft, golden: dict[str, np.ndarray], taps: mx.array
) -> None:
    caches, count = draft.new_caches(), draft.config.block - 1
    draft.commit(one_row([0] * 14, 0, caches), taps[:14])
    anchor = mx.array([int(golden["anchor0"])])
    tokens = draft.propose(one_row([], 14, caches), taps[:0], anchor, count, Picks())
    assert tokens.tolist() == golden["path0"].tolist()


@pytest.mark.parametrize("sizes", [(1,), (3,), (7, 1, 2)])
def test_chunks_of_context_give_the_same_bits_as_the_whole(
    draft: BlockDraft, taps: mx.array, sizes: tuple[int, ...]
) -> None:
    whole, caches, start, turn = draft.new_caches(), draft.new_caches(), 0, 0
    draft.commit(one_row([0] * 40, 0, whole), taps)
    while start < 40:
        end = min(40, start + sizes[turn % len(sizes)])
        draft.commit(one_row([0] * (end - start), start, caches), taps[start:end])
        start, turn = end, turn + 1
    for found, expected in zip(cache_bits(caches), cache_bits(whole), strict=True):
        np.testing.assert_array_equal(found, expected)
    states = [np.array(draft.forward(one_row(block(draft, 5), 40, held))) for held in (caches, whole)]
    np.testing.assert_array_equal(states[0], states[1])


def test_rows_that_share_a_forward_keep_their_bits(draft: BlockDraft, taps: mx.array) -> None:
    lengths, counts = [40, 3, 17], [draft.config.block - 1, 2, 4]
    caches = [draft.new_caches() for _ in lengths]
    starts = np.cumsum([0, *lengths]).tolist()
    spans = [Span(start, n, 0, held) for start, n, held in zip(starts, lengths, caches, strict=False)]
    together = mx.concatenate([taps[40 - n :] for n in lengths])
    draft.commit(Batch(mx.zeros(sum(lengths), mx.int32), spans), together)
    tokens: list[int] = []
    blocks = []
    for n, count, held in zip(lengths, counts, caches, strict=True):
        blocks.append(Span(len(tokens), count + 1, n, held))
        tokens += block(draft, 7, count)
    found = np.array(draft.forward(Batch(mx.array(tokens, mx.int32), blocks)))
    for n, count, span in zip(lengths, counts, blocks, strict=True):
        alone = draft.new_caches()
        draft.commit(one_row([0] * n, 0, alone), taps[40 - n :])
        expected = np.array(draft.forward(one_row(block(draft, 7, count), n, alone)))
        np.testing.assert_array_equal(found[span.start : span.start + span.length], expected)


@pytest.mark.parametrize("offset", [1, 7, 18, 39])
def test_rewinding_and_restoring_give_the_same_bits_as_never_having_gone_on(
    draft: BlockDraft, taps: mx.array, offset: int
) -> None:
    plain, caches, fresh = draft.new_caches(), draft.new_caches(), draft.new_caches()
    draft.commit(one_row([0] * offset, 0, plain), taps[:offset])
    expected = np.array(draft.forward(one_row(block(draft, 9), offset, plain)))
    draft.commit(one_row([0] * 40, 0, caches), taps)
    mx.eval(draft.forward(one_row(block(draft, 9), 40, caches)))
    assert all(cache is not None and cache.rewind(offset) for cache in caches)
    np.testing.assert_array_equal(np.array(draft.forward(one_row(block(draft, 9), offset, caches))), expected)
    for cache, held in zip(fresh, caches, strict=True):
        assert cache is not None
        assert held is not None
        snapshot = held.snapshot()
        assert snapshot is not None
        assert cache.restore(snapshot)
    np.testing.assert_array_equal(np.array(draft.forward(one_row(block(draft, 9), offset, fresh))), expected)


def test_images_of_the_target_move_no_position_of_the_draft(draft: BlockDraft, taps: mx.array) -> None:
    image = np.tile(np.arange(20, dtype=np.int32), (3, 1))
    image[:, 5:9] = 5
    layout, plain, caches = Layout(image, -3), draft.new_caches(), draft.new_caches()
    draft.commit(one_row([0] * 20, 0, plain), taps[:20])
    draft.commit(Batch(mx.zeros(20, mx.int32), [Span(0, 20, 0, caches, layout)]), taps[:20])
    for found, expected in zip(cache_bits(caches), cache_bits(plain), strict=True):
        np.testing.assert_array_equal(found, expected)
    batch = Batch(mx.zeros(2, mx.int32), [Span(0, 2, 20, caches, layout)])
    found = draft.propose(batch, taps[20:22], mx.array([3]), 2, Picks()).tolist()
    assert found == draft.propose(one_row([0] * 2, 20, plain), taps[20:22], mx.array([3]), 2, Picks()).tolist()


def test_long_after_the_window_one_row_at_a_time_is_as_good_as_all_at_once(draft: BlockDraft) -> None:
    states, whole, caches = far(draft, 560), draft.new_caches(), draft.new_caches()
    draft.commit(one_row([0] * 560, 0, whole), states)
    draft.commit(one_row([0] * 540, 0, caches), states[:540])
    for position in range(540, 560):
        draft.commit(one_row([0], position, caches), states[position : position + 1])
        mx.eval(draft.forward(one_row(block(draft, 1), position + 1, caches)))
    found = [np.array(draft.forward(one_row(block(draft, 3), 560, held))) for held in (caches, whole)]
    np.testing.assert_array_equal(found[0], found[1])


def test_a_window_restored_far_out_goes_on_by_one_and_by_many(draft: BlockDraft) -> None:
    if not all(isinstance(cache, SlidingCache) for cache in draft.new_caches()):
        # Full layers hold everything, so nothing is restored late.
        assert draft.facts.cache_bytes_per_token > 0
        return
    states, whole, late = far(draft, 570), draft.new_caches(), draft.new_caches()
    draft.commit(one_row([0] * 560, 0, whole), states[:560])
    for cache, held in zip(late, whole, strict=True):
        assert cache is not None
        assert held is not None
        snapshot = held.snapshot()
        assert snapshot is not None
        assert cache.restore(snapshot)
    for low, high in ((560, 561), (561, 562), (562, 570)):
        for caches in (whole, late):
            draft.commit(one_row([0] * (high - low), low, caches), states[low:high])
        found = [np.array(draft.forward(one_row(block(draft, 3), high, held))) for held in (whole, late)]
        np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("length", [64, 2000])
def test_far_out_a_block_is_what_it_is_behind_its_window_alone(draft: BlockDraft, length: int) -> None:
    windows = [layer.attention.config.window for layer in draft.layers]
    kept = max(length if window is None else window - 1 for window in windows)
    states, far_out, near = far(draft, length), draft.new_caches(), draft.new_caches()
    draft.commit(one_row([0] * length, 0, far_out), states)
    draft.commit(one_row([0] * kept, 0, near), states[length - kept :])
    # Rotations are relative, so that the same rows at other positions are the same to rounding.
    found = [
        np.array(draft.forward(one_row(block(draft, 5), end, held))) for end, held in ((length, far_out), (kept, near))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=10 * TOLERANCE)


def test_keys_older_than_the_window_are_not_seen(draft: BlockDraft) -> None:
    windows = [layer.attention.config.window for layer in draft.layers]
    states = far(draft, 60)
    changed = mx.concatenate([states[:3] + 1, states[3:]])
    found = []
    for context in (states, changed):
        caches = draft.new_caches()
        draft.commit(one_row([0] * 60, 0, caches), context)
        found.append(np.array(draft.forward(one_row(block(draft, 3), 60, caches))))
    assert np.array_equal(found[0], found[1]) is all(window is not None for window in windows)


def test_rows_of_a_block_see_what_the_configuration_says(draft: BlockDraft, taps: mx.array) -> None:
    caches = draft.new_caches()
    draft.commit(one_row([0] * 20, 0, caches), taps[:20])
    tokens = block(draft, 4)
    states = [np.array(draft.forward(one_row(ids, 20, caches))) for ids in (tokens, [*tokens[:-1], 11])]
    # The last row is another token: only where no layer is causal does the first row notice.
    same = bool(np.array_equal(states[0][:-1], states[1][:-1]))
    assert same is all(layer.attention.causal for layer in draft.layers)


def test_bf16_stays_close_and_stays_bf16(name: str, golden: dict[str, np.ndarray]) -> None:
    target = target_of(name, mx.bfloat16)
    draft = load(draft_checkpoint(name), target, mx.bfloat16)
    taps = target_states(target, golden["ids"].tolist(), draft.facts.taps)[0].taps
    assert taps is not None
    caches = draft.new_caches()
    draft.commit(one_row([0] * 14, 0, caches), taps[:14])
    states = draft.forward(one_row(block(draft, int(golden["anchor0"])), 14, caches))
    logits = draft.logits(states[1:])
    assert {states.dtype, logits.dtype} == {mx.bfloat16}
    assert {array.dtype for cache in caches if cache is not None for array in cache.state()} == {mx.bfloat16}
    error = np.array(logits.astype(mx.float32)) - golden["logits0"]
    assert np.sqrt(np.mean(error**2)) < 0.06 * np.sqrt(np.mean(golden["logits0"] ** 2))


def test_a_draft_owns_its_tensors_and_none_of_the_targets(name: str, draft: BlockDraft, target: Model) -> None:
    own = {id(array) for array in draft.parameters()}
    assert not own & {id(array) for array in target.parameters()}
    tensors = draft_checkpoint(name).tensors.values()
    assert sum(array.size for array in draft.parameters()) == sum(value.size for value in tensors)  # type: ignore[union-attr]


def test_facts_say_how_it_wants_to_be_asked(name: str, draft: BlockDraft) -> None:
    facts = draft.facts
    assert facts.limit == draft.config.block - 1
    assert facts.taps == draft.config.taps
    assert (facts.lookahead, facts.reads_target) == (0, False)
    assert facts.conditional is facts.whole is (name == "dflash2")


def test_more_tokens_than_a_block_holds_are_refused(draft: BlockDraft, taps: mx.array) -> None:
    with pytest.raises(ValueError, match=f"1 to {draft.config.block - 1}"):
        draft.propose(one_row([0], 0, draft.new_caches()), taps[:1], mx.array([1]), draft.config.block, Picks())


def test_the_candidates_and_their_law_are_the_references() -> None:
    target, golden = target_of("dflash2"), golden_of("dflash2")
    draft = load(draft_checkpoint("dflash2"), target)
    assert isinstance(draft, SelectingBlockDraft)
    taps = target_states(target, golden["ids"].tolist(), draft.facts.taps)[0].taps
    assert taps is not None
    caches = draft.new_caches()
    for i, (low, high) in enumerate(golden["splits"].tolist()):
        # Forced along the path that the reference drew, each row's scores are conditioned as its were.
        pick = Picks(golden[f"drawn{i}"].tolist())
        batch, anchor = one_row([0] * (high - low), low, caches), mx.array([int(golden[f"anchor{i}"])])
        tokens = draft.propose(batch, taps[low:high], anchor, 7, pick)
        assert tokens.tolist() == golden[f"drawn{i}"].tolist()
        for row, (scores, ids) in enumerate(zip(pick.scores, pick.ids, strict=True)):
            assert ids is not None
            law = np.exp(scores / 0.8 - np.max(scores / 0.8))
            found = dict(zip(ids.tolist(), (law / law.sum()).tolist(), strict=True))
            named = golden[f"drawn_from{i}"][row].tolist()
            expected = dict(zip(named, golden[f"law{i}"][row].tolist(), strict=True))
            assert found.keys() == expected.keys()
            np.testing.assert_allclose([found[t] for t in named], [expected[t] for t in named], rtol=0, atol=TOLERANCE)


def test_candidates_are_in_the_order_of_their_logits_and_ties_in_that_of_their_ids() -> None:
    draft = load(draft_checkpoint("dflash2"), target_of("dflash2"))
    assert isinstance(draft, SelectingBlockDraft)
    logits = np.zeros((2, 128), np.float32)
    logits[0, [90, 3, 50]] = [2, 2, 7]
    logits[1, 127] = 1
    values, ids = draft.selector.candidates(mx.array(logits))
    assert ids.tolist() == [[50, 3, 90, 0, 1], [127, 0, 1, 2, 3]]
    assert values.dtype == mx.float32


def test_another_predecessor_changes_the_scores_of_the_next_row_only() -> None:
    draft, golden = load(draft_checkpoint("dflash2"), target_of("dflash2")), golden_of("dflash2")
    assert isinstance(draft, SelectingBlockDraft)
    states, logits = mx.array(golden["states0"][1:]), mx.array(golden["logits0"])
    found = []
    prepared = draft.selector.prepared(states, logits, mx.array([1]))
    candidates = prepared[0].tolist()
    for first in (0, 2):
        pick = Picks([candidates[0][first], *(row[1] for row in candidates[1:])])
        draft.selector.walk(prepared, pick)
        found.append(pick.scores)
    same = [bool(np.array_equal(a, b)) for a, b in zip(*found, strict=True)]
    assert same == [True, False, True, True, True, True, True]


def test_codebooks_may_be_named_as_converters_name_them() -> None:
    checkpoint, golden = draft_checkpoint("dflash2"), golden_of("dflash2")
    for book in ("predecessor", "successor"):
        name = f"candidate_selector.{book}_codebook"
        checkpoint.tensors[f"{name}.weight"] = checkpoint.tensors.pop(name)
    draft = load(checkpoint, target_of("dflash2"))
    assert isinstance(draft, SelectingBlockDraft)
    anchor = mx.array([int(golden["anchor0"])])
    prepared = draft.selector.prepared(mx.array(golden["states0"][1:]), mx.array(golden["logits0"]), anchor)
    path = draft.selector.walk(prepared, Picks())
    assert path.tolist() == golden["path0"].tolist()

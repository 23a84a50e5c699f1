"""Heads for several tokens: the reference's numbers, and the same bits whatever the chunks, neighbours and rewinds."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.contract import Batch, Features, Layout, Model, Span
from arriero.model.drafts import load_head
from arriero.model.drafts.chain import ChainedHead
from arriero.model.drafts.mtp_flash_next import StreamsHead
from tests.helpers.drafts import Picks, cache_bits, golden_of, one_row, target_of, target_states, with_head
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

NAMES = ["mtp_qwen3_5", "mtp_qwen3_5_moe", "mtp_qwen3_next", "mtp_qwen4_exp"]
TOLERANCE = 2e-4


def head_of(name: str, target: Model, dtype: mx.Dtype = mx.float32) -> ChainedHead:
    found = load_head(with_head(name).typed(), target, dtype)
    assert isinstance(found, ChainedHead)
    return found


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str) -> Model:
    return target_of(name)


@pytest.fixture(scope="module")
def head(name: str, target: Model) -> ChainedHead:
    return head_of(name, target)


@pytest.fixture
def golden(name: str) -> dict[str, np.ndarray]:
    found = golden_of(name)
    prefix = "stream_" if name == "mtp_qwen4_exp" else ""
    return {key.removeprefix(prefix): value for key, value in found.items()}


@pytest.fixture
def states(target: Model, golden: dict[str, np.ndarray]) -> mx.array:
    """What the target hands to the head, for every token of the prompt."""
    return target_states(target, golden["ids"].tolist())[0].for_head


def whole(head: ChainedHead, tokens: list[int], states: mx.array) -> np.ndarray:
    return np.array(head.forward(one_row(tokens, 0, head.new_caches()), states))


def test_the_head_gives_the_references_states_and_logits(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array
) -> None:
    found = head.forward(one_row(golden["ids"][1:].tolist(), 0, head.new_caches()), states[:-1])
    np.testing.assert_allclose(np.array(found), golden["states"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.array(head.logits(found)), golden["logits"], rtol=0, atol=TOLERANCE)


def test_a_chain_proposes_the_references_tokens_by_its_scores(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array
) -> None:
    ids, caches, pick = golden["ids"].tolist(), head.new_caches(), Picks()
    tokens = head.propose(one_row(ids[1:], 0, caches), states[:-1], mx.array(ids[-1:]), 4, pick)
    assert tokens.dtype == mx.int32
    assert tokens.tolist() == golden["path"].tolist()
    np.testing.assert_allclose(np.stack(pick.scores), golden["scores"], rtol=0, atol=TOLERANCE)
    assert {cache.offset for cache in caches if cache is not None} == {len(ids) - 1}


@pytest.mark.parametrize("sizes", [(1,), (5,), (17, 1, 9, 2)])
def test_chunks_give_the_same_bits_as_the_whole(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array, sizes: tuple[int, ...]
) -> None:
    ids, caches, parts, start, turn = golden["ids"][1:].tolist(), head.new_caches(), [], 0, 0
    while start < len(ids):
        end = start + sizes[turn % len(sizes)]
        parts.append(np.array(head.forward(one_row(ids[start:end], start, caches), states[:-1][start:end])))
        start, turn = end, turn + 1
    np.testing.assert_array_equal(np.concatenate(parts), whole(head, ids, states[:-1]))


def test_rows_that_share_a_forward_keep_their_bits(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array
) -> None:
    ids = golden["ids"][1:].tolist()
    cuts = [slice(0, 5), slice(0, 39), slice(3, 30), slice(7, 8)]
    tokens, parts, spans = [], [], []
    for cut in cuts:
        spans.append(Span(len(tokens), len(ids[cut]), 0, head.new_caches()))
        tokens += ids[cut]
        parts.append(states[:-1][cut])
    found = np.array(head.forward(Batch(mx.array(tokens, mx.int32), spans), mx.concatenate(parts)))
    for cut, span, part in zip(cuts, spans, parts, strict=True):
        np.testing.assert_array_equal(found[span.start : span.start + span.length], whole(head, ids[cut], part))


def test_guesses_leave_nothing_in_the_caches(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array
) -> None:
    ids, caches, plain = golden["ids"].tolist(), head.new_caches(), head.new_caches()
    mx.eval(head.propose(one_row(ids[1:12], 0, caches), states[:11], mx.array(ids[11:12]), 5, Picks()))
    head.commit(one_row(ids[12:14], 11, caches), states[11:13])
    head.commit(one_row(ids[1:14], 0, plain), states[:13])
    for found, expected in zip(cache_bits(caches), cache_bits(plain), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("offset", [1, 7, 18, 38])
def test_rewinding_and_restoring_give_the_same_bits_as_never_having_gone_on(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array, offset: int
) -> None:
    ids, caches = golden["ids"][1:].tolist(), head.new_caches()
    expected = whole(head, ids, states[:-1])[offset:]
    mx.eval(head.forward(one_row(ids, 0, caches), states[:-1]))
    assert all(cache is not None and cache.rewind(offset) for cache in caches)
    stored = [cache.snapshot() for cache in caches if cache is not None]
    found = np.array(head.forward(one_row(ids[offset:], offset, caches), states[:-1][offset:]))
    np.testing.assert_array_equal(found, expected)
    fresh = head.new_caches()
    for cache, snapshot in zip(fresh, stored, strict=True):
        assert cache is not None
        assert snapshot is not None
        assert cache.restore(snapshot)
    found = np.array(head.forward(one_row(ids[offset:], offset, fresh), states[:-1][offset:]))
    np.testing.assert_array_equal(found, expected)


def test_bf16_stays_close_and_stays_bf16(name: str, golden: dict[str, np.ndarray]) -> None:
    target = target_of(name, mx.bfloat16)
    head = head_of(name, target, mx.bfloat16)
    ids, caches = golden["ids"].tolist(), head.new_caches()
    states = target_states(target, ids)[0].for_head
    found = head.forward(one_row(ids[1:], 0, caches), states[:-1])
    assert {found.dtype, head.logits(found).dtype} == {mx.bfloat16}
    assert {array.dtype for cache in caches if cache is not None for array in cache.state()} == {mx.bfloat16}
    error = np.array(head.logits(found).astype(mx.float32)) - golden["logits"]
    assert np.sqrt(np.mean(error**2)) < 0.06 * np.sqrt(np.mean(golden["logits"] ** 2))


def test_a_head_owns_its_tensors_and_none_of_the_targets(name: str, head: ChainedHead, target: Model) -> None:
    own = {id(array) for array in head.parameters()}
    assert not own & {id(array) for array in target.parameters()}
    tensors = [value for key, value in with_head(name).tensors.items() if key.startswith("mtp.")]
    assert sum(array.size for array in head.parameters()) == sum(value.size for value in tensors)  # type: ignore[union-attr]


def test_every_tensor_of_the_head_is_taken(name: str, target: Model) -> None:
    checkpoint = with_head(name)
    load_head(checkpoint.typed(), target, mx.float32)
    assert not [key for key in checkpoint.unused() if key.startswith("mtp.")]


def test_a_checkpoint_without_its_tensors_has_no_head(name: str, target: Model) -> None:
    checkpoint = with_head(name, mtp_num_hidden_layers=1)
    bare = {key: value for key, value in checkpoint.tensors.items() if not key.startswith("mtp.")}
    assert load_head(MemoryCheckpoint(checkpoint.config, bare).typed(), target, mx.float32) is None


def test_an_incomplete_head_names_what_is_missing(name: str, target: Model) -> None:
    checkpoint = with_head(name)
    del checkpoint.tensors["mtp.pre_fc_norm_hidden.weight"]
    with pytest.raises(CheckpointError, match=r"mtp\.pre_fc_norm_hidden\.weight"):
        load_head(checkpoint.typed(), target, mx.float32)


def test_a_head_of_two_layers_is_refused(name: str, target: Model) -> None:
    checkpoint = with_head(name)
    checkpoint.tensors["mtp.layers.1.self_attn.q_proj.weight"] = mx.zeros((2, 2))
    with pytest.raises(CheckpointError, match="one layer"):
        load_head(checkpoint.typed(), target, mx.float32)


def test_several_rows_or_no_tokens_are_refused(
    head: ChainedHead, golden: dict[str, np.ndarray], states: mx.array
) -> None:
    spans = [Span(0, 1, 0, head.new_caches()), Span(1, 1, 0, head.new_caches())]
    with pytest.raises(ValueError, match="one row at a time"):
        head.propose(Batch(mx.array([1, 2]), spans), states[:2], mx.array([2]), 1, Picks())
    with pytest.raises(ValueError, match="0 tokens"):
        head.propose(one_row([1], 0, head.new_caches()), states[:1], mx.array([1]), 0, Picks())


def test_flash_next_hands_over_its_streams_and_not_the_mix() -> None:
    target, golden = target_of("mtp_qwen4_exp"), golden_of("mtp_qwen4_exp")
    hidden = target_states(target, golden["ids"].tolist())[0]
    assert hidden.head_input is not None
    np.testing.assert_allclose(np.array(hidden.for_head), golden["target_streams"], rtol=0, atol=TOLERANCE)
    assert hidden.final.shape[-1] * 4 == hidden.for_head.shape[-1]


def test_flash_next_can_norm_all_streams_together() -> None:
    target, golden, checkpoint = target_of("mtp_qwen4_exp"), golden_of("mtp_qwen4_exp"), with_head("mtp_qwen4_exp")
    head = StreamsHead.load(checkpoint.typed(), "mtp.", target, mx.float32, statistics="all")
    ids = golden["ids"].tolist()
    states = target_states(target, ids)[0].for_head
    found = head.forward(one_row(ids[1:], 0, head.new_caches()), states[:-1])
    np.testing.assert_allclose(np.array(head.logits(found)), golden["all_logits"], rtol=0, atol=TOLERANCE)
    assert np.abs(golden["all_logits"] - golden["stream_logits"]).max() > 0.1


def test_flash_nexts_head_takes_the_base_of_its_own_rotation() -> None:
    target, ids = target_of("mtp_qwen4_exp"), golden_of("mtp_qwen4_exp")["ids"].tolist()
    states = target_states(target, ids)[0].for_head[:-1]
    same = {"hybrid": True, "num_hidden_layers": 1, "layer_types": ["full_attention"], "rope_theta": 10000.0}
    found = []
    for section in (None, same, same | {"rope_theta": 100.0}):
        head = load_head(with_head("mtp_qwen4_exp", mtp=section).typed(), target, mx.float32)
        assert isinstance(head, ChainedHead)
        found.append(whole(head, ids[1:], states))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 0.01
    with pytest.raises(CheckpointError, match="layer_types"):
        load_head(
            with_head("mtp_qwen4_exp", mtp=same | {"layer_types": ["linear_attention"]}).typed(), target, mx.float32
        )


def test_the_experts_of_a_head_may_lie_one_by_one() -> None:
    name = "mtp_qwen3_5_moe"
    target, golden, checkpoint = target_of(name), golden_of(name), with_head(name)
    for part, rows in (("gate_up_proj", 2), ("down_proj", 1)):
        bank = checkpoint.tensors.pop(f"mtp.layers.0.mlp.experts.{part}")
        assert isinstance(bank, mx.array)
        for expert in range(bank.shape[0]):
            for half, matrix in zip(
                ("gate_proj", "up_proj") if rows == 2 else (part,), mx.split(bank[expert], rows), strict=True
            ):
                checkpoint.tensors[f"mtp.layers.0.mlp.experts.{expert}.{half}.weight"] = matrix
    head = load_head(checkpoint.typed(), target, mx.float32)
    assert isinstance(head, ChainedHead)
    ids = golden["ids"].tolist()
    states = target_states(target, ids)[0].for_head
    np.testing.assert_allclose(whole(head, ids[1:], states[:-1]), golden["states"], rtol=0, atol=TOLERANCE)


def test_images_take_the_places_of_tokens_in_the_pairs() -> None:
    name = "mtp_qwen3_5"
    target, golden = target_of(name), golden_of(name)
    head, ids = head_of(name, target), golden["ids"].tolist()
    states = target_states(target, ids)[0].for_head[:8]
    rows = target.embed(mx.array(ids[3:6]))
    batch = one_row([*ids[1:3], 0, 0, 0, *ids[6:9]], 0, head.new_caches())
    batch.features = [Features(2, rows)]
    np.testing.assert_array_equal(np.array(head.forward(batch, states)), whole(head, ids[1:9], states))


def test_flash_nexts_pairs_hold_the_rows_of_placeholders() -> None:
    name = "mtp_qwen4_exp"
    target, golden = target_of(name), golden_of(name)
    head, ids = head_of(name, target), golden["ids"].tolist()[1:9]
    states = target_states(target, golden["ids"].tolist())[0].for_head[:8]
    batch = one_row(ids, 0, head.new_caches())
    batch.features = [Features(2, 5 * target.embed(mx.array(ids[2:5])))]
    np.testing.assert_array_equal(np.array(head.forward(batch, states)), whole(head, ids, states))


@pytest.mark.parametrize("name", ["mtp_qwen3_5", "mtp_qwen4_exp"])
def test_the_pairs_of_a_row_with_images_stand_where_its_layout_says(name: str) -> None:
    target, golden = target_of(name), golden_of(name)
    head, ids = head_of(name, target), golden["ids"].tolist()[1:13]
    states = target_states(target, golden["ids"].tolist())[0].for_head[:12]
    indices = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    image = indices.copy()
    image[:, 3:7] = [[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]]
    image[:, 7:] -= 2
    found = []
    for prompt, shift in ((indices, 0), (image, -2)):
        layout = Layout(prompt, shift)
        whole_row = [Span(0, 12, 0, head.new_caches(), layout)]
        found.append(np.array(head.forward(Batch(mx.array(ids, mx.int32), whole_row), states)))
        caches, parts = head.new_caches(), []
        for low, high in ((0, 5), (5, 6), (6, 12)):
            part = Batch(mx.array(ids[low:high], mx.int32), [Span(0, high - low, low, caches, layout)])
            parts.append(np.array(head.forward(part, states[low:high])))
        np.testing.assert_array_equal(np.concatenate(parts), found[-1])
    np.testing.assert_array_equal(found[0], whole(head, ids, states))
    assert np.abs(found[0][3:] - found[1][3:]).max() > 1e-3

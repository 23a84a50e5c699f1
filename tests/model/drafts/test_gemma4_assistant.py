"""Gemma 4's assistant: the reference's steps over the target's own caches, and what it refuses."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError, UnsupportedArchitecture
from arriero.model.contract import Batch, Model, Span
from arriero.model.drafts import load_draft
from arriero.model.drafts.gemma4_assistant import Assistant
from tests.helpers.drafts import (
    Picks,
    cache_bits,
    draft_checkpoint,
    golden_of,
    one_row,
    target_ids,
    target_of,
    target_states,
)
from tests.helpers.memory_checkpoint import MemoryCheckpoint

pytestmark = pytest.mark.usefixtures("kernels")

NAMES = ["assistant_e2b", "assistant_31b", "assistant_26b_a4b"]
TOLERANCE = 1e-4


def load(checkpoint: MemoryCheckpoint, target: Model, dtype: mx.Dtype = mx.float32) -> Assistant:
    found = load_draft(checkpoint.typed(), target, dtype)
    assert isinstance(found, Assistant)
    return found


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str) -> Model:
    return target_of(name)


@pytest.fixture(scope="module")
def draft(name: str, target: Model) -> Assistant:
    return load(draft_checkpoint(name), target)


def propose(draft: Assistant, target: Model, ids: list[int], count: int, pick: Picks) -> list[int]:
    """Read all but the last token, and propose what follows it."""
    hidden, caches = target_states(target, ids[:-1])
    batch = one_row(ids[-1:], len(ids) - 2, caches)
    found: list[int] = draft.propose(batch, hidden.for_head[-1:], mx.array(ids[-1:]), count, pick).tolist()  # type: ignore[assignment]
    return found


def test_its_steps_give_the_references_tokens_scores_and_states(name: str, draft: Assistant, target: Model) -> None:
    golden, ids, pick = golden_of(name), target_ids(name), Picks()
    assert propose(draft, target, ids, 4, pick) == golden["path"].tolist()
    for scores, tokens, expected in zip(pick.scores, pick.ids, golden["scores"], strict=True):
        named = np.arange(len(expected)) if tokens is None else tokens
        np.testing.assert_allclose(scores, expected[named], rtol=0, atol=TOLERANCE)
    hidden, caches = target_states(target, ids[:-1])
    state = hidden.for_head[-1:]
    for token, expected in zip([ids[-1], *golden["path"]], golden["states"], strict=False):
        _, state = draft.forward(one_row([int(token)], len(ids) - 1, caches), state)
        np.testing.assert_allclose(np.array(state)[0], expected, rtol=0, atol=TOLERANCE)


def test_only_tokens_of_the_best_groups_are_scored_and_the_reference_gives_the_others_less() -> None:
    golden, pick = golden_of("assistant_e2b"), Picks()
    target = target_of("assistant_e2b")
    propose(load(draft_checkpoint("assistant_e2b"), target), target, target_ids("assistant_e2b"), 4, pick)
    for tokens, expected in zip(pick.ids, golden["scores"], strict=True):
        assert tokens is not None
        assert len(set(tokens.tolist())) == len(tokens) == 5 * 128 // 16
        others = np.setdiff1d(np.arange(128), tokens)
        assert expected[others].max() < expected[tokens].min()


def test_proposing_changes_nothing_of_the_targets_caches(draft: Assistant, target: Model, name: str) -> None:
    ids = target_ids(name)
    hidden, caches = target_states(target, ids[:-1])
    before = cache_bits(caches)
    batch = one_row(ids[-1:], len(ids) - 2, caches)
    first = draft.propose(batch, hidden.for_head[-1:], mx.array(ids[-1:]), 3, Picks()).tolist()
    for found, expected in zip(cache_bits(caches), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert draft.propose(batch, hidden.for_head[-1:], mx.array(ids[-1:]), 3, Picks()).tolist() == first
    assert draft.new_caches() == []


def test_rows_that_share_a_step_keep_their_bits(draft: Assistant, target: Model, name: str) -> None:
    ids = target_ids(name)
    prompts = [ids, ids[:3], ids[5:20]]
    rows = [target_states(target, prompt[:-1]) for prompt in prompts]
    spans = [Span(i, 1, len(p) - 1, caches) for i, (p, (_, caches)) in enumerate(zip(prompts, rows, strict=True))]
    last = mx.concatenate([hidden.for_head[-1:] for hidden, _ in rows])
    together = np.array(draft.forward(Batch(mx.array([p[-1] for p in prompts], mx.int32), spans), last)[1])
    for i, (prompt, (hidden, caches)) in enumerate(zip(prompts, rows, strict=True)):
        alone = draft.forward(one_row(prompt[-1:], len(prompt) - 1, caches), hidden.for_head[-1:])[1]
        np.testing.assert_array_equal(together[i], np.array(alone)[0])


@pytest.mark.parametrize("back", [1, 5, 20])
def test_it_proposes_the_same_behind_a_target_that_was_rewound(
    draft: Assistant, target: Model, name: str, back: int
) -> None:
    ids = target_ids(name)
    hidden, caches = target_states(target, ids)
    kept = len(ids) - back
    mx.eval(hidden.final)
    assert all(cache is None or cache.rewind(kept) for cache in caches)
    batch = one_row(ids[kept : kept + 1] or [1], kept - 1, caches)
    anchor, pick, again = mx.array(ids[kept : kept + 1] or [1]), Picks(), Picks()
    found = draft.propose(batch, hidden.for_head[kept - 1 : kept], anchor, 3, pick).tolist()
    assert found == propose(draft, target, [*ids[:kept], int(anchor.item())], 3, again)
    np.testing.assert_array_equal(np.stack(pick.scores), np.stack(again.scores))


def test_bf16_stays_bf16(name: str) -> None:
    target = target_of(name, mx.bfloat16)
    draft = load(draft_checkpoint(name), target, mx.bfloat16)
    hidden, caches = target_states(target, target_ids(name))
    final, state = draft.forward(one_row([5], 40, caches), hidden.for_head[-1:])
    assert {final.dtype, state.dtype, draft.scores(final)[0].dtype} == {mx.bfloat16}


def test_it_owns_its_tensors_and_none_of_the_targets(name: str, draft: Assistant, target: Model) -> None:
    own = {id(array) for array in draft.parameters()}
    assert not own & {id(array) for array in target.parameters()}
    tensors = draft_checkpoint(name).tensors.values()
    assert sum(array.size for array in draft.parameters()) == sum(value.size for value in tensors)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"backbone_hidden_size": 1536}, r"backbone_hidden_size is 1536 .* and 64 in"),
        ({"text_config": {"vocab_size": 262144}}, r"vocab_size is 262144 .* and 128 in"),
        ({"text_config": {"sliding_window": 16}}, r"window of sliding_attention layers is 16 .* and 8 in"),
        ({"text_config": {"head_dim": 24}}, r"head_dim of sliding_attention layers is 24 .* and 16 in"),
        ({"text_config": {"num_key_value_heads": 4}}, r"kv_heads of sliding_attention layers is 4 .* and 2 in"),
        ({"text_config": {"num_kv_shared_layers": 1}}, r"num_kv_shared_layers.*should be 3, found 1"),
        ({"text_config": {"hidden_size_per_layer_input": 8}}, r"hidden_size_per_layer_input.*should be 0, found 8"),
        ({"text_config": {"enable_moe_block": True}}, "enable_moe_block"),
        ({"text_config": {"use_double_wide_mlp": True}}, "use_double_wide_mlp"),
        ({"use_ordered_embeddings": True, "num_centroids": 48}, "num_centroids"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
)
def test_an_assistant_of_another_model_is_refused_with_both_numbers(changes: dict[str, Any], numbers: str) -> None:
    checkpoint, target = draft_checkpoint("assistant_31b"), target_of("assistant_31b")
    text = changes.get("text_config", {})
    changed = checkpoint.copy(**changes | {"text_config": checkpoint.config["text_config"] | text})
    with pytest.raises(CheckpointError, match=numbers):
        load(changed, target)


def test_a_target_of_another_family_is_refused() -> None:
    checkpoint, other = draft_checkpoint("assistant_31b"), target_of("dflash_full")
    with pytest.raises(CheckpointError, match="Gemma 4, but the model is Qwen3ForCausalLM"):
        load(checkpoint, other)


def test_an_ordering_that_misses_a_token_is_refused() -> None:
    checkpoint = draft_checkpoint("assistant_e2b")
    checkpoint.tensors["masked_embedding.token_ordering"] = mx.zeros(128, mx.int32)
    with pytest.raises(CheckpointError, match="each of the 128 tokens once"):
        load(checkpoint, target_of("assistant_e2b"))


def test_a_tensor_that_it_does_not_know_is_refused() -> None:
    checkpoint = draft_checkpoint("assistant_31b")
    checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"] = mx.zeros((2, 2))
    with pytest.raises(CheckpointError, match=r"1 tensors .*k_proj"):
        load(checkpoint, target_of("assistant_31b"))


def test_a_target_at_another_length_is_refused(draft: Assistant, target: Model, name: str) -> None:
    hidden, caches = target_states(target, target_ids(name))
    with pytest.raises(ValueError, match="holds 40 positions"):
        draft.forward(one_row([1], 39, caches), hidden.for_head[-1:])


def test_an_unknown_draft_is_refused_with_the_known_ones() -> None:
    checkpoint = draft_checkpoint("assistant_31b").copy(architectures=["Eagle3LlamaForCausalLM"])
    with pytest.raises(UnsupportedArchitecture, match=r"Eagle3LlamaForCausalLM is not supported.*DFlash2DraftModel"):
        load(checkpoint, target_of("assistant_31b"))

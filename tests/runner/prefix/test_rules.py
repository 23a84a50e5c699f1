"""Rules of the trie that others learned the hard way, each by itself; random histories check them together."""

from __future__ import annotations

import pytest

import arriero.runner.prefix.trie as trie_module
from arriero.runner.prefix.keys import row_keys
from arriero.runner.prefix.store import PrefixStore
from tests.helpers.layer_stores import asked, feed, store_of

BOTH = ["f", "r-f"]


def stored(store: PrefixStore, tokens: list[int], boundaries: list[int] | None = None) -> None:
    reuse, keys = asked(store, [*tokens, 0], boundaries or [])
    store.close(reuse, keys)


def test_growing_adds_a_child_and_leaves_the_edge_alone() -> None:
    """R-48: nothing is ever added to an edge that has snapshots."""
    store = store_of("rf")
    stored(store, list(range(100)))
    (node,) = [node for node in store.trie.nodes() if node.end == 100]
    before, states = (node.start, node.end, node.keys.tolist()), node.snapshots[0]
    stored(store, list(range(150)))
    assert (node.start, node.end, node.keys.tolist()) == before
    assert node.snapshots[0] is states
    assert {each.end for each in node.children.values()} == {147}


def test_captures_are_cut_to_their_edge_and_the_first_one_stays() -> None:
    """R-47."""
    store = store_of("rf")
    stored(store, list(range(100)), [40])
    states = {node.end: node.snapshots[0] for node in store.trie.nodes()}
    assert states[40] is not None
    whole = store.trie.match(row_keys(range(60))).path[0].snapshots[0]
    assert whole is states[40]
    stored(store, [*range(60), *range(200, 240)], [40, 60])
    for node in store.trie.nodes():
        assert (node.snapshots[1].start, node.snapshots[1].end) == (node.start, node.end)
        if node.end <= 60 and node.end in states:
            assert node.snapshots[0] is states[node.end]


def test_a_layer_without_memory_counts_as_stored() -> None:
    """R-44."""
    store = store_of("-r-f")
    stored(store, list(range(50)))
    again = store.begin(row_keys([*range(50), 7, 8]))
    assert again.offset == 50
    assert again.caches[0] is None
    assert again.caches[2] is None


def test_an_offset_that_a_prompt_never_got_to_makes_no_node() -> None:
    """R-56."""
    store = store_of("rf")
    keys = row_keys(range(100))
    reuse = store.begin(keys, [30, 60, 90])
    feed(reuse.caches, 45)
    store.close(reuse, keys)
    assert sorted(node.end for node in store.trie.nodes()) == [30, 45]


def test_more_positions_than_are_known_fail_at_the_end_of_a_row() -> None:
    """R-57: what nobody can name is not stored."""
    store = store_of("rf")
    reuse, keys = asked(store, list(range(50)))
    feed(reuse.caches, 2)
    with pytest.raises(RuntimeError, match="51 positions, but only 50 are known"):
        store.close(reuse, keys)
    assert len(store.trie) == 0


def test_caches_that_do_not_stand_level_fail_at_the_end_of_a_row() -> None:
    """R-57."""
    store = store_of("ff")
    reuse, keys = asked(store, list(range(50)))
    feed(reuse.caches[:1], 1)
    with pytest.raises(RuntimeError, match="different offsets"):
        store.close(reuse, keys)
    assert len(store.trie) == 0


def test_an_edge_that_is_known_in_part_is_used_to_the_very_token() -> None:
    """R-52: where all positions are kept."""
    store = store_of("ff")
    stored(store, list(range(100)))
    for same in (1, 50, 99):
        assert store.begin(row_keys([*range(same), 500, 501])).offset == same


def test_states_are_kept_at_the_ends_of_the_last_messages() -> None:
    store = store_of("rf")
    stored(store, list(range(100)), [10, 20, 30, 40, 50])
    reached = {at: store.begin(row_keys([*range(at), *[500] * 9])).offset for at in (15, 25, 35, 45, 55, 96)}
    assert reached == {15: 0, 25: 0, 35: 30, 45: 40, 55: 50, 96: 50}


def test_states_are_kept_every_8192_positions() -> None:
    store = store_of("rf")
    stored(store, list(range(20_000)))
    reached = {at: store.begin(row_keys([*range(at), 3, 3])).offset for at in (8_000, 9_000, 17_000)}
    assert reached == {8_000: 0, 9_000: 8_192, 17_000: 16_384}


def test_states_are_kept_where_two_prompts_part_and_near_the_end_of_each() -> None:
    """The first that leaves what is stored reads it again, those behind it don't."""
    store = store_of("rf")
    reached = []
    for tail in (500, 600, 700):
        keys = [*range(70), *[tail] * 30]
        reached.append(store.begin(row_keys([*keys, 0])).offset)
        stored(store, keys)
        assert store.begin(row_keys([*keys[:-2], 1, 2])).offset == 97
    assert reached == [0, 0, 70]


def test_only_the_node_that_is_used_counts_as_used() -> None:
    """R-53: what lies on the way to it may go before it does."""
    store = store_of("rf")
    stored(store, list(range(100)), [40])
    ages = {node.end: node.last_used for node in store.trie.nodes()}
    stored(store, list(range(500, 520)))
    store.begin(row_keys([*range(100), 7]))
    now = {node.end: node.last_used for node in store.trie.nodes() if node.keys[0] < 500}
    assert now[100] > max(ages.values())
    assert now[40] == ages[40]


@pytest.mark.parametrize("layers", BOTH)
def test_what_a_running_row_uses_may_be_forgotten_and_it_never_notices(layers: str) -> None:
    """R-55: the budget holds while rows run, whose caches are theirs."""
    store = store_of(layers)
    stored(store, list(range(100)))
    reuse, keys = asked(store, [*range(100), *range(300, 350)])
    store.shrink(0)
    assert store.nbytes == 0
    store.shrink(1 << 40)
    store.close(reuse, keys)
    assert store.begin(row_keys([*keys.tolist(), 7])).offset == 149


@pytest.mark.parametrize("layers", BOTH)
def test_owned_bytes_stay_under_the_budget_and_branches_outlive_their_ends(layers: str) -> None:
    """R-55: the oldest end goes first, and a node with children only after them."""
    store = store_of(layers, budget=60_000)
    shared = list(range(256))
    for branch in range(30):
        stored(store, [*shared, *([1000 + branch] * 300)], [256])
        assert store.nbytes <= 60_000
        nodes = list(store.trie.nodes())
        assert all(node.parent is store.trie.root or node.parent in nodes for node in nodes)
    assert store.known(row_keys(shared)) == 256


@pytest.mark.parametrize("layers", BOTH)
def test_conversations_cancels_and_other_tails_never_start_anew(layers: str) -> None:
    """R-50: no row whose beginning is stored falls back to nothing."""
    store = store_of(layers)
    prompt = list(range(100))
    for turn in range(5):
        reuse, keys = asked(store, prompt, [50, len(prompt) - 10])
        assert turn == 0 or reuse.offset == len(prompt) - 31
        store.close(reuse, keys)
        prompt += range(200 + 30 * turn, 230 + 30 * turn)
    cut = store.begin(row_keys([*prompt, *range(900, 1100)]), [len(prompt)])
    feed(cut.caches, 100)
    store.close(cut, row_keys([*prompt, *range(900, 1100)]))
    assert store.begin(row_keys([*prompt, *range(900, 1100)])).offset == cut.offset + 100
    other = store.begin(row_keys([*prompt[:60], *range(700, 720)]))
    assert other.offset == (60 if layers == "f" else 50)


def test_what_shares_a_buffer_counts_once_and_what_left_it_counts_from_then_on() -> None:
    """R-54."""
    store = store_of("f")
    stored(store, list(range(600)))
    buffer = 768 * 2 * 4 * 4
    assert store.nbytes == buffer
    reuse = store.begin(row_keys([*range(500), 7, 8]))
    assert store.nbytes == 100 * 2 * 4 * 4, "the buffer is the row's now, and what it will overwrite has moved out"
    store.close(reuse, row_keys(range(500)))
    assert store.nbytes == buffer + 100 * 2 * 4 * 4
    store.clear()
    assert store.nbytes == 0
    assert len(store.trie) == 0


def test_a_rest_whose_end_is_forgotten_goes_on_serving_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_module, "MOST_NODES", 1)
    store = store_of("rf")
    stored(store, list(range(100)), [40])
    assert store.begin(row_keys([*range(100), 7])).offset == 40


def test_states_of_a_running_row_count_and_the_newest_stay() -> None:
    """R-55: what is shared while a row goes on is under the budget at once, not only when the row ends."""
    state = (2 * 4 + 2 * 2) * 4
    store = store_of("rf", budget=3 * state)
    stored(store, [*range(500, 520)])
    reuse, keys = asked(store, list(range(100)), [20, 40, 60])
    store.share(reuse, keys)
    assert store.nbytes <= 3 * state
    assert store.begin(row_keys([*range(97), 7, 8])).offset == 96
    store.close(reuse, keys)
    assert store.nbytes <= 3 * state

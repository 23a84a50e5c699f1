"""The context that a row gets."""

from __future__ import annotations

import msgspec
import pytest

from arriero.runner.messages import Ready
from arriero.scheduler.context import choose_context, row_bytes


def ready(context: int = 131072, per_token: int = 100, fixed: int = 0) -> Ready:
    return Ready(
        architecture="x",
        context_length=context,
        vocab_size=10,
        weight_bytes=0,
        cache_bytes_per_token=per_token,
        cache_bytes_fixed=fixed,
        device="cpu",
        dtype="float32",
        load_seconds=0,
    )


def test_rows_are_counted_in_growth_steps_and_with_their_fixed_states():
    assert row_bytes(1, ready(fixed=7)) == 256 * 100 + 7
    assert row_bytes(256, ready()) == 256 * 100
    assert row_bytes(257, ready()) == 512 * 100


def test_a_context_that_is_asked_for_is_cut_to_the_models_limit_only():
    assert choose_context(1000, ready(), free=0) == 1000
    assert choose_context(200_000, ready(), free=0) == 131072


@pytest.mark.parametrize(
    ("free", "chosen"),
    [(10**12, 131072), (4 * 131072 * 100, 131072), (4 * 131072 * 100 - 1, 65536), (4 * 8192 * 100, 8192), (0, 4096)],
)
def test_the_automatic_context_takes_a_quarter_of_the_free_memory_at_most(free, chosen):
    assert choose_context(0, ready(), free) == chosen


def test_a_model_with_a_short_context_has_it_whole():
    assert choose_context(0, ready(context=2048), free=0) == 2048


def test_a_very_long_context_is_not_taken_unasked():
    assert choose_context(0, ready(context=1 << 20, per_token=1), free=10**15) == 262144


def test_rows_are_counted_with_what_their_caches_grow_by_before_they_are_full():
    gpu = msgspec.structs.replace(ready(), cache_step=1024, cache_ahead=256)
    assert row_bytes(768, gpu) == 1024 * 100
    assert row_bytes(769, gpu) == 2048 * 100

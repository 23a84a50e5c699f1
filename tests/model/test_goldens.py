"""Every architecture and variant against the logits of the reference implementation, and against itself."""

from __future__ import annotations

import functools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.runner.caches import NGramCache, RecurrentCache
from arriero.source import FolderSource
from tests.helpers.forward import Rows, chunked, packed, whole
from tests.helpers.rewinds import rewinds_continue, snapshots_continue

pytestmark = pytest.mark.usefixtures("kernels")

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
TOLERANCE = 2e-4

# Root mean square error of bf16 logits, in units of the reference logits' root mean square. Eight bits of mantissa give
# 0.4 % a rounding; three layers of a random network carry it to a few per cent. Expert choices may flip near ties.
BF16_ERROR = 0.05


def open_golden(name: str) -> Checkpoint:
    return Checkpoint.open(FolderSource(str(GOLDENS / name)))


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def loaded(name: str, kernels: str) -> Model:
    """Once for each kind of kernels: a packed matrix is repacked for those that it is loaded with."""
    del kernels
    return load_model(open_golden(name), mx.float32)


@pytest.fixture
def model(name: str, kernels: str) -> Model:
    return loaded(name, kernels)


@pytest.fixture(scope="module")
def golden(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        return file["ids"].tolist(), file["logits"]


def test_whole_prompt_gives_the_reference_logits(model: Model, golden: tuple[list[int], np.ndarray]) -> None:
    ids, logits = golden
    np.testing.assert_allclose(whole(model, ids), logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (17, 1, 9, 2)])
def test_chunks_give_the_same_bits_as_the_whole(
    model: Model, golden: tuple[list[int], np.ndarray], sizes: tuple[int, ...]
) -> None:
    ids, _ = golden
    np.testing.assert_array_equal(chunked(model, ids, sizes), whole(model, ids))


def test_rows_that_share_a_forward_keep_their_bits(model: Model, golden: tuple[list[int], np.ndarray]) -> None:
    ids, _ = golden
    prompts = [ids[:5], ids, ids[3:30], ids[7:8], ids[::-1]]
    for prompt, logits in zip(prompts, packed(model, prompts), strict=True):
        np.testing.assert_array_equal(logits, whole(model, prompt))


def test_a_chunk_of_one_row_beside_a_step_of_another_keeps_their_bits(
    model: Model, golden: tuple[list[int], np.ndarray]
) -> None:
    ids, _ = golden
    rows = Rows(model, 2)
    first = rows.logits([ids[:9], []])
    second = rows.logits([ids[9:10], ids[10:30]])
    third = rows.logits([ids[10:], ids[30:31]])
    one = np.concatenate([first, second[:1], third[:-1]])
    np.testing.assert_array_equal(one, whole(model, ids))
    np.testing.assert_array_equal(np.concatenate([second[1:], third[-1:]]), whole(model, ids[10:31]))


def test_a_snapshot_at_every_offset_continues_with_the_same_bits(
    model: Model, golden: tuple[list[int], np.ndarray]
) -> None:
    """Behind the windows of all goldens, which are of eight positions at most."""
    snapshots_continue(model, golden[0][:20])


def test_a_rewind_to_every_offset_continues_with_the_same_bits(
    model: Model, golden: tuple[list[int], np.ndarray]
) -> None:
    rewinds_continue(model, golden[0][:13])


def test_bf16_stays_close_and_stays_bf16(name: str, golden: tuple[list[int], np.ndarray]) -> None:
    ids, logits = golden
    model = load_model(open_golden(name), mx.bfloat16)
    rows = Rows(model)
    hidden = model.forward(rows.batch([ids], taps=[0]))
    assert hidden.final.dtype == mx.bfloat16
    assert hidden.taps is not None
    assert hidden.taps.dtype == mx.bfloat16
    for cache in filter(None, rows.caches[0]):
        # A recurrent state stays float32: in 16 bits it drifts with the length of the text.
        wanted = {mx.bfloat16, mx.float32} if isinstance(cache, RecurrentCache) else {mx.bfloat16}
        if isinstance(cache, NGramCache):
            wanted = {mx.bfloat16, mx.int32}
        assert {array.dtype for array in cache.state()} == wanted
    found = model.logits(hidden.final)
    assert found.dtype == mx.bfloat16
    assert model.embed(mx.array(ids)).dtype == mx.bfloat16
    assert model.raw_logits(hidden.final).dtype == mx.bfloat16
    error = np.array(found.astype(mx.float32)) - logits
    assert np.sqrt(np.mean(error**2)) < BF16_ERROR * np.sqrt(np.mean(logits**2))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_on_the_cpu_chunks_keep_their_bits_in_sixteen_bits_too(
    name: str, golden: tuple[list[int], np.ndarray], dtype: mx.Dtype
) -> None:
    model, (ids, _) = load_model(open_golden(name), dtype), golden
    expected = whole(model, ids)
    np.testing.assert_array_equal(chunked(model, ids, (1, 7, 3)), expected)
    np.testing.assert_array_equal(packed(model, [ids[:5], ids])[1], expected)


def test_goldens_are_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (GOLDENS / name).iterdir()) < 300_000

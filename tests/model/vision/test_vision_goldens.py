"""Every tower and the model around it against the reference implementation, and against itself."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model, vision_of
from arriero.source import FolderSource
from tests.helpers.pictures import AFTER, GOLDENS, PROMPTS, Golden, SeeingRows, seen

pytestmark = pytest.mark.usefixtures("kernels")

NAMES = sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
TOLERANCE = 2e-4


@pytest.fixture(params=NAMES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(name: str, dtype: mx.Dtype = mx.float32) -> Model:
    return load_model(Checkpoint.open(FolderSource(str(GOLDENS / name))), dtype)


@pytest.fixture(scope="module")
def model(name: str) -> Model:
    return load(name)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_with_images_gives_the_reference_logits(model: Model, name: str, prompt: str) -> None:
    golden = Golden.load(name, prompt)
    np.testing.assert_allclose(seen(model, golden), golden.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_behind_the_prompt_stand_where_the_reference_puts_them(model: Model, name: str, prompt: str) -> None:
    golden = Golden.load(name, prompt)
    sizes = [len(golden.ids), 1]
    found = seen(model, golden, sizes, AFTER)[-len(AFTER) :]
    np.testing.assert_allclose(found, golden.after, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sizes", [(1,), (3,), (10, 1, 4)])
def test_chunks_give_the_bits_of_the_whole_and_cut_images_where_they_may(
    model: Model, name: str, prompt: str, sizes: tuple[int, ...]
) -> None:
    golden = Golden.load(name, prompt)
    np.testing.assert_array_equal(seen(model, golden, sizes, AFTER), seen(model, golden, (), AFTER))


def test_rows_with_and_without_images_keep_their_bits_beside_each_other(model: Model, name: str) -> None:
    two, first = Golden.load(name, "two"), Golden.load(name, "first")
    text = [7, 99, 3, 14, 15, 92, 65]
    rows = SeeingRows(model, [(text, []), (two.ids, two.images), (text[:3], []), (first.ids, first.images)])
    counts = [len(ids) for ids, _ in rows.prompts]
    together = np.split(rows.logits(counts), np.cumsum(counts)[:-1])
    for row, found in zip(rows.prompts, together, strict=True):
        np.testing.assert_array_equal(found, SeeingRows(model, [row]).logits([len(row[0])]))


def test_the_tower_runs_in_the_activations_type(name: str) -> None:
    model = load(name, mx.bfloat16)
    vision = vision_of(model)
    assert vision is not None
    golden = Golden.load(name, "between")
    features = vision.encode(golden.images[0].patches)
    assert features.dtype == mx.bfloat16
    exact = vision_of(load(name))
    assert exact is not None
    expected = np.array(exact.encode(golden.images[0].patches))
    error = np.array(features.astype(mx.float32)) - expected
    assert np.sqrt(np.mean(error**2)) < 0.05 * np.sqrt(np.mean(expected**2))


def test_goldens_are_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (GOLDENS / name).iterdir()) < 500_000


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_on_the_cpu_chunks_keep_their_bits_in_sixteen_bits_too(name: str, dtype: mx.Dtype) -> None:
    model = load(name, dtype)
    golden = Golden.load(name, "two")
    expected = seen(model, golden, (), AFTER)
    for sizes in ((3,), (10, 1, 4)):
        np.testing.assert_array_equal(seen(model, golden, sizes, AFTER), expected)

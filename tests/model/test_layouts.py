"""Published layouts of Flash Next and its relatives: the logits of the reference implementation, whole and in chunks."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from tests.helpers.forward import chunked, packed, whole
from tests.helpers.layouts import LAYOUTS, REFERENCE, Layout, reference

pytestmark = pytest.mark.usefixtures("kernels")
TOLERANCE = 2e-4


def opened(layout: Layout, folder: Path) -> Checkpoint:
    return Checkpoint.open(FolderSource(str(layout.write(folder))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_gives_the_logits_of_the_reference(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]()
    ids, logits = reference(name, layout)
    model = load_model(opened(layout, tmp_path), mx.float32)
    found = whole(model, ids)
    np.testing.assert_allclose(found, logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(chunked(model, ids, (17, 1, 9, 2)), found)
    np.testing.assert_array_equal(packed(model, [ids[3:9], ids])[1], found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_a_published_layout_is_taken_or_known(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]()
    checkpoint = opened(layout, tmp_path)
    load_model(checkpoint, mx.float32)
    assert [left for left in checkpoint.unused() if not left.startswith("mtp.")] == []


def test_what_packed_layouts_mean_is_not_the_golden_model() -> None:
    """Else a loader that ignored a scale, or the whole layout, could pass."""
    with np.load(REFERENCE) as file:
        logits = {name: file[name] for name in file.files}
    assert sorted(logits) == sorted(name for name in LAYOUTS if LAYOUTS[name]().meant is not None)
    for name, found in logits.items():
        layout = LAYOUTS[name]()
        golden = np.load(Path(REFERENCE).parent / layout.golden / "golden.npz")["logits"]
        assert np.abs(found - golden).max() > 100 * TOLERANCE


def test_references_are_small() -> None:
    assert Path(REFERENCE).stat().st_size < 200_000

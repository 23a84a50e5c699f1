"""Published layouts of Flash Next and its relatives: the reference implementation's logits, whole and in chunks."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.model.architectures import load_model, loaded_bytes
from arriero.model.checkpoint import Checkpoint
from arriero.server.models import weight_bytes
from arriero.source import FolderSource
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import upload
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_stored_model_gives_the_bits_of_its_folder_and_its_size_is_known(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]()
    folder = layout.write(tmp_path / "folder")
    (folder / "tokenizer.json").write_text(Tokenizer(BPE({chr(33 + i): i for i in range(90)}, [])).to_str())
    store = Store(tmp_path / "store")
    stored = create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None)
    ids, _ = reference(name, layout)
    theirs, ours = (
        load_model(Checkpoint.open(source), mx.bfloat16) for source in (FolderSource(str(folder)), stored.source())
    )
    np.testing.assert_array_equal(whole(ours, ids), whole(theirs, ids))
    told = weight_bytes(stored)
    # Layers are padded, some norms become float32: small things, of which a tiny model is made.
    assert 0.5 * told < sum(array.nbytes for array in ours.parameters()) < 1.5 * told


def test_what_packed_layouts_mean_is_not_the_golden_model() -> None:
    """Else a loader that ignored a scale, or the whole layout, could pass."""
    with np.load(REFERENCE) as file:
        logits = {name: file[name] for name in file.files}
    assert sorted(logits) == sorted(name for name in LAYOUTS if LAYOUTS[name]().meant is not None)
    for name, found in logits.items():
        layout = LAYOUTS[name]()
        with np.load(Path(REFERENCE).parent / layout.golden / "golden.npz") as file:
            golden = file["logits"]
        assert np.abs(found - golden).max() > 100 * TOLERANCE


def test_references_are_small() -> None:
    assert Path(REFERENCE).stat().st_size < 200_000


def test_decoded_matrices_and_tables_in_files_are_counted_as_they_will_be() -> None:
    sizes = {"a.weight": 1000, "b.weight": 500, "b.weight_scale": 63, "c.weight": 16384, "c.weight_scale": 80}
    assert loaded_bytes(sizes) == 1000 + 563 + 2 * 16384 + 80
    assert loaded_bytes({"a.weight": 1000, "a.weight_scale_inv": 900}) == 2900
    assert loaded_bytes({"x.ngram_embedding.shard_3.weight": 10**9, "y": 7}) == 7

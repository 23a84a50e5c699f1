"""What `verify` finds: every kind of damage, in the words of the model that has it."""

import threading

import numpy as np
import pytest
from safetensors.numpy import save

from arriero.errors import Cancelled, NotFound
from arriero.store.store import Store
from arriero.store.verify import verify
from tests.helpers.stored import manifest_path, put_model

TENSOR = save({"a.weight": np.zeros((2, 2), np.float32)})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "models")


def put(store, name="m", tensor=TENSOR, config=b'{"model_type": "llama"}'):
    named = {"a.weight": ("tensor", tensor), "config.json": ("json", config)}
    return put_model(store, name, {"system": b"Be brief."}, named=named, config={"model_format": "safetensors"})


def check(store, name="", **options):
    statuses = []
    found = verify(store, name, statuses.append, threading.Event(), **options)
    assert [status["problem"] for status in statuses if "problem" in status] == found
    return found, statuses


def test_a_sound_store_has_no_problems(store):
    put(store)
    found, statuses = check(store)
    assert found == []
    assert statuses[-1] == {"status": "success"}
    assert statuses[-2]["completed"] == statuses[-2]["total"]


def test_a_changed_byte_is_found_named_and_repaired(store):
    layer = put(store).manifest.of("application/vnd.ollama.image.tensor")[0]
    path = store.blobs.path(layer.digest)
    path.write_bytes(TENSOR[:-1] + b"\x01")
    found, statuses = check(store, "m")
    assert len(found) == 1
    assert f"model 'm:latest': the bytes of blob {layer.digest} (a.weight) are not those of its name" in found[0]
    assert statuses[-1] == {"status": "1 problem"}
    assert path.exists()
    check(store, "m", repair=True)
    assert not path.exists()
    assert "is incomplete" in check(store)[0][0]


def test_a_missing_blob_and_a_cut_one_are_found(store):
    model = put(store)
    tensor, config = model.manifest.layers[1:]
    store.blobs.remove(config.digest)
    store.blobs.path(tensor.digest).write_bytes(b"short")
    found, _ = check(store, "m")
    assert [("is damaged" in problem, "is incomplete" in problem) for problem in found] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("tensor", [b"no safetensors", TENSOR[:-4], save({"other": np.zeros(2, np.float32)})])
def test_a_blob_that_is_no_such_tensor_is_found(store, tensor):
    put(store, tensor=tensor)
    found, _ = check(store, "m")
    assert len(found) == 1
    assert found[0].startswith("model 'm:latest': ")


def test_a_document_that_is_no_json_is_found(store):
    put(store, config=b"{")
    assert "(config.json) is not valid JSON" in check(store, "m")[0][0]


def test_a_gguf_blob_that_is_none_is_found(store):
    put_model(store, "g", {"model": b"not GGUF at all"})
    assert len(check(store, "g")[0]) == 1


def test_a_manifest_that_cannot_be_read_is_found(store):
    put(store)
    manifest_path(store.root, "m").write_bytes(b"{}")
    assert "model 'm:latest' is damaged: corrupt manifest" in check(store)[0][0]


def test_a_blob_that_no_model_uses_is_checked_too(store):
    put(store)
    digest = store.blobs.put(b"unused").digest
    assert check(store)[0] == []
    store.blobs.path(digest).write_bytes(b"UNUSED")
    assert "no model uses it" in check(store, repair=True)[0][0]
    assert not store.blobs.has(digest)


def test_a_blob_of_a_store_that_is_only_read_is_never_deleted(store, tmp_path):
    model = put(store)
    path = store.blobs.path(model.manifest.layers[0].digest)
    path.write_bytes(b"Be bribed")
    found, _ = check(Store(tmp_path / "ours", [store.root]), "m", repair=True)
    assert "stays: the store at" in found[1]
    assert path.exists()


def test_a_model_that_is_not_there_is_not_found(store):
    with pytest.raises(NotFound):
        check(store, "none")


def test_a_check_can_be_given_up(store):
    put(store)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        verify(store, "", lambda _: None, stop)

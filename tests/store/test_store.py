"""The store: listing, lookup, copying, deleting, pruning, two roots."""

import hashlib
import logging
import os
import time

import pytest

from arriero.errors import NotFound, StoreError, UnsupportedFeature
from arriero.source import GGUFSource, LayersSource
from arriero.store.store import Store
from tests.helpers.stored import manifest_path, put_model


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "own")


def test_models_are_listed_newest_first(store):
    for at, name in enumerate(("old", "new", "middle")):
        put_model(store, name)
        stamp = 1_700_000_000 + (0, 20, 10)[at]
        os.utime(manifest_path(store.root, name), (stamp, stamp))
    assert [str(model.name) for model in store.list()] == ["new:latest", "middle:latest", "old:latest"]
    assert store.list()[0].modified_at.tzinfo is not None


def test_a_name_is_found_whatever_its_case_and_shown_as_stored(store):
    put_model(store, "Qwen3:8B")
    assert str(store.get("qwen3:8b").name) == "Qwen3:8B"
    put_model(store, "QWEN3:8b", {"model": b"other"})
    assert [str(model.name) for model in store.list()] == ["Qwen3:8B"]
    put_model(store, "qwen3:4b")
    assert {str(model.name) for model in store.list()} == {"Qwen3:8B", "Qwen3:4b"}


def test_an_unknown_model_is_named_as_it_was_asked_for(store):
    with pytest.raises(NotFound, match=r"^model 'nope:x' not found$"):
        store.get("nope:x")
    with pytest.raises(NotFound, match=r"^model 'nope' not found$"):
        store.delete("nope")


def test_delete_removes_what_only_this_model_used(store):
    put_model(store, "a", {"model": b"shared", "system": b"only a"})
    put_model(store, "b", {"model": b"shared"})
    store.delete("A")
    assert store.get("b").source() == GGUFSource(paths=(str(store.get("b").path(store.get("b").manifest.layers[0])),))
    contents = {store.blobs.path(entry.name).read_bytes() for entry in store.blobs.files()}
    assert b"shared" in contents
    assert b"only a" not in contents
    assert not manifest_path(store.root, "a").parent.exists()


def test_replacing_a_model_deletes_what_only_the_old_one_used(store):
    put_model(store, "a", {"model": b"first"})
    put_model(store, "a", {"model": b"second"})
    contents = {store.blobs.path(entry.name).read_bytes() for entry in store.blobs.files()}
    assert b"first" not in contents
    assert store.verify() == []


def test_nothing_is_collected_when_pruning_is_off(tmp_path):
    store = Store(tmp_path, collect=False)
    put_model(store, "a", {"model": b"first"})
    put_model(store, "a", {"model": b"second"})
    contents = {store.blobs.path(entry.name).read_bytes() for entry in store.blobs.files()}
    assert b"first" in contents


def test_a_failed_build_leaves_no_blob(store):
    put_model(store, "a")
    before = {entry.name for entry in store.blobs.files()}

    def fail_halfway():
        with store.building() as build:
            build.add(b"new")
            build.stream(lambda writer: writer.write(b"newer"))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_halfway()
    assert {entry.name for entry in store.blobs.files()} == before


def test_delete_does_not_take_blobs_from_under_a_build(store):
    put_model(store, "a", {"model": b"weights"})
    with store.building() as build:
        reused = build.add(b"weights")
        assert not reused.created
        store.delete("a")
        assert store.blobs.has(reused.digest)


def test_copy_keeps_the_manifest_byte_for_byte(store):
    model = put_model(store, "a")
    store.copy("a", "me/b:v1")
    assert store.get("me/b:v1").digest == model.digest
    store.copy("a", "A")
    assert len(store.list()) == 2
    with pytest.raises(NotFound, match=r'^model "zzz" not found$'):
        store.copy("zzz", "b")


def test_a_corrupt_manifest_is_skipped_in_lists_and_explained_on_access(store, caplog):
    put_model(store, "good")
    put_model(store, "bad")
    manifest_path(store.root, "bad").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert [model.name.model for model in store.list()] == ["good"]
    assert "model 'bad:latest' is skipped: corrupt manifest: it is empty" in caplog.text
    with pytest.raises(StoreError, match=r"^model 'bad:latest' is damaged: corrupt manifest: .* or remove it$"):
        store.get("bad")
    assert store.delete("bad") == hashlib.sha256(b"").hexdigest()
    assert store.verify() == []


@pytest.mark.parametrize("damage", ["nesting", "folder"])
def test_whatever_is_wrong_with_one_model_the_others_are_listed_and_it_can_be_deleted(store, damage):
    put_model(store, "good")
    bad = put_model(store, "bad")
    path = manifest_path(store.root, "bad")
    if damage == "nesting":
        path.write_bytes(path.read_bytes().rstrip(b"}\n") + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    else:
        blob = store.blobs.path(bad.manifest.config.digest)
        put_model(store, "good", config={"file_type": "F16"})
        blob.unlink(missing_ok=True)
        blob.mkdir()
    fresh = Store(store.root)
    assert [model.name.model for model in fresh.list()] == ["good"]
    with pytest.raises(StoreError, match="damaged"):
        fresh.get("bad")
    assert fresh.verify()
    fresh.prune()
    fresh.delete("bad")
    assert [model.name.model for model in fresh.list()] == ["good"]


def test_a_name_that_the_file_system_cannot_hold_is_an_error_of_the_store(store):
    with pytest.raises(StoreError, match="cannot name model"):
        put_model(store, "h" * 300 + "/b/c:d")


def test_a_missing_blob_is_an_error_that_says_what_to_do(store):
    model = put_model(store, "a", {"model": b"weights"})
    layer = model.manifest.layers[0]
    store.blobs.remove(layer.digest)
    with pytest.raises(StoreError, match=f"model 'a:latest' is incomplete: blob {layer.digest} .* pull or create"):
        store.get("a").source()
    store.blobs.path(layer.digest).write_bytes(b"short")
    with pytest.raises(StoreError, match="has 5 bytes and should have 7"):
        store.get("a").source()
    assert len(store.verify()) == 2


def test_prune_spares_the_young_and_partial_downloads(store):
    put_model(store, "a")
    kept = {entry.name for entry in store.blobs.files()}
    old, older = time.time() - 7200, time.time() - 8 * 86400
    for name, stamp in {
        "sha256-" + "0" * 64: old,
        "tmp-1-x": old,
        "sha256-" + "1" * 64: time.time(),
        "tmp-1-y": time.time(),
        "sha256-" + "2" * 64 + "-partial": old,
        "sha256-" + "2" * 64 + "-partial-0": old,
        "sha256-" + "3" * 64 + ".tmp": older,
    }.items():
        path = store.blobs.folder / name
        path.write_bytes(b"?")
        os.utime(path, (stamp, stamp))
    (store.root / "manifests" / "hf.co" / "empty").mkdir(parents=True)
    assert store.prune() == 3
    left = {entry.name for entry in store.blobs.files()} - kept
    assert left == {
        "sha256-" + "1" * 64,
        "tmp-1-y",
        "sha256-" + "2" * 64 + "-partial",
        "sha256-" + "2" * 64 + "-partial-0",
    }
    assert not (store.root / "manifests" / "hf.co").exists()
    assert store.get("a")


def test_prune_deletes_nothing_while_a_manifest_is_corrupt_or_somebody_builds(store):
    put_model(store, "bad")
    path = store.blobs.folder / ("sha256-" + "0" * 64)
    path.write_bytes(b"?")
    os.utime(path, (1, 1))
    with store.building():
        assert store.prune() == 0
    raw = manifest_path(store.root, "bad").read_bytes()
    manifest_path(store.root, "bad").write_bytes(b"{")
    assert store.prune() == 0
    manifest_path(store.root, "bad").write_bytes(raw)
    assert store.prune() == 1


def test_another_store_is_read_in_place_after_our_own(tmp_path):
    theirs = Store(tmp_path / "theirs")
    put_model(theirs, "x", {"model": b"their x"})
    put_model(theirs, "y", {"model": b"their y"})
    store = Store(tmp_path / "own", [tmp_path / "theirs"])
    put_model(store, "X", {"model": b"our x"})
    assert {(str(m.name), m.read_only) for m in store.list()} == {("X:latest", False), ("y:latest", True)}
    assert store.get("x").read(store.get("x").manifest.layers[0]) == b"our x"
    source = store.get("y").source()
    assert isinstance(source, GGUFSource)
    assert source.paths[0].startswith(str(tmp_path / "theirs"))
    with pytest.raises(UnsupportedFeature, match="which is only read"):
        store.delete("y")
    assert theirs.verify() == []


def test_a_copy_of_another_stores_model_survives_that_store(tmp_path):
    theirs = Store(tmp_path / "theirs")
    put_model(theirs, "y", {"model": b"their y"})
    store = Store(tmp_path / "own", [tmp_path / "theirs"])
    store.copy("y", "mine")
    theirs.delete("y")
    assert store.verify() == []
    assert store.get("mine").read(store.get("mine").manifest.layers[0]) == b"their y"


def test_a_blob_that_is_a_symbolic_link_is_copied_as_what_it_points_to(tmp_path):
    theirs = Store(tmp_path / "theirs")
    layer = put_model(theirs, "y", {"model": b"their y"}).manifest.layers[0]
    blob = theirs.blobs.path(layer.digest)
    blob.rename(theirs.root / "weights.gguf")
    blob.symlink_to("../weights.gguf")
    store = Store(tmp_path / "own", [tmp_path / "theirs"])
    store.copy("y", "mine")
    assert store.get("mine").read(layer) == b"their y"
    assert not store.blobs.path(layer.digest).is_symlink()


def test_the_same_folder_given_twice_is_our_own(tmp_path):
    store = Store(tmp_path, [tmp_path])
    put_model(store, "a")
    store.delete("a")
    assert store.list() == []


def test_foreign_files_among_the_manifests_are_not_models(store):
    put_model(store, "a")
    manifest_path(store.root, "a", ".DS_Store").write_bytes(b"junk")
    (store.root / "manifests" / "stray").write_bytes(b"junk")
    assert [str(model.name) for model in store.list()] == ["a:latest"]


def test_a_change_on_disk_is_seen(store):
    put_model(store, "a", {"model": b"1"})
    assert store.get("a").size
    other = Store(store.root)
    put_model(other, "a", {"model": b"22222"})
    assert store.get("a").digest == other.get("a").digest


def test_a_tensor_model_gives_its_layers_by_name(store):
    put_model(
        store,
        "mlx",
        {
            "params": b'{"temperature":1,"stop":["<e>"]}',
            "messages": b'[{"role":"user","content":"hi"}]',
            "license": b"L",
        },
        named={
            "model.norm.weight": ("tensor", b"t"),
            "config.json": ("json", b'{"model_type":"llama"}'),
            "chat_template.jinja": ("text", b"{{ x }}"),
        },
        config={"model_format": "safetensors", "model_family": "", "model_families": None},
    )
    model = store.get("mlx")
    source = model.source()
    assert isinstance(source, LayersSource)
    assert list(source.tensors) == ["model.norm.weight"]
    assert set(source.files) == {"config.json", "chat_template.jinja"}
    assert model.params == {"temperature": 1, "stop": ["<e>"]}
    assert model.messages == [{"role": "user", "content": "hi"}]
    assert model.licenses == ["L"]
    assert model.chat_template == "{{ x }}"
    assert (model.details.family, model.details.format) == ("llama", "safetensors")


def test_an_adapter_and_a_remote_stub_are_refused_loudly(store):
    put_model(store, "lora", {"model": b"m", "adapter": b"a"})
    put_model(store, "cloud", {}, config={"remote_host": "https://example.com", "remote_model": "big"})
    with pytest.raises(UnsupportedFeature, match="LoRA adapter"):
        store.get("lora").source()
    with pytest.raises(UnsupportedFeature, match=r"stub for 'big' on https://example.com"):
        store.get("cloud").source()


def test_fifty_models_are_listed_in_a_moment(store):
    tensors = {f"model.layers.{i}.w": ("tensor", b"t") for i in range(300)}
    model = put_model(store, "m", named=tensors, config={"model_format": "safetensors"})
    for at in range(49):
        store.copy("m", f"m:{at}")
    fresh = Store(store.root)
    start = time.process_time()
    assert len(fresh.list()) == 50
    first = time.process_time() - start
    start = time.process_time()
    assert {m.size for m in fresh.list()} == {model.size}
    second = time.process_time() - start
    print(f"first {first * 1e3:.1f} ms, then {second * 1e3:.1f} ms")
    assert first < 0.5
    assert second < 0.1

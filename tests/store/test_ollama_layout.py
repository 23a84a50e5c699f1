"""A store as Ollama writes it and one that we write pass the same checks; bytes that are fixed are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import tensors, upload, write_folder
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.ollama_store import GO_TEMPLATE, LICENSES, MESSAGES, PARAMS, SYSTEM, OllamaStore, write_ollama_store
from tests.helpers.store_layout import blob, check_store, layers_of
from tests.helpers.unchecked import unchecked

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> OllamaStore:
    return write_ollama_store(tmp_path_factory.mktemp("ollama") / "models")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gguf` of the same file with the same texts, `plain`, `copied` and one model of each precision."""
    place = tmp_path_factory.mktemp("ours")
    store = Store(place / "models")
    (place / "g").mkdir()
    write_tiny_llama_gguf(place / "g" / "tiny.gguf")
    texts = {"template": GO_TEMPLATE, "system": SYSTEM, "parameters": PARAMS, "messages": MESSAGES}
    files = upload(store, place / "g")
    create(store, CreateRequest(model="gguf", files=files, license=list(LICENSES), **texts), lambda status: None)
    folder = write_folder(place / "m")
    for kind in ("", "nvfp4", "mxfp4", "mxfp8", "int4", "int8"):
        request = CreateRequest(model=kind or "plain", files=upload(store, folder), quantize=kind, system=SYSTEM)
        create(store, request, lambda status: None, check=unchecked)
    store.copy("int4", "user/copied:tag")
    return store.root


def test_a_store_as_ollama_writes_it_passes_the_checks(theirs: OllamaStore) -> None:
    assert check_store(theirs.root) == 3


def test_what_we_create_passes_the_same_checks(ours: Path) -> None:
    assert check_store(ours) == 8


def test_the_checks_find_what_is_wrong(ours: Path, tmp_path: Path) -> None:
    store = Store(tmp_path, [ours])
    store.copy("gguf", "damaged")
    store.copy("int4", "whole")
    damaged = tmp_path / "manifests" / LIBRARY / "damaged" / "latest"
    whole = damaged.read_bytes()
    for old, new in ((b'"size":', b'"size": '), (b'"schemaVersion":2', b'"schemaVersion":1'), (b"}\n", b"}")):
        damaged.write_bytes(whole.replace(old, new))
        with pytest.raises(AssertionError):
            check_store(tmp_path)
    damaged.write_bytes(whole)
    assert check_store(tmp_path) == 2


def test_weights_texts_and_licences_are_the_same_bytes(theirs: OllamaStore, ours: Path) -> None:
    path = f"{LIBRARY}/gguf/latest"
    fixed = ("model", "template", "system", "license")
    first, second = ([one for one in layers_of(root, path) if one[0] in fixed] for root in (theirs.root, ours))
    assert first == second
    assert [kind for kind, _, _ in first] == ["model", "template", "system", "license", "license"]


def test_parameters_and_messages_say_the_same(theirs: OllamaStore, ours: Path) -> None:
    for kind in ("params", "messages"):
        said = []
        for root in (theirs.root, ours):
            digest = next(d for k, _, d in layers_of(root, f"{LIBRARY}/gguf/latest") if k == kind)
            said.append(json.loads(blob(root, {"digest": digest})))
        assert said[0] == said[1]


def test_plain_tensors_are_the_same_bytes(theirs: OllamaStore, ours: Path) -> None:
    first = {
        name: digest
        for kind, name, digest in layers_of(theirs.root, "registry.ollama.ai/user/mlx/int4")
        if kind == "tensor"
    }
    second = {name: digest for kind, name, digest in layers_of(ours, f"{LIBRARY}/plain/latest") if kind == "tensor"}
    assert first.keys() == second.keys() == tensors().keys()
    same = {name for name in first if first[name] == second[name]}
    assert same == {name for name in first if not name.endswith("proj.weight") or name.endswith("down_proj.weight")}

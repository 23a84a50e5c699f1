"""Importing GGUF files: stored as they are, described from their header, refused when they would not load."""

import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture, UnsupportedFeature
from arriero.source import GGUFSource
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import blob_name, upload, write_folder
from tests.helpers.gguf_files import gguf_bytes, string, value, write_tiny_llama_gguf


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def tiny(folder, **metadata):
    folder.mkdir(exist_ok=True)
    write_tiny_llama_gguf(folder / "tiny.gguf", metadata={key.replace("__", "."): v for key, v in metadata.items()})
    return folder


def make(store, folder, name="m"):
    seen = []
    return create(store, CreateRequest(model=name, files=upload(store, folder)), seen.append), seen


def refused(store, folder, error, match):
    files = upload(store, folder)
    with pytest.raises(error, match=match):
        create(store, CreateRequest(model="m", files=files), lambda status: None)
    assert store.list() == []


def test_a_gguf_file_is_stored_as_it_is_with_the_usual_statuses(store, tmp_path):
    folder = tiny(tmp_path / "g", general__file_type=15)
    model, seen = make(store, folder)
    digest = blob_name(folder / "tiny.gguf")
    assert model.source() == GGUFSource(paths=(str(store.blobs.path(digest)),))
    assert [status["status"] for status in seen] == [
        "parsing GGUF",
        f"using existing layer {digest}",
        "checking that the model can be loaded",
        f"creating new layer {model.manifest.config.digest}",
        "writing manifest",
        "success",
    ]
    details = model.details
    assert (details.format, details.family, details.families) == ("gguf", "llama", ["llama"])
    assert (details.quantization_level, details.context_length, details.embedding_length) == ("Q4_K_M", 512, 64)
    assert details.parameter_size == "79K"
    assert model.capabilities[0] == "completion"
    assert store.verify() == []


def test_optional_tokenizer_keys_may_be_missing(store, tmp_path):
    folder = tmp_path / "g"
    folder.mkdir()
    write_tiny_llama_gguf(
        folder / "tiny.gguf",
    )
    model, _ = make(store, folder)
    assert "tokenizer.ggml.unknown_token_id" not in model.gguf_metadata


def test_an_unknown_architecture_is_refused_with_the_known_ones(store, tmp_path):
    refused(store, tiny(tmp_path / "g", general__architecture="llamma"), UnsupportedArchitecture, r"llamma .*LlamaForC")


@pytest.mark.parametrize(
    ("metadata", "error", "match"),
    [
        ({"general__architecture": "clip"}, UnsupportedFeature, "tiny.gguf is a projector"),
        ({"general__type": "adapter"}, UnsupportedFeature, "tiny.gguf is a LoRA adapter"),
        ({"general__type": "imatrix"}, InvalidRequest, "tiny.gguf is a GGUF file of type 'imatrix'"),
        ({"tokenizer__ggml__model": "rwkv"}, CheckpointError, "rwkv"),
        ({"tokenizer__ggml__tokens": []}, CheckpointError, "token"),
        ({"split__count": 2, "split__no": 0}, CheckpointError, "split over 2 files, 1 were given"),
    ],
)
def test_a_header_that_would_not_load_is_refused(store, tmp_path, metadata, error, match):
    refused(store, tiny(tmp_path / "g", **metadata), error, match)


def damaged(name):
    plain = {"general.architecture": "llama"}
    blocks = {"x": ("Q4_0", np.zeros(18, np.uint8))}
    entry = string("x") + b"\x01\0\0\0" + (32).to_bytes(8, "little")
    made = {
        "big endian": b"GGUF" + (3).to_bytes(4, "big") + bytes(40),
        "version 1": gguf_bytes(plain, {}, version=1),
        "version 4": gguf_bytes(plain, {}, version=4),
        "truncated": gguf_bytes(plain, blocks)[:-20],
        "type 250": gguf_bytes(plain, blocks).replace(entry + b"\x02", entry + b"\xfa"),
        "no architecture": gguf_bytes({"general.name": value("x")}, {}),
    }
    return made[name]


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("big endian", "big-endian"),
        ("version 1", "version 1"),
        ("version 4", "version 4"),
        ("truncated", "incomplete"),
        ("type 250", "unknown type id 250"),
        ("no architecture", "general.architecture is missing"),
    ],
)
def test_a_damaged_file_is_refused_by_its_own_name(store, tmp_path, kind, match):
    folder = tmp_path / "g"
    folder.mkdir()
    (folder / "bad.gguf").write_bytes(damaged(kind))
    refused(store, folder, CheckpointError, rf"^bad\.gguf: .*{match}")


def test_a_mixture_of_kinds_is_refused(store, tmp_path):
    folder = write_folder(tmp_path / "m")
    tiny(folder)
    refused(store, folder, InvalidRequest, r"mixes GGUF \(tiny.gguf\) with other files")


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q5_1", "MXFP4"])
def test_a_file_is_accepted_by_its_headers_alone(store, tmp_path, judged, kind):
    folder = tmp_path / "g"
    folder.mkdir()
    write_tiny_llama_gguf(folder / "tiny.gguf", kind, hidden=256, intermediate=256)
    model = create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None, check=judged)
    assert model.format == "gguf"


def test_a_file_that_lacks_a_layer_is_refused_by_the_tensors_name(store, tmp_path, judged):
    folder = tiny(tmp_path / "g", llama__block_count=3)
    files = upload(store, folder)
    with pytest.raises(CheckpointError, match=r"the model would not load.*tensor model\.layers\.2\.\S+ is missing"):
        create(store, CreateRequest(model="m", files=files), lambda status: None, check=judged)
    assert store.list() == []

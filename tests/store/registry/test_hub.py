"""Hugging Face's hub: which files are chosen, and how they become blobs."""

import os
import random
import threading

import pytest

from arriero.errors import RegistryError
from arriero.store.names import Name
from arriero.store.registry.hub import HubFile, choose, is_hub, pull_from_hub
from tests.helpers.hub import COMMIT, fake_hub
from tests.helpers.registry import digest_of
from tests.store.registry.conftest import QUICK

SHARD = random.Random(3).randbytes(300_000)
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
SAFETENSORS = {
    "model-00001-of-00002.safetensors": SHARD,
    "model-00002-of-00002.safetensors": SHARD[:5000],
    "model.safetensors.index.json": b"{}",
    "config.json": CONFIG,
    "1_Pooling/config.json": b'{"pooling": 1}',
    "tokenizer.json": b" " * 2000,
    "chat_template.jinja": b"{{ messages }}",
    "consolidated.safetensors": SHARD,
    "onnx/model.onnx": SHARD,
    "onnx/config.json": CONFIG,
    "pytorch_model.bin": SHARD,
    "README.md": b"read me",
}


@pytest.fixture
def hub(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as running:
        yield running


def listed(*paths):
    return [HubFile(path, 10, "", "") for path in paths]


def fetched(hub, store, name="hf.co/org/repo"):
    statuses = []
    with pull_from_hub(
        store, Name.parse(name), statuses.append, threading.Event(), limits=QUICK, endpoint=hub.url
    ) as files:
        return dict(files), {path: store.blobs.read(digest) for path, digest in files.items()}, statuses


def test_hosts_of_the_hub_are_known():
    assert is_hub(Name.parse("hf.co/a/b"))
    assert is_hub(Name.parse("HuggingFace.co/a/b:q8_0"))
    assert not is_hub(Name.parse("a/b"))


def test_a_safetensors_repository_brings_what_a_models_folder_has(hub, store):
    hub.repositories["org/repo"] = SAFETENSORS
    digests, contents, statuses = fetched(hub, store)
    left = {"consolidated.safetensors", "onnx/model.onnx", "onnx/config.json", "pytorch_model.bin", "README.md"}
    assert contents == {path: data for path, data in SAFETENSORS.items() if path not in left}
    assert digests["config.json"] == digest_of(CONFIG)
    assert statuses[0] == {"status": "pulling manifest"}
    assert statuses[-1]["completed"] == statuses[-1]["total"] == len(SHARD) + 5000 + 2000
    # One commit throughout: a repository that changes meanwhile gives no mixture.
    assert all(f"/resolve/{COMMIT}/" in path for path, _ in hub.requests[1:])


def test_files_that_no_model_uses_in_the_end_are_deleted(hub, store):
    hub.repositories["org/repo"] = SAFETENSORS
    digests, _, _ = fetched(hub, store)
    assert not any(store.blobs.has(digest) for digest in digests.values())


def test_finished_files_of_a_pull_that_broke_off_outlive_a_prune(hub, store):
    hub.repositories["org/repo"] = SAFETENSORS
    hub.damaged = {"model-00001-of-00002.safetensors"}
    with pytest.raises(RegistryError, match="digest mismatch"):
        fetched(hub, store)
    path = store.blobs.path(digest_of(SHARD[:5000]))
    if not path.exists():
        store.blobs.put(SHARD[:5000])
    os.utime(path, (1, 1))
    store.prune()
    assert path.exists()
    hub.damaged = set()
    fetched(hub, store)
    assert list((store.root / "awaited").iterdir()) == []
    assert not path.exists()  # no model was made of them


def test_a_tag_is_a_revision_of_a_safetensors_repository(hub, store):
    hub.repositories["org/repo"] = SAFETENSORS
    fetched(hub, store, "hf.co/org/repo:v2")
    with pytest.raises(RegistryError, match="no branch or revision 'v3'"):
        fetched(hub, store, "hf.co/org/repo:v3")


@pytest.mark.parametrize(
    ("tag", "wanted"),
    [
        ("latest", ["m-Q4_K_M.gguf"]),
        ("q8_0", ["m-Q8_0.gguf"]),
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("BF16", ["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"]),
        ("m-Q8_0", ["m-Q8_0.gguf"]),
        ("IQ2_M", ["sub/m.IQ2_M.gguf"]),
    ],
)
def test_a_tag_is_a_quantisation_of_a_gguf_repository(tag, wanted):
    files = listed(
        "README.md",
        "m-Q8_0.gguf",
        "m-BF16-00001-of-00002.gguf",
        "m-BF16-00002-of-00002.gguf",
        "m-Q4_K_M.gguf",
        "m-IQ4_K_M.gguf",
        "sub/m.IQ2_M.gguf",
        "mmproj-Q8_0.gguf",
    )
    assert [file.path for file in choose(files, Name.parse(f"hf.co/a/b:{tag}"))] == wanted


def test_a_quantisation_that_is_not_there_lists_those_that_are():
    with pytest.raises(RegistryError, match="no GGUF file of that quantisation; there are m-Q2_K, m-Q8_0"):
        choose(listed("m-Q8_0.gguf", "m-Q2_K.gguf"), Name.parse("hf.co/a/b:Q5_0"))


def test_the_only_gguf_file_needs_no_tag():
    assert choose(listed("strange.gguf"), Name.parse("hf.co/a/b"))[0].path == "strange.gguf"


def test_a_repository_without_a_model_says_what_it_has():
    with pytest.raises(RegistryError, match=r"neither GGUF files nor .* it has README\.md"):
        choose(listed("README.md"), Name.parse("hf.co/a/b"))


def test_a_repository_that_is_not_there(hub, store):
    with pytest.raises(RegistryError, match="pull model manifest: file does not exist"):
        fetched(hub, store)


def test_a_hub_that_cannot_be_reached_says_so(store):
    nowhere = "http://127.0.0.1:1"  # nobody listens
    with (
        pytest.raises(RegistryError, match=r"pull model manifest: the hub failed: .*refused"),
        pull_from_hub(store, Name.parse("hf.co/a/b"), print, threading.Event(), limits=QUICK, endpoint=nowhere),
    ):
        pass


def test_a_gated_repository_says_what_to_do(hub, store):
    hub.repositories["org/repo"] = SAFETENSORS
    hub.token = "secret"
    with pytest.raises(RegistryError, match="is gated; accept its terms on the hub, and set HF_TOKEN"):
        fetched(hub, store)


def test_the_users_token_opens_a_gated_repository(hub, store, monkeypatch):
    hub.repositories["org/repo"] = SAFETENSORS
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    _, contents, _ = fetched(hub, store)
    assert contents["config.json"] == CONFIG


@pytest.mark.parametrize("path", ["config.json", "tokenizer.json"])
def test_files_that_arrive_damaged_are_refused(hub, store, path):
    hub.repositories["org/repo"] = SAFETENSORS
    hub.damaged = {path}
    with pytest.raises(RegistryError, match=r"other bytes than the hub says|digest mismatch"):
        fetched(hub, store)
    assert store.verify() == []


def test_a_path_that_leads_outside_is_refused(hub, store):
    hub.repositories["org/repo"] = {**SAFETENSORS, "../model.safetensors": SHARD}
    with pytest.raises(RegistryError, match="is refused"):
        fetched(hub, store)

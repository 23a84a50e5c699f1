"""Uploading, creating, copying and deleting over HTTP (F10 and the rules of docs/api.md)."""

import hashlib
import json
import socket
import time

import numpy as np
import pytest
from safetensors.numpy import save

from tests.helpers.echo_runner import say
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.registry import fake_registry
from tests.helpers.stored_model import CHATML, byte_tokenizer, put_model


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def upload(http, data: bytes) -> str:
    assert http.post(f"/api/blobs/{digest_of(data)}", content=data).status_code in (200, 201)
    return digest_of(data)


def create(http, **body):
    return http.post("/api/create", json={"stream": False} | body)


def leftovers(server) -> list[str]:
    return [entry.name for entry in server.store.blobs.files() if not entry.name.startswith("sha256-")]


def test_a_blob_is_created_once(http):
    data = b"some bytes " * 1000
    path = f"/api/blobs/{digest_of(data)}"
    assert http.head(path).status_code == 404
    assert http.post(path, content=data).status_code == 201
    assert http.head(path).status_code == 200
    assert http.post(path, content=data).status_code == 200


def test_a_blob_whose_bytes_do_not_match_leaves_nothing(server, http):
    wanted = digest_of(b"right")
    reply = http.post(f"/api/blobs/{wanted}", content=b"wrong")
    assert reply.status_code == 400
    assert reply.json()["error"] == f'digest mismatch, expected "{wanted}", got "{digest_of(b"wrong")}"'
    assert http.head(f"/api/blobs/{wanted}").status_code == 404
    assert http.head(f"/api/blobs/{digest_of(b'wrong')}").status_code == 404
    assert leftovers(server) == []


@pytest.mark.parametrize("digest", ["sha256:xyz", "md5:00", "sha256:" + "0" * 63, "..%2f..%2fetc%2fpasswd"])
def test_a_malformed_digest_is_refused(http, digest):
    assert http.head(f"/api/blobs/{digest}").status_code in (400, 404)
    assert http.post(f"/api/blobs/{digest}", content=b"x").status_code in (400, 404)


def test_an_upload_that_breaks_off_leaves_nothing(server):
    data = b"z" * 100_000
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = f"POST /api/blobs/{digest_of(data)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data[:50_000])
        time.sleep(0.1)
    deadline = time.monotonic() + 5
    while leftovers(server):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.store.find_blob(digest_of(data)) is None


def test_the_old_modelfile_field_is_accepted(http):
    reply = create(http, name="old", modelfile='FROM tiny\nSYSTEM "Hi there"\nPARAMETER top_k 7\n')
    assert reply.json() == {"status": "success"}
    shown = http.post("/api/show", json={"name": "old"}).json()
    assert shown["system"] == "Hi there"
    assert "top_k" in shown["parameters"]
    assert http.request("DELETE", "/api/delete", json={"name": "old"}).status_code == 200


def test_a_modelfile_error_has_its_line(http):
    reply = create(http, model="bad", modelfile="FROM tiny\nNONSENSE x\n")
    assert reply.status_code == 400
    assert "line 2" in reply.json()["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "invalid model name"),
        ({"model": "x"}, "neither 'from' or 'files' was specified"),
        ({"model": "a b", "from": "tiny"}, "invalid model name"),
        ({"model": "x", "from": "tiny", "parameters": {"temprature": 1}}, "temprature"),
        ({"model": "x", "from": "tiny", "parameters": []}, "parameters"),
        ({"model": "x", "from": "tiny", "messages": [{"role": "king", "content": ""}]}, "role"),
        ({"model": "x", "files": ["a"]}, "files"),
        ({"model": "x", "files": {"/abs": digest_of(b"")}}, "file path must be relative"),
        ({"model": "x", "files": {"a.gguf": "sha256:1"}}, "invalid digest format"),
        ({"model": "x", "files": {"a.gguf": digest_of(b"never uploaded")}}, "has not been uploaded"),
        ({"model": "x", "from": "tiny", "adapters": {"a": digest_of(b"no adapter")}}, "has not been uploaded"),
        ({"model": "x", "from": "tiny", "quantize": "q4_K_M"}, "quantisation 'q4_K_M' is not known"),
    ],
)
def test_what_cannot_be_created_is_a_400_that_says_why(http, body, words):
    reply = create(http, **body)
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]
    streamed = http.post("/api/create", json=body)
    assert (streamed.status_code, streamed.json()) == (400, reply.json())


def test_an_unknown_base_is_a_404(http):
    with fake_registry() as registry:
        name = f"{registry.host}/library/nobody"
        reply = create(http, model="x", insecure=True, **{"from": name})
    assert reply.status_code == 404
    reason = "pull model manifest: file does not exist"
    assert reply.json()["error"] == f"model '{name}:latest' not found, and it could not be pulled: {reason}"


def test_safetensors_files_become_a_model_that_answers(http, server):
    weights = {
        "model.embed_tokens.weight": np.zeros((259, 8), np.float32),
        "model.norm.weight": np.ones(8, np.float32),
    }
    for part, shape in (("q_proj", (8, 8)), ("k_proj", (4, 8)), ("v_proj", (4, 8)), ("o_proj", (8, 8))):
        weights[f"model.layers.0.self_attn.{part}.weight"] = np.zeros(shape, np.float32)
    for part, shape in (("gate_proj", (16, 8)), ("up_proj", (16, 8)), ("down_proj", (8, 16))):
        weights[f"model.layers.0.mlp.{part}.weight"] = np.zeros(shape, np.float32)
    for part in ("input_layernorm", "post_attention_layernorm"):
        weights[f"model.layers.0.{part}.weight"] = np.ones(8, np.float32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 259,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 258,
    }
    files = {
        "model.safetensors": save(weights),
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}).encode(),
    }
    reply = http.post("/api/create", json={"model": "fresh", "files": {n: upload(http, d) for n, d in files.items()}})
    statuses = [json.loads(line) for line in reply.text.splitlines()]
    assert statuses[-1] == {"status": "success"}
    assert any("completed" in status for status in statuses)
    asked = {"model": "fresh", "stream": False, "messages": [{"role": "user", "content": say("made")}]}
    assert http.post("/api/chat", json=asked).json()["message"]["content"] == "made"
    listed = next(m for m in http.get("/api/tags").json()["models"] if m["name"] == "fresh:latest")
    assert listed["details"]["family"] == "llama"
    assert http.request("DELETE", "/api/delete", json={"model": "fresh"}).status_code == 200
    assert "fresh:latest" not in [m["name"] for m in http.get("/api/ps").json()["models"]]


def test_copy_and_delete_check_their_names(http):
    assert http.post("/api/copy", json={"source": "tiny", "destination": "a b"}).status_code == 400
    reply = http.post("/api/copy", json={"source": "", "destination": "x"})
    assert reply.json()["error"].startswith('source "" is invalid')
    assert http.request("DELETE", "/api/delete", json={}).json()["error"].startswith('name "" is invalid')
    assert http.post("/api/copy", json={"source": "tiny", "destination": "twin"}).content == b""
    assert http.request("DELETE", "/api/delete", json={"model": "twin"}).content == b""


def test_deleting_one_of_two_names_leaves_the_other_loaded(http):
    http.post("/api/copy", json={"source": "tiny", "destination": "twin"})
    http.post("/api/generate", json={"model": "tiny"})
    http.request("DELETE", "/api/delete", json={"model": "twin"})
    assert "tiny:latest" in [model["name"] for model in http.get("/api/ps").json()["models"]]


def damage(server, name: str, what: str) -> None:
    """Make a stored model unusable."""
    (manifest,) = server.store.root.glob(f"manifests/*/*/{name}/latest")
    document = json.loads(manifest.read_bytes())
    if what == "weights":
        server.store.blobs.remove(next(x for x in document["layers"] if x["mediaType"].endswith(".tensor"))["digest"])
    elif what == "configuration":
        server.store.blobs.remove(document["config"]["digest"])
    else:
        manifest.write_bytes(b'{"schemaVersion"')


@pytest.mark.parametrize("what", ["weights", "configuration", "manifest"])
def test_a_damaged_model_is_explained_listed_around_and_removed(server, http, what):
    """M04"""
    # Blobs that no other model shares.
    put_model(server.store, f"damaged-{what}", weights=len(what), params={"seed": len(what)}, capabilities=[what])
    damage(server, f"damaged-{what}", what)
    server.store._opened.clear()
    reply = http.post("/api/generate", json={"model": f"damaged-{what}", "prompt": "x"})
    assert reply.status_code == 500
    assert f"model 'damaged-{what}:latest' is " in reply.json()["error"]
    assert "pull or create" in reply.json()["error"]
    if what == "weights":
        assert "(model.embed_tokens.weight)" in reply.json()["error"]
        unload = http.post("/api/generate", json={"model": f"damaged-{what}", "keep_alive": 0})
        assert unload.json()["done_reason"] == "unload"
    assert "tiny:latest" in [entry["name"] for entry in http.get("/api/tags").json()["models"]]
    assert http.request("DELETE", "/api/delete", json={"model": f"damaged-{what}"}).status_code == 200
    assert http.post("/api/show", json={"model": f"damaged-{what}"}).status_code == 404


def test_a_model_that_was_replaced_leaves_the_memory(server, http):
    """R08: what no name stands for can't be reached and must not be held."""

    def loaded() -> set[str]:
        return {model["digest"] for model in http.get("/api/ps").json()["models"]}

    def make(system: str) -> str:
        assert create(http, model="changing", **{"from": "tiny"}, system=system).status_code == 200
        http.post("/api/generate", json={"model": "changing"})
        return server.store.get("changing").digest

    first = make("one")
    assert first in loaded()
    second = make("two")
    assert loaded() & {first, second} == {second}
    http.post("/api/copy", json={"source": "changing", "destination": "kept"})
    third = make("three")
    assert loaded() & {second, third} == {second, third}
    for name in ("kept", "changing"):
        http.request("DELETE", "/api/delete", json={"model": name})
    assert not loaded() & {second, third}


def test_show_overlays_and_verbosity(http):
    shown = http.post("/api/show", json={"model": "dressed", "system": "Other.", "options": {"top_k": 3}}).json()
    assert shown["system"] == "Other."
    assert "top_k" in shown["parameters"]
    assert "tensors" not in shown
    verbose = http.post("/api/show", json={"model": "dressed", "verbose": True}).json()
    assert verbose["tensors"] == [{"name": "model.embed_tokens.weight", "type": "F32", "shape": [4, 8]}]
    assert verbose["system"] == "Be brief."
    assert verbose["messages"] == [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]


def test_a_window_grows_with_what_is_asked(http):
    http.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
    for asked, shown in ((256, 256), (1024, 1024), (128, 1024)):
        http.post("/api/generate", json={"model": "tiny", "options": {"num_ctx": asked}})
        loaded = {model["name"]: model for model in http.get("/api/ps").json()["models"]}
        assert loaded["tiny:latest"]["context_length"] == shown
    http.post("/api/generate", json={"model": "tiny", "keep_alive": 0})


def test_a_base_that_is_not_there_is_pulled_first(server, http, tmp_path):
    write_tiny_llama_gguf(tmp_path / "tiny.gguf")
    weights = (tmp_path / "tiny.gguf").read_bytes()
    with fake_registry() as registry:
        registry.add("a/b:latest", {"model": weights, "system": b"Be brief."})
        base = f"{registry.host}/a/b"
        body = {"model": "made-of-it", "from": base, "insecure": True, "parameters": {"top_k": 3}}
        statuses = [json.loads(line)["status"] for line in http.post("/api/create", json=body).text.splitlines()]
        assert statuses[0] == "pulling manifest"
        assert statuses.count("success") == 1
        assert statuses[-1] == "success"
        assert http.post("/api/show", json={"model": "made-of-it"}).json()["system"] == "Be brief."
        again = [json.loads(line)["status"] for line in http.post("/api/create", json=body).text.splitlines()]
        assert "pulling manifest" not in again
        for name in ("made-of-it", base):
            assert http.request("DELETE", "/api/delete", json={"model": name}).status_code == 200


def test_a_renderer_and_a_parser_that_are_not_ours_are_told_at_once(http):
    body = {"model": "named", "from": "tiny", "renderer": "qwen9", "parser": "qwen9"}
    statuses = [json.loads(line)["status"] for line in http.post("/api/create", json=body).text.splitlines()]
    assert statuses[0].startswith("warning: there is no renderer 'qwen9'")
    assert statuses[1].startswith("warning: there is no parser 'qwen9'")
    assert statuses[-1] == "success"
    body = {"model": "named", "from": "tiny", "renderer": "llama3", "parser": "llama3"}
    assert "warning" not in http.post("/api/create", json=body).text
    assert http.request("DELETE", "/api/delete", json={"model": "named"}).status_code == 200

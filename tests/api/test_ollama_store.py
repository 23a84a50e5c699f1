"""Models that Ollama has pulled are listed, shown and run where they are."""

import json
import sys

import httpx
import pytest

from tests.helpers.live_server import live_server
from tests.helpers.ollama_store import GO_TEMPLATE, LICENSES, MESSAGES, SYSTEM, write_ollama_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_ollama_store(tmp_path_factory.mktemp("ollama") / "models").root


@pytest.fixture(scope="module")
def http(folder, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with (
        live_server(home, [sys.executable, "-m", "arriero.runner"], ollama_models=folder) as running,
        httpx.Client(base_url=running.url, timeout=60, trust_env=False, verify=False) as client,
    ):
        yield client


def snapshot(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_all_models_are_listed_with_what_they_are(http):
    listed = {model["name"]: model for model in http.get("/api/tags").json()["models"]}
    assert listed.keys() == {"gguf:latest", "user/mlx:int4", "drafted:latest"}
    assert listed["gguf:latest"]["details"]["quantization_level"] == "F32"
    assert listed["gguf:latest"]["details"]["parameter_size"] == "135M"
    assert listed["user/mlx:int4"]["details"]["family"] == "llama"
    assert listed["user/mlx:int4"]["details"]["quantization_level"] == "int4"


def test_every_text_layer_is_shown(http):
    shown = http.post("/api/show", json={"model": "gguf"}).json()
    assert shown["template"] == GO_TEMPLATE
    assert shown["system"] == SYSTEM
    assert shown["messages"] == MESSAGES
    assert shown["license"] == "\n".join(LICENSES)
    assert "num_ctx" in shown["parameters"]
    assert '"<|im_end|>"' in shown["parameters"]


def test_a_draft_is_listed_and_does_not_count_as_the_models_own(http):
    one = http.post("/api/show", json={"model": "user/mlx:int4"}).json()
    two = http.post("/api/show", json={"model": "drafted", "verbose": True}).json()
    assert one["model_info"]["general.parameter_count"] == two["model_info"]["general.parameter_count"]
    assert [tensor["name"] for tensor in two["draft"]["tensors"]] == ["draft.fc.weight"]
    assert not any(tensor["name"].startswith("draft") for tensor in two["tensors"])


@pytest.mark.parametrize("model", ["gguf", "user/mlx:int4", "USER/MLX:INT4"])
def test_both_kinds_run_and_nothing_is_written_there(http, folder, model):
    before = snapshot(folder)
    asked = {"model": model, "prompt": "Hi", "stream": False, "options": {"num_predict": 4, "temperature": 0}}
    reply = http.post("/api/generate", json=asked).json()
    assert reply["eval_count"] == 4 or reply["done_reason"] == "stop"
    assert snapshot(folder) == before


def test_it_is_verified_and_never_changed(http, folder):
    before = snapshot(folder)
    lines = [json.loads(line) for line in http.post("/api/verify", json={"repair": True}).text.splitlines()]
    assert lines[-1] == {"status": "success"}
    refused = http.request("DELETE", "/api/delete", json={"model": "gguf"})
    assert refused.status_code == 400
    assert "which is only read" in refused.json()["error"]
    assert snapshot(folder) == before


def test_a_copy_is_ours(http, folder):
    before = snapshot(folder)
    assert http.post("/api/copy", json={"source": "gguf", "destination": "mine"}).status_code == 200
    assert http.post("/api/show", json={"model": "mine"}).json()["system"] == SYSTEM
    assert http.request("DELETE", "/api/delete", json={"model": "mine"}).status_code == 200
    assert snapshot(folder) == before

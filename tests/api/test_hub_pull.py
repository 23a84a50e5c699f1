"""`pull hf.co/…` through a live server: a repository becomes a model that answers."""

import json

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.helpers.echo_runner import echo_command, say
from tests.helpers.hub import fake_hub
from tests.helpers.live_server import live_server
from tests.helpers.stored_model import CHATML, byte_tokenizer


def repository():
    """A llama of one layer, in two shards."""
    first = {"model.embed_tokens.weight": np.zeros((259, 8), np.float32), "model.norm.weight": np.ones(8, np.float32)}
    second = {}
    for part, shape in (("q_proj", (8, 8)), ("k_proj", (4, 8)), ("v_proj", (4, 8)), ("o_proj", (8, 8))):
        second[f"model.layers.0.self_attn.{part}.weight"] = np.zeros(shape, np.float32)
    for part, shape in (("gate_proj", (16, 8)), ("up_proj", (16, 8)), ("down_proj", (8, 16))):
        second[f"model.layers.0.mlp.{part}.weight"] = np.zeros(shape, np.float32)
    for part in ("input_layernorm", "post_attention_layernorm"):
        second[f"model.layers.0.{part}.weight"] = np.ones(8, np.float32)
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
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
    index = {"weight_map": {name: shard for shard, tensors in shards.items() for name in tensors}}
    return {
        **{shard: save(tensors) for shard, tensors in shards.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}).encode(),
        "README.md": b"# A model",
    }


@pytest.fixture
def hub(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as running:
        running.repositories["org/tiny"] = repository()
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_a_safetensors_repository_becomes_a_model_that_answers(hub, tmp_path):
    with (
        live_server(tmp_path, echo_command(tmp_path)) as live,
        httpx.Client(base_url=live.url, timeout=20, trust_env=False, verify=False) as http,
    ):
        lines = [
            json.loads(line) for line in http.post("/api/pull", json={"model": "hf.co/org/tiny"}).text.splitlines()
        ]
        assert lines[0] == {"status": "pulling manifest"}
        assert lines[-1] == {"status": "success"}
        assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["hf.co/org/tiny:latest"]
        asked = {"model": "hf.co/org/tiny", "stream": False, "messages": [{"role": "user", "content": say("pulled")}]}
        assert http.post("/api/chat", json=asked).json()["message"]["content"] == "pulled"
        # The shards were only needed to make the model of.
        used = live.store.get("hf.co/org/tiny").manifest.digests()
        assert {entry.name.replace("-", ":") for entry in live.store.blobs.files()} == used


def test_a_repository_that_cannot_be_imported_names_no_model(hub, tmp_path):
    hub.repositories["org/tiny"]["config.json"] = b'{"architectures": ["NopeForCausalLM"]}'
    with (
        live_server(tmp_path, echo_command(tmp_path)) as live,
        httpx.Client(base_url=live.url, timeout=20, trust_env=False, verify=False) as http,
    ):
        lines = [
            json.loads(line) for line in http.post("/api/pull", json={"model": "hf.co/org/tiny"}).text.splitlines()
        ]
        assert "NopeForCausalLM" in lines[-1]["error"]
        assert http.get("/api/tags").json()["models"] == []

"""A real MiniLM over the API, against the vectors that transformers gives in float32 (mean of the states, length 1)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers

from arriero.create.create import create
from arriero.create.request import CreateRequest
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.text_models import tokenizer_of
from tools.models import fetch

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GOLDEN: list[dict[str, Any]] = json.loads(Path(__file__).with_name("minilm.json").read_text("utf-8"))
CONFIG = {
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
FILES = {
    "config.json": CONFIG,
    "modules.json": [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}],
    "1_Pooling/config.json": {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True},
    "sentence_bert_config.json": {"max_seq_length": 256},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("minilm")
    held = {name: json.dumps(value).encode() for name, value in FILES.items()}
    held["model.safetensors"] = fetch("minilm").read_bytes()
    held["tokenizer.json"] = fetch("minilm-tokenizer").read_bytes()
    with live_server(folder, [sys.executable, "-m", "arriero.runner"]) as running:
        files = {name: running.store.blobs.ingest([data]).digest for name, data in held.items()}
        create(running.store, CreateRequest(model="minilm", files=files), lambda status: None)
        yield running


def vectors(server: LiveServer, texts: list[str]) -> tuple[np.ndarray, int]:
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        reply = http.post("/api/embed", json={"model": "minilm", "input": texts}).raise_for_status().json()
    return np.array(reply["embeddings"]), reply["prompt_eval_count"]


def test_vectors_equal_those_of_transformers_alone_and_together(server: LiveServer) -> None:
    together, tokens = vectors(server, [case["text"] for case in GOLDEN])
    assert tokens == sum(case["tokens"] for case in GOLDEN)
    for case, row in zip(GOLDEN, together, strict=True):
        alone = vectors(server, [case["text"]])[0][0]
        for found in (row, alone):
            assert found @ np.array(case["vector"]) > 0.999999
            np.testing.assert_allclose(found, case["vector"], atol=2e-6)


def test_its_vocabulary_as_a_gguf_file_has_it_gives_the_same_tokens() -> None:
    original = tokenizers.Tokenizer.from_file(str(fetch("minilm-tokenizer")))
    original.no_padding()
    original.no_truncation()
    held = original.get_vocab()
    pieces = sorted(held, key=held.__getitem__)

    def spelled(piece: str) -> str:
        return piece if piece[:1] == "[" and piece[-1:] == "]" else piece[2:] if piece[:2] == "##" else f"▁{piece}"

    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [spelled(piece) for piece in pieces],
        "tokenizer.ggml.unknown_token_id": 100,
        "tokenizer.ggml.cls_token_id": 101,
        "tokenizer.ggml.seperator_token_id": 102,
    }
    made = tokenizer_of(metadata)
    texts = [case["text"] for case in GOLDEN] + ["İstanbul’da Ελληνικά —русский… ½ ﬁ", "a_b c-d (e) #f @g", "x" * 120]
    for text in texts:
        assert made.encode_whole(text, 1000)[0] == original.encode(text).ids, text


def test_near_texts_have_near_vectors(server: LiveServer) -> None:
    (cat, kitten, tax), _ = vectors(server, ["A cat sleeps.", "The kitten is asleep.", "Taxes are due in April."])
    assert cat @ kitten > 0.6 > 0.2 > cat @ tax

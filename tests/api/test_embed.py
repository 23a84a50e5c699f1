"""`/api/embed` and `/api/embeddings` through real runners: an encoder with a WordPiece vocabulary, and a Llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import ollama
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from tests.helpers.embedding_server import BERT, gemma_matrices, wordpiece
from tests.helpers.live_server import LiveServer
from tests.model.test_encoders_gguf import WORDS as WORDS_OF_GGUF


@pytest.fixture(scope="module")
def server(embedder: LiveServer) -> LiveServer:
    return embedder


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
        yield client


def embed(http: httpx.Client, value: Any, model: str = "mean", **fields: Any) -> httpx.Response:
    return http.post("/api/embed", json={"model": model, "input": value} | fields)


def vectors(reply: httpx.Response) -> np.ndarray:
    return np.array(reply.raise_for_status().json()["embeddings"], np.float32)


def refused(reply: httpx.Response) -> str:
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"])


def wanted(text: str) -> np.ndarray:
    """The states of a text, by the encoder itself."""
    model: Any = load_model(Checkpoint.open(FolderSource(str(BERT))), mx.float32)
    ids = wordpiece().encode(text).ids
    return np.array(model.encode(mx.array(ids), [len(ids)]))


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_vectors_are_the_means_of_the_states_with_length_one_in_order(http: httpx.Client) -> None:
    texts = ["hello world", "far", "near hello far world a b c", "Hello WORLD"]
    found = vectors(embed(http, texts))
    np.testing.assert_allclose(found, [unit(wanted(text).mean(axis=0)) for text in texts], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_one_text_is_a_list_of_one(http: httpx.Client) -> None:
    reply = embed(http, "hello world").json()
    assert len(reply["embeddings"]) == 1
    assert reply["prompt_eval_count"] == 4
    assert reply["total_duration"] > 0
    assert reply["model"] == "mean"


def test_matrices_behind_the_pooling_are_applied(http: httpx.Client) -> None:
    model: Any = load_model(Checkpoint.open(FolderSource(str(BERT.parent / "gemma3_encoder"))), mx.float32)
    ids = wordpiece().encode("hello far world").ids
    mean = np.array(model.encode(mx.array(ids), [len(ids)])).mean(axis=0)
    first, second = gemma_matrices()
    found = vectors(embed(http, "hello far world", model="gemma"))[0]
    np.testing.assert_allclose(found, unit(second @ (first @ mean)), atol=1e-5)


def test_the_first_tokens_state_is_taken_where_the_model_says_so(http: httpx.Client) -> None:
    found = vectors(embed(http, "hello far", model="first"))[0]
    np.testing.assert_allclose(found, unit(wanted("hello far")[0]), atol=1e-6)


def test_a_gguf_file_of_an_encoder_is_created_and_asked(http: httpx.Client) -> None:
    reply = embed(http, "a c bc", model="gguf").raise_for_status().json()
    model: Any = load_model(Checkpoint.open(FolderSource(str(BERT))), mx.float32)
    # `bc` is a piece only behind others, and nothing else makes the word.
    ids = [2, WORDS_OF_GGUF.index("▁a"), WORDS_OF_GGUF.index("▁c"), 1, 3]
    first = np.array(model.encode(mx.array(ids), [len(ids)]))[0]
    np.testing.assert_allclose(reply["embeddings"][0], unit(first), atol=1e-5)
    assert reply["prompt_eval_count"] == len(ids)
    assert "embedding" in http.post("/api/show", json={"model": "gguf"}).json()["capabilities"]


def test_fewer_dimensions_are_the_first_ones_with_length_one(http: httpx.Client) -> None:
    whole, short = vectors(embed(http, "hello"))[0], vectors(embed(http, "hello", dimensions=8))[0]
    np.testing.assert_allclose(short, unit(whole[:8]), atol=1e-6)
    assert "32" in refused(embed(http, "hello", dimensions=33))
    assert "dimensions" in refused(embed(http, "hello", dimensions=-1))


def test_a_long_text_loses_its_end_and_keeps_its_marks(http: httpx.Client) -> None:
    long = "hello " * 30
    reply = embed(http, long).json()
    assert reply["prompt_eval_count"] == 12
    np.testing.assert_allclose(reply["embeddings"][0], unit(wanted("hello " * 10).mean(axis=0)), atol=1e-6)
    assert embed(http, long, options={"num_ctx": 6}).json()["prompt_eval_count"] == 6


def test_a_long_text_that_may_not_be_cut_is_refused(http: httpx.Client) -> None:
    assert "the input length exceeds the context length" in refused(embed(http, ["far", "hello " * 30], truncate=False))
    assert embed(http, "hello " * 10, truncate=False).status_code == 200


@pytest.mark.parametrize("value", ["", None, []])
def test_no_input_loads_the_model(http: httpx.Client, value: Any) -> None:
    assert embed(http, value).raise_for_status().json() == {"model": "mean", "embeddings": []}
    assert any(model["name"].startswith("mean") for model in http.get("/api/ps").json()["models"])


def test_an_empty_text_among_others_has_a_vector_of_its_marks(http: httpx.Client) -> None:
    found = vectors(embed(http, ["", "hello"]))
    np.testing.assert_allclose(found[0], unit(wanted("").mean(axis=0)), atol=1e-6)


@pytest.mark.parametrize("value", [5, {"a": 1}, ["a", 5], [["a"]]])
def test_other_inputs_are_refused(http: httpx.Client, value: Any) -> None:
    assert "invalid input type" in refused(embed(http, value))


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    assert embed(http, "x", model="none").status_code == 404


def test_control_tokens_in_a_text_are_plain_text(http: httpx.Client) -> None:
    assert embed(http, "[SEP]").json()["prompt_eval_count"] > 3


def test_a_pooling_that_is_not_known_is_refused_by_name(http: httpx.Client) -> None:
    assert "pooling_mode_max_tokens" in refused(embed(http, "hello", model="strange"))


def test_the_older_endpoint_gives_the_vector_as_it_is(http: httpx.Client) -> None:
    reply = http.post("/api/embeddings", json={"model": "mean", "prompt": "hello world"}).raise_for_status().json()
    np.testing.assert_allclose(reply["embedding"], wanted("hello world").mean(axis=0), atol=1e-5)
    assert http.post("/api/embeddings", json={"model": "mean", "prompt": ""}).json() == {"embedding": []}


def test_an_encoder_does_not_chat_and_says_so(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert "does not support chat" in refused(http.post("/api/chat", json={"model": "mean", "messages": messages}))


def test_a_model_that_generates_gives_its_last_tokens_state(http: httpx.Client) -> None:
    found = vectors(embed(http, ["abc", "a longer text"], model="llama"))
    assert found.shape == (2, 64)
    alone = vectors(embed(http, "a longer text", model="llama"))
    np.testing.assert_allclose(found[1], alone[0], atol=1e-5)


def test_a_text_without_tokens_is_refused_by_its_place(http: httpx.Client) -> None:
    assert "text 1 is empty" in refused(embed(http, ["a", ""], model="llama"))


def test_ollamas_client_gets_its_vectors(server: LiveServer) -> None:
    with ollama.Client(server.url, verify=False) as client:
        reply = client.embed(model="mean", input=["hello", "far"], dimensions=4)
        assert [len(row) for row in reply.embeddings] == [4, 4]
        assert len(client.embeddings(model="mean", prompt="hello").embedding) == 32


def test_the_capability_is_shown(http: httpx.Client) -> None:
    assert "embedding" in http.post("/api/show", json={"model": "mean"}).json()["capabilities"]

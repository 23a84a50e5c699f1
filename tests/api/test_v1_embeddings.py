"""OpenAI's own client against `/v1/embeddings`, with a tiny encoder in a real runner."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.helpers.live_server import LiveServer
from tests.helpers.v1 import openai_options


@pytest.fixture(scope="module")
def client(embedder: LiveServer) -> Iterator[openai.OpenAI]:
    # The client itself asks for base64 and decodes it behind its strict check, which knows numbers only.
    with openai.OpenAI(**openai_options(embedder) | {"_strict_response_validation": False}) as made:
        yield made


def native(client: openai.OpenAI, texts: list[str], **fields: Any) -> np.ndarray:
    """The vectors of the native route."""
    url = str(client.base_url).replace("/v1/", "/api/embed")
    return np.array(client.post(url, body={"model": "mean", "input": texts} | fields, cast_to=object)["embeddings"])


@pytest.mark.parametrize("coding", ["float", "base64", None])
def test_vectors_are_those_of_the_native_route(client: openai.OpenAI, coding: str | None) -> None:
    texts = ["hello world", "near", "far"]
    fields: Any = {} if coding is None else {"encoding_format": coding}
    reply = client.embeddings.create(model="mean", input=texts, **fields)
    assert [item.index for item in reply.data] == [0, 1, 2]
    rows = [item.embedding for item in reply.data]
    if coding == "base64":
        # Asked for by name, the client hands the text on as it is.
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    np.testing.assert_allclose(np.array(rows), native(client, texts), rtol=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 4 + 3 + 3


def test_one_text_is_one_vector_of_the_width_that_was_asked_for(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="mean", input="near", dimensions=5, user="u")
    assert len(reply.data) == 1
    np.testing.assert_allclose(reply.data[0].embedding, native(client, ["near"], dimensions=5)[0], rtol=1e-6)
    assert np.linalg.norm(reply.data[0].embedding) == pytest.approx(1)


def test_a_long_text_is_refused_or_cut_on_demand(client: openai.OpenAI) -> None:
    text = "near " * 40
    with pytest.raises(openai.BadRequestError, match="12 tokens") as caught:
        client.embeddings.create(model="mean", input=text)
    assert caught.value.code == "context_length_exceeded"
    reply = client.embeddings.create(model="mean", input=text, extra_body={"truncate": True})
    assert reply.usage.prompt_tokens == 12


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "invalid input"),
        ({"input": [[1, 2]]}, "tokens"),
        ({"input": [1, 2]}, "tokens"),
        ({"input": [{"a": 1}]}, "invalid input"),
        ({"encoding_format": "int8"}, "Supported values"),
        ({"dimensions": 0}, "dimensions must be at least 1"),
        ({"dimensions": 33}, "have 32"),
        ({"model": ""}, "model is required"),
        ({"extra_body": {"options": {"banana": 1}}}, "banana"),
    ],
)
def test_what_can_not_be_honoured_says_why(client: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    body: Any = {"model": "mean", "input": "near", "encoding_format": "float"} | fields
    with pytest.raises(openai.BadRequestError, match=words):
        client.embeddings.create(**body)

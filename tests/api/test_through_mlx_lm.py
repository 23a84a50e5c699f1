"""A model that only mlx-lm has, from its folder to its answer: created, shown and run by a real runner process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from arriero.cli.commands.show import render
from arriero.create.create import create
from arriero.create.request import CreateRequest
from tests.helpers import foreign_checkpoint
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.stored_model import byte_tokenizer

PROMPT = "a tiny prompt"


@pytest.fixture(scope="module")
def network() -> Any:
    return foreign_checkpoint.network("olmo2", vocab_size=259)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, network: Any) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("through")
    made, _ = foreign_checkpoint.write(folder / "made", "olmo2", vocab_size=259)
    tensors = {name: np.array(value) for name, value in mx.load(str(made / "model.safetensors")).items()}
    config = foreign_checkpoint.config("olmo2", vocab_size=259, eos_token_id=258)
    write_folder(folder / "model", {"model.safetensors": tensors}, config=config)
    with live_server(folder, [sys.executable, "-m", "arriero.runner"]) as running:
        files = upload(running.store, folder / "model")
        create(running.store, CreateRequest(model="olmo", files=files), lambda status: None)
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
        yield client


def test_show_says_what_it_runs_through(http: httpx.Client) -> None:
    reply = http.post("/api/show", json={"model": "olmo"}).raise_for_status().json()
    assert reply["model_info"]["general.runs_through"] == "mlx-lm"
    assert "olmo2 (through mlx-lm)" in render(reply)


def test_a_runner_process_answers_with_the_networks_own_tokens(http: httpx.Client, network: Any) -> None:
    tokens = byte_tokenizer().encode(PROMPT).ids
    wanted: list[int] = []
    while len(wanted) < 12:
        logits = network(mx.array([tokens + wanted]))[0, -1]
        wanted.append(int(mx.argmax(logits).item()))
        if wanted[-1] == 258:
            break
    body = {
        "model": "olmo",
        "prompt": PROMPT,
        "raw": True,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 12, "repeat_penalty": 1.0},
    }
    reply = http.post("/api/generate", json=body).raise_for_status().json()
    assert reply["eval_count"] == len(wanted)
    assert reply["response"] == byte_tokenizer().decode([token for token in wanted if token != 258])

"""A server with a tiny model that sees, and what the model says when it is run by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import ollama

from arriero.chat.messages import Conversation, Message
from arriero.chat.model_text import ModelText
from arriero.chat.renderers.prompt import Encoded
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.pictures import SeeingRows
from tests.helpers.seeing_folder import write_seeing_folder
from tests.helpers.stored_model import put_model

REAL = [sys.executable, "-m", "arriero.runner"]
OPTIONS = {"temperature": 0, "num_predict": 12}


@dataclass(frozen=True)
class Seeing:
    """The server, and what the model says when it is run by hand."""

    server: LiveServer
    client: ollama.Client
    http: httpx.Client
    folder: Path

    def said(self, *messages: Message) -> str:
        """The greedy reply to a conversation, by the plainest loop."""
        text = ModelText.open(FolderSource(str(self.folder)))
        encoded = text.place(text.render(Conversation(messages=list(messages))), text.cutter())
        return text.tokenizer.decode(self.tokens(encoded, text.stop_ids))

    def tokens(self, encoded: Encoded, stop: Sequence[int] | frozenset[int]) -> list[int]:
        model = load_model(Checkpoint.open(FolderSource(str(self.folder))), mx.float32)
        rows = SeeingRows(model, [(encoded.tokens, encoded.images)])
        found: list[int] = []
        last = rows.logits([len(encoded.tokens)])[-1]
        while len(found) < OPTIONS["num_predict"] and (token := int(np.argmax(last))) not in stop:
            found.append(token)
            last = rows.logits([1], found)[-1]
        return found

    def error(self, path: str, **body: Any) -> str:
        reply = self.http.post(f"/api/{path}", json={"model": "seeing", "stream": False} | body)
        assert reply.status_code == 400, reply.text
        return str(reply.json()["error"])


@contextmanager
def seeing_server(root: Path) -> Iterator[Seeing]:
    """`seeing` takes images, `blind` does not."""
    folder = write_seeing_folder(root / "model")
    with live_server(root / "server", REAL, dtype="float32") as server:
        put_model(server.store, "blind")
        with (
            ollama.Client(server.url, trust_env=False, verify=False) as client,
            httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as http,
        ):
            files = {path.name: client.create_blob(path) for path in folder.iterdir()}
            made = http.post("/api/create", json={"model": "seeing", "files": files, "stream": False})
            assert made.status_code == 200, made.text
            yield Seeing(server, client, http, folder)

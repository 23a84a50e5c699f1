"""Goldens imported into a store, with a tokenizer as small as their vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.store.model import StoredModel
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import upload


def small_tokenizer() -> str:
    """A tokenizer.json of ninety tokens of one character."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(90)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def create_golden(path: Path, golden: Path, change: Callable[[str], str] = str) -> StoredModel:
    """Import a golden's folder, its config.json changed, into a fresh store under `path`."""
    folder = path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(change((golden / "config.json").read_text()))
    (folder / "model.safetensors").write_bytes((golden / "model.safetensors").read_bytes())
    (folder / "tokenizer.json").write_text(small_tokenizer())
    (folder / "tokenizer_config.json").write_text("{}")
    store = Store(path / "store")
    return create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None)

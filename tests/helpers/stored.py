"""Small stored models for tests: manifests and blobs made of given bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from arriero.store import manifests
from arriero.store.manifests import ConfigBlob, Layer, Manifest
from arriero.store.model import StoredModel
from arriero.store.store import Store


def put_model(
    store: Store,
    name: str,
    layers: Mapping[str, bytes] | None = None,
    *,
    named: Mapping[str, tuple[str, bytes]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> StoredModel:
    """Store a model of layers by the end of their media type (`model`, `template`, …) and of named layers."""
    with store.building() as build:
        made = []
        for kind, data in (layers if layers is not None else {"model": b"GGUF weights of " + name.encode()}).items():
            blob = build.add(data)
            made.append(Layer(media_type=f"application/vnd.ollama.image.{kind}", digest=blob.digest, size=blob.size))
        for layer_name, (kind, data) in (named or {}).items():
            blob = build.add(data)
            media = manifests.TEXT if kind == "text" else f"application/vnd.ollama.image.{kind}"
            made.append(Layer(media_type=media, digest=blob.digest, size=blob.size, name=layer_name))
        document = {"model_format": "gguf", "model_family": "llama", "capabilities": ["completion"]} | dict(
            config or {}
        )
        blob = build.add(ConfigBlob.decode(msgspec.json.encode(document)).encode())
        described = Layer(media_type=manifests.CONFIG, digest=blob.digest, size=blob.size)
        return build.put(name, Manifest.build(described, made))


def manifest_path(root: Path, name: str, tag: str = "latest") -> Path:
    """Where a library model's manifest file is."""
    return root / "manifests" / "registry.ollama.ai" / "library" / name / tag

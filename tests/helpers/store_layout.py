"""What holds of every store that Ollama can read, checked on files alone and without any reader of ours."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
PREFIX = "application/vnd.ollama.image."
KINDS = {
    "model",
    "projector",
    "adapter",
    "draft",
    "tensor",
    "json",
    "template",
    "system",
    "params",
    "messages",
    "license",
}
OURS = "application/vnd.arriero.image.text"
"""Layers that Ollama keeps and transfers, and does not use."""
CONFIG_FIELDS = {"model_format", "model_family", "model_families", "model_type", "file_type", "architecture", "os"}
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
PACKED = {
    "int4": (4, 64, True),
    "int8": (8, 64, True),
    "nvfp4": (4, 16, False),
    "mxfp4": (4, 32, False),
    "mxfp8": (8, 32, False),
}
"""Bits, size of a group, and whether there are zero points, by `quant_type`."""
SIZES = {"F32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1}


def check_store(root: Path) -> int:
    """Assert the layout of every model; their number."""
    paths = [path for path in (root / "manifests").rglob("*") if path.is_file() and path.name != ".DS_Store"]
    for path in paths:
        parts = path.relative_to(root / "manifests").parts
        assert len(parts) == 4, path
        assert all(PART.fullmatch(part) for part in parts), path
        check_manifest(root, path.read_bytes())
    return len(paths)


def check_manifest(root: Path, raw: bytes) -> None:
    """Compact JSON and a newline, fields in the order of the Docker image manifest, every blob whole."""
    document = json.loads(raw)
    assert raw == json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    assert list(document) == ["schemaVersion", "mediaType", "config", "layers"]
    assert (document["schemaVersion"], document["mediaType"]) == (2, MANIFEST)
    assert document["config"]["mediaType"] == CONFIG
    for layer in (document["config"], *document["layers"]):
        known = ["mediaType", "digest", "size", "from", "name"]
        assert list(layer) == [key for key in known if key in layer]
        assert all(layer[key] for key in layer if key in ("from", "name"))
        assert DIGEST.fullmatch(layer["digest"])
        data = blob(root, layer)
        assert len(data) == layer["size"]
        assert f"sha256:{hashlib.sha256(data).hexdigest()}" == layer["digest"]
    config = json.loads(blob(root, document["config"]))
    assert config.keys() >= CONFIG_FIELDS
    assert config["model_format"] in ("gguf", "safetensors")
    for layer in document["layers"]:
        check_layer(root, layer)
    check_together(config, document["layers"])


def check_layer(root: Path, layer: dict[str, Any]) -> None:
    """A layer's bytes are what its media type says."""
    if layer["mediaType"] == OURS:
        assert layer["name"]
        return
    kind = layer["mediaType"].removeprefix(PREFIX)
    assert kind in KINDS, layer
    assert ("name" in layer) == (kind in ("tensor", "json"))
    data = blob(root, layer)
    if kind == "tensor":
        check_tensor(layer["name"], data)
    elif kind == "json":
        json.loads(data)
    elif kind == "params":
        assert isinstance(json.loads(data), dict)
    elif kind == "messages":
        assert all(message.keys() == {"role", "content"} for message in json.loads(data))
    elif kind == "model":
        assert data[:4] == b"GGUF"
    else:
        data.decode()


def check_tensor(layer: str, data: bytes) -> None:
    """A safetensors file of one tensor (or one group of experts) with its companions beside it."""
    length = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + length]
    assert length % 8 == 0
    header = json.loads(text)
    assert text.rstrip(b" ") == json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    metadata = header.pop("__metadata__", {})
    end = 0
    for name, entry in header.items():
        assert name == layer or name.startswith(f"{layer}.")
        assert list(entry) == ["dtype", "shape", "data_offsets"]
        count = 1
        for size in entry["shape"]:
            count *= size
        assert entry["data_offsets"] == [end, end + count * SIZES[entry["dtype"]]]
        end = entry["data_offsets"][1]
    assert 8 + length + end == len(data)
    for name in header:
        if f"{name}.scale" in header:
            check_packed(name, header, metadata)
    if not any(name.endswith(".scale") for name in header):
        assert "quant_type" not in metadata


def check_packed(name: str, header: dict[str, Any], metadata: dict[str, str]) -> None:
    """Words, scales and zero points as the declared type has them."""
    kind = metadata.get(f"{name}.quant_type") or metadata["quant_type"]
    bits, group, biased = PACKED[kind]
    assert (metadata.get(f"{name}.group_size") or metadata["group_size"]) == str(group)
    words, scales = header[name], header[f"{name}.scale"]
    assert words["dtype"] == "U32"
    assert words["shape"][:-1] == scales["shape"][:-1]
    assert words["shape"][-1] * 32 == scales["shape"][-1] * group * bits
    assert (scales["dtype"] == "U8") == (not biased)
    assert (f"{name}.bias" in header) == biased
    if biased:
        assert header[f"{name}.bias"] == scales | {"data_offsets": header[f"{name}.bias"]["data_offsets"]}


def check_together(config: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    """What a loader looks for is there."""
    kinds = [layer["mediaType"].removeprefix(PREFIX) for layer in layers]
    names = {layer.get("name") for layer in layers}
    if config["model_format"] == "gguf":
        assert "model" in kinds
        assert "tensor" not in kinds
    else:
        assert "tensor" in kinds
        assert names >= {"config.json", "tokenizer.json"}
    draft = config.get("draft")
    if draft is not None:
        assert draft["config"] in names
        assert any(name and name.startswith(draft["tensor_prefix"]) for name in names)


def blob(root: Path, layer: dict[str, Any]) -> bytes:
    """The bytes of a layer."""
    return (root / "blobs" / layer["digest"].replace(":", "-")).read_bytes()


def layers_of(root: Path, path: str) -> Iterator[tuple[str, str, str]]:
    """Kind, name and digest of a model's layers by `host/namespace/model/tag`."""
    for layer in json.loads((root / "manifests" / path).read_bytes())["layers"]:
        yield layer["mediaType"].removeprefix(PREFIX), layer.get("name", ""), layer["digest"]

"""A model store laid out byte by byte as Ollama writes it, without any of our own writers."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.checkpoint_folder import CONFIG, tensors
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.stored_model import CHATML, byte_tokenizer

GO_TEMPLATE = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ range .Messages }}<|im_start|>"
    "{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"
)
LICENSES = ("MIT", "And another.")
MESSAGES = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
PARAMS = {"stop": ["<|im_end|>"], "temperature": 0, "num_ctx": 256}
SYSTEM = "Be brief."


class OllamaStore:
    """The folder, and how its files are written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / f"sha256-{digest}").write_bytes(data)
        return f"sha256:{digest}"

    def layer(self, kind: str, data: bytes, name: str = "") -> dict[str, Any]:
        entry = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": self.blob(data), "size": len(data)}
        return entry | ({"name": name} if name else {})

    def model(self, path: str, layers: list[dict[str, Any]], config: Mapping[str, Any]) -> bytes:
        """Write a manifest at `host/namespace/model/tag`; its bytes."""
        raw = json.dumps(config, separators=(",", ":")).encode()
        document = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "digest": self.blob(raw),
                "size": len(raw),
            },
            "layers": layers,
        }
        text = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        file = self.root / "manifests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
        return text


def mini_file(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of one logical tensor, its header padded with spaces to eight bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in arrays.items():
        kind = {"float32": "F32", "uint32": "U32", "float16": "F16"}[str(array.dtype)]
        raw = array.tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def affine(values: np.ndarray, group: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, scales and biases of 4 bits an element in groups along the last axis."""
    rows, columns = values.shape
    grouped = values.reshape(rows, columns // group, group)
    low, high = grouped.min(-1), grouped.max(-1)
    scale = np.maximum((high - low) / 15, 1e-8)
    codes = np.clip(np.round((grouped - low[..., None]) / scale[..., None]), 0, 15).astype(np.uint32)
    nibbles = codes.reshape(rows, columns // 8, 8)
    words = (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return words, scale.astype(np.float32), low.astype(np.float32)


def write_ollama_store(root: Path) -> OllamaStore:
    """`gguf:latest` (all text layers), `user/mlx:int4` (a layer a tensor), `drafted:latest`, and what lies around."""
    store = OllamaStore(root)
    write_tiny_llama_gguf(root / "tiny.gguf")
    weights = (root / "tiny.gguf").read_bytes()
    (root / "tiny.gguf").unlink()
    library = "registry.ollama.ai/library"
    store.model(
        f"{library}/gguf/latest",
        [
            store.layer("model", weights),
            store.layer("template", GO_TEMPLATE.encode()),
            store.layer("system", SYSTEM.encode()),
            store.layer("params", json.dumps(PARAMS).encode()),
            store.layer("messages", json.dumps(MESSAGES).encode()),
            *(store.layer("license", text.encode()) for text in LICENSES),
        ],
        {
            "model_format": "gguf",
            "model_family": "llama",
            "model_families": ["llama"],
            "model_type": "135M",
            "file_type": "F32",
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "0" * 64]},
        },
    )
    layers = []
    for name, values in tensors().items():
        if name.endswith("proj.weight") and values.shape[1] % 64 == 0:
            words, scales, biases = affine(values)
            held = {name: words, f"{name}.scale": scales, f"{name}.bias": biases}
            layers.append(store.layer("tensor", mini_file(held, {"quant_type": "int4", "group_size": "64"}), name))
        else:
            layers.append(store.layer("tensor", mini_file({name: values}), name))
    template = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    documents = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": byte_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(template).encode(),
    }
    layers += [store.layer("json", data, name) for name, data in documents.items()]
    config: dict[str, Any] = {
        "model_format": "safetensors",
        "model_family": "",
        "model_families": None,
        "model_type": "",
        "file_type": "int4",
        "capabilities": ["completion"],
        "architecture": "",
        "os": "",
    }
    store.model("registry.ollama.ai/user/mlx/int4", layers, config)
    draft = {"draft.fc.weight": np.zeros((8, 16), np.float32)}
    drafted = [
        *layers,
        store.layer("tensor", mini_file(draft), "draft.fc.weight"),
        store.layer("json", b'{"architectures":["Qwen3MTP"]}', "draft/config.json"),
    ]
    about = {"model_format": "safetensors", "architecture": "Qwen3MTP", "tensor_prefix": "draft."}
    store.model(f"{library}/drafted/latest", drafted, config | {"draft": about | {"config": "draft/config.json"}})
    # Downloads of that program that are under way, and a file that some system leaves everywhere.
    unfinished = f"sha256-{'ab' * 32}"
    for name in (f"{unfinished}-partial", f"{unfinished}-partial-0", f"{unfinished}.tmp", "sha256-1234567890"):
        (root / "blobs" / name).write_bytes(b"{}")
    (root / "manifests" / library / ".DS_Store").write_bytes(b"\0")
    return store

"""Where a model's bytes are, in a form that crosses process borders: what `Checkpoint.open` and the tokenizer take.

Refuses to know stores and manifests (a store makes these) and MLX (a runner opens them).
"""

from __future__ import annotations

import msgspec


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """A Hugging Face or MLX folder: `config.json`, `tokenizer.json`, `*.safetensors`."""

    path: str


class LayersSource(msgspec.Struct, frozen=True, tag="layers"):
    """A stored safetensors model: tensor layers and configuration files by name, each a path of a blob."""

    tensors: dict[str, str]
    """Layer name (a tensor's, or an expert group's) → path of a small safetensors file."""
    files: dict[str, str]
    """`config.json`, `tokenizer.json`, `chat_template.jinja`, … → path."""


class GGUFSource(msgspec.Struct, frozen=True, tag="gguf"):
    """One GGUF file (or its shards in order)."""

    paths: tuple[str, ...]
    draft: LayersSource | None = None
    """The draft that is stored beside it: tensors `draft.…`, files `draft/…`."""


ModelSource = GGUFSource | FolderSource | LayersSource

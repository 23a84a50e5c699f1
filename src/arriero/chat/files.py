"""The text-side files of a model, whatever it is stored as: configurations by name, or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from arriero.errors import CheckpointError
from arriero.formats import json_text
from arriero.formats.gguf import GGUFFile
from arriero.formats.safetensors_folder import open_folder
from arriero.source import FolderSource, GGUFSource, LayersSource, ModelSource

GGUF_KEYS = "metadata.gguf"
"""The keys of the GGUF file that a model of tensor layers was made of: its tokenizer and templates are in them."""


class TextFiles:
    """Reads a model's small files once; `metadata` is empty unless the model is, or was, a GGUF file."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        metadata: Mapping[str, Any],
        tensors: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`tensors` finds the names of the weights when they are asked for."""
        self._paths = paths
        self.metadata = metadata
        self._tensors = tensors
        self._parsed: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(cls, source: ModelSource) -> TextFiles:
        """Raises CheckpointError when the source is not there."""
        if isinstance(source, GGUFSource):
            return cls({}, GGUFFile(source.paths[0]).metadata)
        if isinstance(source, LayersSource):
            paths = {name: Path(path) for name, path in source.files.items()}
            metadata = GGUFFile(paths[GGUF_KEYS]).metadata if GGUF_KEYS in paths else {}
            return cls(paths, metadata, lambda: source.tensors)
        assert isinstance(source, FolderSource)
        folder = Path(source.path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
        paths = {path.name: path for path in folder.iterdir() if path.is_file()}
        paths |= {path.relative_to(folder).as_posix(): path for path in folder.glob("*/config.json")}
        return cls(paths, {}, lambda: _names(folder))

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def tensor_names(self) -> list[str]:
        """Names of the weights in safetensors files, headers read only now; none of a GGUF file's."""
        return list(self._tensors())

    def bytes(self, name: str) -> bytes | None:
        """The file's bytes; None when the model has no such file."""
        path = self._paths.get(name)
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error

    def text(self, name: str) -> str | None:
        """The file's text (UTF-8); None when the model has no such file."""
        data = self.bytes(name)
        if data is None:
            return None
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{name} is not UTF-8: {error}") from error

    def json(self, name: str) -> dict[str, Any]:
        """The file's JSON object; empty when the model has no such file."""
        if name not in self._parsed:
            data = self.bytes(name)
            try:
                value = {} if data is None else json_text.decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                raise CheckpointError(f"{name} is not valid JSON: {error}") from error
            if not isinstance(value, dict):
                raise CheckpointError(f"{name} must hold a JSON object; it holds a {type(value).__name__}")
            self._parsed[name] = value
        return self._parsed[name]


def _names(folder: Path) -> Iterable[str]:
    """The weights of a folder; a folder of text files alone has none."""
    return open_folder(folder) if any(folder.glob("model*.safetensors*")) else ()

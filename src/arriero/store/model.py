"""One stored model: what its manifest, its configuration and its small layers say, read when asked for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from arriero.errors import CheckpointError, NotFound, StoreError, UnsupportedFeature
from arriero.formats import json_text
from arriero.formats.gguf import GGUFFile, Metadata
from arriero.source import GGUFSource, LayersSource, ModelSource
from arriero.store import manifests
from arriero.store.blobs import Blobs
from arriero.store.capabilities import capabilities_of
from arriero.store.manifests import ConfigBlob, Layer, Manifest
from arriero.store.names import Name

log = logging.getLogger(__name__)
TEXT_LIMIT = 16 << 20
"""Most bytes of a template, system prompt, licence or message list."""


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """The `details` object of listings."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] | None = None
    parameter_size: str = ""
    quantization_level: str = ""
    context_length: int = 0
    embedding_length: int = 0


class DraftDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The draft beside a model, for listings; what only its tensors would tell may be ''."""

    architecture: str = ""
    format: str = ""
    parameter_size: str = ""
    quantization_level: str = ""
    size: int = 0
    """Bytes of its layers, which the model's size does not count."""


@dataclass(frozen=True)
class StoredModel:
    """A model of the store; layers are read when their property is, and stay the same for the object's life."""

    name: Name
    manifest: Manifest
    config: ConfigBlob
    modified_at: datetime
    """When its manifest was written, with the local offset."""
    blobs: Blobs
    read_only: bool = False
    """True for a model of another program's store."""

    @property
    def digest(self) -> str:
        """Hex digest of the manifest: the model's ID."""
        return self.manifest.digest

    @property
    def size(self) -> int:
        """Bytes of all layers and the configuration, without those of a draft."""
        return self.manifest.size - sum(layer.size for layer in self.manifest.layers if manifests.is_draft(layer))

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`; '' for a stub without weights."""
        return self.config.model_format or manifests.media_kind(self.manifest.layers)

    def path(self, layer: Layer) -> Path:
        """The file of a layer; raises StoreError when it is missing or has another size than the manifest says."""
        path = self.blobs.path(layer.digest)
        what = f"blob {layer.digest}" + (f" ({layer.name})" if layer.name else "")
        try:
            size = path.stat().st_size
        except OSError:
            raise StoreError(
                f"model '{self.name}' is incomplete: {what} is missing from {self.blobs.folder}; "
                "pull or create the model again"
            ) from None
        if size != layer.size:
            raise StoreError(
                f"model '{self.name}' is damaged: {what} has {size} bytes and should have {layer.size}; "
                "remove the file, then pull or create the model again"
            )
        return path

    def read(self, layer: Layer, limit: int = TEXT_LIMIT) -> bytes:
        """The bytes of a small layer; raises StoreError."""
        self.path(layer)
        try:
            return self.blobs.read(layer.digest, limit)
        except NotFound as error:
            raise StoreError(str(error)) from None

    def source(self) -> ModelSource:
        """Where the weights are; raises StoreError (missing blobs) or UnsupportedFeature (adapters, remote stubs)."""
        if self.config.remote_host or self.config.remote_model:
            raise UnsupportedFeature(
                f"model '{self.name}' is a stub for '{self.config.remote_model}' on "
                f"{self.config.remote_host or 'a remote host'}; arriero runs local models only"
            )
        if self.manifest.of(manifests.ADAPTER):
            raise UnsupportedFeature(
                f"model '{self.name}' has a LoRA adapter, which arriero does not run yet; "
                "merge the adapter into the weights and create the model from those"
            )
        tensors = {layer.name: str(self.path(layer)) for layer in self.manifest.of(manifests.TENSOR)}
        files = {name: str(self.path(layer)) for name, layer in self.files.items()}
        layers = LayersSource(tensors=tensors, files=files)
        weights = tuple(str(self.path(layer)) for layer in self.manifest.of(manifests.MODEL))
        if any(not name.startswith(manifests.DRAFT_PREFIX) for name in tensors):
            return layers
        if not weights:
            raise StoreError(f"model '{self.name}' has no weights; pull or create it again")
        return GGUFSource(paths=weights, draft=layers if tensors else None)

    @cached_property
    def files(self) -> dict[str, Layer]:
        """Configuration files of a safetensors model by name: JSON files, `chat_template.jinja`, `tokenizer.model`."""
        return {layer.name: layer for layer in self.manifest.of(manifests.JSON, manifests.TEXT)}

    def json_file(self, name: str) -> dict[str, Any]:
        """A JSON object among the files, {} when there is none of that name; raises StoreError."""
        layer = self.files.get(name)
        if layer is None:
            return {}
        document: dict[str, Any] = self._json(layer, dict[str, Any], name)
        return document

    @cached_property
    def template(self) -> str | None:
        """Text of the template layer."""
        return self._last_text(manifests.TEMPLATE, manifests.PROMPT)

    @cached_property
    def system(self) -> str | None:
        """Default system prompt."""
        return self._last_text(manifests.SYSTEM)

    @cached_property
    def licenses(self) -> list[str]:
        """All licence texts."""
        return [self._text(layer) for layer in self.manifest.of(manifests.LICENSE)]

    @cached_property
    def params(self) -> dict[str, Any]:
        """Default options, as stored (unchecked)."""
        merged: dict[str, Any] = {}
        for layer in self.manifest.of(manifests.PARAMS):
            merged |= self._json(layer, dict[str, Any], "parameters")
        return merged

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """Messages that open every conversation."""
        return [
            message
            for layer in self.manifest.of(manifests.MESSAGES)
            for message in self._json(layer, list[dict[str, Any]], "messages")
        ]

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja template among the files: `chat_template.jinja`, else that of tokenizer_config.json."""
        layer = self.files.get("chat_template.jinja")
        if layer is not None:
            return self._text(layer)
        return jinja_of(self.json_file("tokenizer_config.json"))

    @cached_property
    def gguf_metadata(self) -> Metadata:
        """Every key of the (first) GGUF file's header; raises StoreError."""
        weights = self.manifest.of(manifests.MODEL)
        if not weights:
            raise StoreError(f"model '{self.name}' has no weights; pull or create it again")
        try:
            return GGUFFile(self.path(weights[0])).metadata
        except CheckpointError as error:
            raise StoreError(f"model '{self.name}' is damaged: {error}") from error

    @property
    def renderer(self) -> str:
        """Built-in renderer's name, or ''."""
        return self.config.renderer

    @property
    def parser(self) -> str:
        """Built-in parser's name, or ''."""
        return self.config.parser

    @cached_property
    def capabilities(self) -> list[str]:
        """What the model can do, as far as its files can be read (a damaged one is a warning).

        Opens the weights' header only for a GGUF model whose configuration doesn't say and that has no template.
        """
        return capabilities_of(self)

    @cached_property
    def details(self) -> Details:
        """For listings; opens nothing larger than config.json."""
        config = self.config
        family = config.model_family
        if not family and "config.json" in self.files:
            try:
                family = family_of(self.json_file("config.json"))
            except StoreError as error:
                log.warning("%s", error)
        weights = self.manifest.of(manifests.MODEL)
        return Details(
            parent_model=weights[0].from_ if weights else "",
            format=self.format,
            family=family,
            families=config.model_families or ([family] if family else None),
            parameter_size=config.model_type,
            quantization_level=config.file_type,
            context_length=config.context_length,
            embedding_length=config.embedding_length,
        )

    @cached_property
    def draft(self) -> DraftDetails | None:
        """What the configurations say of the draft that is stored beside the model; None where there is none."""
        layers = [layer for layer in self.manifest.layers if manifests.is_draft(layer)]
        if not layers:
            return None
        said = self.config.draft or {}
        architecture = _text_of(said.get("architecture"))
        name = f"{manifests.DRAFT_FOLDER}config.json"
        if not architecture and name in self.files:
            try:
                architecture = class_of(self.json_file(name))
            except StoreError as error:
                log.warning("%s", error)
        gguf = any(layer.media_type == manifests.DRAFT for layer in layers)
        return DraftDetails(
            architecture=architecture,
            format=_text_of(said.get("model_format")) or ("gguf" if gguf else "safetensors"),
            parameter_size=_text_of(said.get("model_type")),
            quantization_level=_text_of(said.get("file_type")),
            size=sum(layer.size for layer in layers),
        )

    def _text(self, layer: Layer) -> str:
        return self.read(layer).decode("utf-8", errors="replace")

    def _last_text(self, *media_types: str) -> str | None:
        layers = self.manifest.of(*media_types)
        return self._text(layers[-1]) if layers else None

    def _json(self, layer: Layer, kind: Any, what: str) -> Any:
        try:
            return json_text.decode(self.read(layer, limit=TEXT_LIMIT), kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StoreError(f"the {what} of model '{self.name}' cannot be read: {error}") from None


def family_of(config: dict[str, Any]) -> str:
    """Architecture name for people: `model_type`, else the class's name without its ending."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type:
        return model_type
    return class_of(config).lower().removesuffix("forcausallm").removesuffix("forconditionalgeneration")


def class_of(config: dict[str, Any]) -> str:
    """The first of a configuration's `architectures`, or ''."""
    classes = config.get("architectures")
    return _text_of(classes[0]) if isinstance(classes, list) and classes else ""


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def jinja_of(tokenizer_config: dict[str, Any]) -> str | None:
    """The chat template of a tokenizer_config.json; of a list of named ones, `default`, else the first."""
    template = tokenizer_config.get("chat_template")
    if isinstance(template, str):
        return template
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
        chosen = named.get("default", next(iter(named.values()), None))
        return chosen if isinstance(chosen, str) else None
    return None

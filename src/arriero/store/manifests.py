"""Manifests and configuration blobs: what a stored model consists of.

A manifest is a Docker image manifest v2. One that was read keeps its bytes, because the model's digest is their hash;
fields that we don't know are carried along unread.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Self

import msgspec

from arriero.errors import StoreError

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
_PREFIX = "application/vnd.ollama.image."
MODEL = _PREFIX + "model"
PROJECTOR = _PREFIX + "projector"
ADAPTER = _PREFIX + "adapter"
DRAFT = _PREFIX + "draft"
TENSOR = _PREFIX + "tensor"
JSON = _PREFIX + "json"
TEMPLATE = _PREFIX + "template"
PROMPT = _PREFIX + "prompt"
SYSTEM = _PREFIX + "system"
PARAMS = _PREFIX + "params"
MESSAGES = _PREFIX + "messages"
LICENSE = _PREFIX + "license"
TEXT = "application/vnd.arriero.image.text"
"""A named file that is not JSON (`chat_template.jinja`, `tokenizer.model`): our own type, which others ignore."""

DRAFT_PREFIX = "draft."
"""What the names of the tensors of a draft begin with, which is stored beside its model."""
DRAFT_FOLDER = "draft/"
"""Where the files of such a draft are."""

DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")


def check_digest(text: str) -> str:
    """`sha256:<64 hex>` in its canonical spelling; raises ValueError."""
    match = DIGEST.fullmatch(text)
    if match is None:
        raise ValueError("invalid digest format")
    return f"sha256:{match[1].lower()}"


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One blob of a model: what it is, where it is, and its name inside the model (a tensor's or a file's)."""

    media_type: str
    digest: str
    size: int
    from_: str = ""
    """Short name of the model that it was taken from."""
    name: str = ""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields that we don't know."""

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """From the JSON object of a manifest that has been checked."""
        known = ("mediaType", "digest", "size", "from", "name")
        return cls(
            media_type=wire["mediaType"],
            digest=check_digest(wire["digest"]),
            size=wire["size"],
            from_=wire.get("from") or "",
            name=wire.get("name") or "",
            extra={key: value for key, value in wire.items() if key not in known},
        )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object."""
        wire: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.from_:
            wire["from"] = self.from_
        if self.name:
            wire["name"] = self.name
        return wire | self.extra


def is_draft(layer: Layer) -> bool:
    """Whether a layer belongs to the draft beside a model."""
    if layer.media_type == DRAFT:
        return True
    start = {TENSOR: DRAFT_PREFIX, JSON: DRAFT_FOLDER, TEXT: DRAFT_FOLDER}.get(layer.media_type)
    return start is not None and layer.name.startswith(start)


class _LayerShape(msgspec.Struct):
    """What must hold of a layer for the rest of this file to work."""

    mediaType: str  # noqa: N815 - the wire's name
    digest: Annotated[str, msgspec.Meta(pattern="^sha256[:-][0-9a-fA-F]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")


class _ManifestShape(msgspec.Struct):
    config: _LayerShape
    layers: list[_LayerShape] | None = None


_CHECKER = msgspec.json.Decoder(_ManifestShape)


class Manifest:
    """The layers of a model and its configuration; immutable."""

    def __init__(self, raw: bytes, document: dict[str, Any]) -> None:
        """Use `decode` or `build`."""
        self.raw = raw
        self._document = document

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """From a manifest's bytes; raises StoreError saying what is wrong with it."""
        if not raw.strip():
            raise StoreError("corrupt manifest: it is empty")
        try:
            _CHECKER.decode(raw)
            return cls(raw, msgspec.json.decode(raw))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StoreError(f"corrupt manifest: {error}") from None

    @classmethod
    def build(cls, config: Layer, layers: Iterable[Layer], like: Manifest | None = None) -> Self:
        """A new manifest as compact JSON and a newline; unknown top-level fields are taken over from `like`."""
        kept = {} if like is None else {k: v for k, v in like._document.items() if k not in _TOP}
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.to_wire(),
            "layers": [layer.to_wire() for layer in layers],
        } | kept
        return cls(msgspec.json.encode(document) + b"\n", document)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the bytes, without prefix: the model's ID."""
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def size(self) -> int:
        """Bytes of all layers and the configuration (a layer that occurs twice counts twice)."""
        listed: list[dict[str, Any]] = self._document.get("layers") or []
        return int(sum(layer["size"] for layer in listed) + self._document["config"]["size"])

    @cached_property
    def config(self) -> Layer:
        """The configuration blob."""
        return Layer.from_wire(self._document["config"])

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in order."""
        return tuple(Layer.from_wire(layer) for layer in self._document.get("layers") or [])

    def of(self, *media_types: str) -> list[Layer]:
        """The layers of some media types, in order."""
        return [layer for layer in self.layers if layer.media_type in media_types]

    def digests(self) -> set[str]:
        """Digests of everything that this model needs, the configuration included."""
        return {layer.digest for layer in self.layers} | {self.config.digest}


_TOP = frozenset(("schemaVersion", "mediaType", "config", "layers"))


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What a client in another language can read: one larger number would break its whole list of models."""


class ConfigBlob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The configuration blob: which engine, what family and size, which renderer and parser."""

    model_format: str = ""
    model_family: str = ""
    model_families: list[str] | None = None
    model_type: str = ""
    """Parameter count as people say it: `8.2B`."""
    file_type: str = ""
    """Quantisation: `Q4_K_M`, `int4`, `BF16`."""
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    remote_host: str = ""
    remote_model: str = ""
    capabilities: list[str] | None = None
    context_length: Int64 = 0
    embedding_length: Int64 = 0
    base_name: str = ""
    draft: dict[str, Any] | None = None
    architecture: str = ""
    os: str = ""
    extra: dict[str, Any] = msgspec.field(default_factory=dict, name=" unknown")
    """Fields that we don't know; merged at the top level of the JSON object."""

    @classmethod
    def decode(cls, raw: bytes) -> ConfigBlob:
        """From the blob's bytes; nulls count as unset; raises StoreError."""
        try:
            document = msgspec.json.decode(raw, type=dict[str, Any])
            known = {key: value for key, value in document.items() if key in _CONFIG_FIELDS and value is not None}
            unknown = {key: value for key, value in document.items() if key not in _CONFIG_FIELDS}
            return msgspec.structs.replace(msgspec.convert(known, cls), extra=unknown)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StoreError(f"corrupt configuration blob: {error}") from None

    def encode(self) -> bytes:
        """Compact JSON; the five fields that every reader expects are always there."""
        always = {
            "model_format": self.model_format,
            "model_family": self.model_family,
            "model_families": self.model_families,
            "model_type": self.model_type,
            "file_type": self.file_type,
        }
        rest: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, extra={}))
        return msgspec.json.encode(always | rest | {"architecture": self.architecture, "os": self.os} | self.extra)


_CONFIG_FIELDS = frozenset(ConfigBlob.__struct_fields__) - {"extra"}


def media_kind(layers: Sequence[Layer]) -> str:
    """`safetensors` or `gguf` by the layers, or '' when there are no weights."""
    kinds = {layer.media_type for layer in layers if not is_draft(layer)}
    return "safetensors" if TENSOR in kinds else "gguf" if MODEL in kinds else ""

"""Model names: `[scheme://]host/namespace/model:tag`, what may be left out, and how a name is shown.

Every part starts with a letter, a digit or `_`, so that a valid name can never step out of the manifests folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from arriero.errors import InvalidRequest

DEFAULT_SCHEME = "https"
DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_PARTS = {
    "host": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"), "350 letters, digits and _ - . :"),
    "namespace": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"), "80 letters, digits and _ -"),
    "model": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"), "80 letters, digits and _ - ."),
    "tag": (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"), "80 letters, digits and _ - ."),
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


@dataclass(frozen=True, slots=True)
class Name:
    """A complete, valid model name; two names that differ only by case mean the same model."""

    model: str
    tag: str = DEFAULT_TAG
    namespace: str = DEFAULT_NAMESPACE
    host: str = DEFAULT_HOST
    scheme: str = DEFAULT_SCHEME

    def __post_init__(self) -> None:
        for part, (pattern, rule) in _PARTS.items():
            text = getattr(self, part)
            if not pattern.fullmatch(text):
                raise InvalidRequest(
                    f"invalid model name: {part} {text!r} must be at most {rule}, "
                    "and start with a letter, a digit or _ (the form is host/namespace/model:tag)"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """The name that a text means, with defaults filled in; raises InvalidRequest (`invalid model name: …`)."""
        scheme, separator, rest = text.strip().rpartition("://")
        if separator and not _SCHEME.fullmatch(scheme):
            raise InvalidRequest(f"invalid model name: scheme {scheme!r} of {text!r}")
        path, tag = rest, DEFAULT_TAG
        colon = rest.rfind(":")
        if colon > rest.rfind("/"):
            path, tag = rest[:colon], rest[colon + 1 :]
        before, slash, model = path.rpartition("/")
        if not slash:
            return cls(model, tag, scheme=scheme or DEFAULT_SCHEME)
        host, slash, namespace = before.rpartition("/")
        return cls(model, tag, namespace, host if slash else DEFAULT_HOST, scheme or DEFAULT_SCHEME)

    @classmethod
    def from_path(cls, host: str, namespace: str, model: str, tag: str) -> Self | None:
        """The name of a manifest file by its four path parts, or None when they are not a name."""
        try:
            return cls(model, tag, namespace, host)
        except InvalidRequest:
            return None

    @property
    def path(self) -> PurePosixPath:
        """`host/namespace/model/tag` below the manifests folder."""
        return PurePosixPath(self.host, self.namespace, self.model, self.tag)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Equal for names that mean the same model."""
        return (self.host.lower(), self.namespace.lower(), self.model.lower(), self.tag.lower())

    def __str__(self) -> str:
        """The shortest form, always with the tag: `qwen3:8b`, `user/m:latest`, `hf.co/u/r:Q4`."""
        shown = f"{self.model}:{self.tag}"
        foreign = self.host.lower() != DEFAULT_HOST
        if foreign or self.namespace.lower() != DEFAULT_NAMESPACE:
            shown = f"{self.namespace}/{shown}"
        return f"{self.host}/{shown}" if foreign else shown

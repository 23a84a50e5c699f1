"""Contents that come as a text or as a list of parts → one text with images at their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arriero.chat.messages import Message
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.server.compat.fields import warn_once
from arriero.server.models import OpenModel
from arriero.server.requests import images_of

Part = dict[str, Any]


@dataclass(slots=True)
class Content:
    """A text, and images in base64 at offsets in it."""

    text: str = ""
    images: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def message(self, model: OpenModel, where: str, role: str) -> Message:
        """The message with this content; raises UnsupportedFeature for images where the model takes none."""
        return Message(
            role=role, content=self.text, images=images_of(model, where, self.images), places=list(self.places)
        )


@dataclass(frozen=True, slots=True)
class PartKinds:
    """The kinds of parts that an API has."""

    texts: Mapping[str, str]
    """Kind → the field that holds its text."""
    images: Mapping[str, Callable[[Part, str], str]]
    """Kind → what takes the image, in base64 or as a data URL, out of the part; the text names the part."""
    ignored: Mapping[str, str]
    """Kind → why it can be left out; each is a warning in the log."""
    refused: Mapping[str, str]
    """Kind → what to do instead."""

    def read(self, value: Any, where: str, joint: str = "\n") -> Content:
        """A content of any form; null is empty, neighbouring texts are joined by `joint`.

        Raises InvalidRequest for what is neither text nor a list of known parts, naming its place.
        """
        if value is None:
            return Content()
        if isinstance(value, str):
            return Content(value)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            raise InvalidRequest(f"{where} must be a string or a list of parts")
        content, after_text = Content(), False
        for index, part in enumerate(value):
            place = f"{where}[{index}]"
            if isinstance(part, str):
                part = {"type": next(iter(self.texts)), next(iter(self.texts.values())): part}
            if not isinstance(part, dict):
                raise InvalidRequest(f"{place} must be an object")
            kind = text_field(part, "type", place)
            if kind in self.texts:
                text = part.get(self.texts[kind])
                if text is not None and not isinstance(text, str):
                    raise InvalidRequest(f"{place}.{self.texts[kind]} must be a string")
                if text:
                    content.text += (joint if after_text else "") + text
                    after_text = True
            elif kind in self.images:
                content.images.append(self.images[kind](part, place))
                content.places.append(len(content.text))
                after_text = False
            elif kind in self.ignored:
                warn_once("contents", f"parts of type '{kind}' are left out: {self.ignored[kind]}")
            elif kind in self.refused:
                raise UnsupportedFeature(f"{place}: parts of type '{kind}' are not supported: {self.refused[kind]}")
            else:
                known = ", ".join(sorted([*self.texts, *self.images]))
                raise InvalidRequest(f"{place}.type is {kind!r}; the types are {known}")
        return content


def text_field(part: Part, name: str, where: str) -> str:
    """A field that must be a text."""
    value = part.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string")
    return value

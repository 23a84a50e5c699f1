"""What a renderer makes: text that may hold control tokens, text that may not, and images, in order."""

from __future__ import annotations

from typing import Protocol

import msgspec

from arriero.chat.messages import Conversation, Think
from arriero.image import PlacedImage


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A piece of the prompt."""

    text: str
    control: bool = True
    """Whether control tokens written in it count; False for what a user wrote."""


class Image(msgspec.Struct, frozen=True, tag="image"):
    """The place of one image."""

    data: bytes
    bare: bool = False
    """Whether the template knows nothing of images, so that nothing stands around it yet."""


class Prompt(msgspec.Struct, frozen=True):
    """A rendered conversation."""

    segments: list[Text | Image]

    @property
    def text(self) -> str:
        """All text joined; images leave no trace."""
        return "".join(segment.text for segment in self.segments if isinstance(segment, Text))


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as a model takes it."""

    tokens: list[int]
    """With placeholders for images."""
    images: list[PlacedImage] = []


class Renderer(Protocol):
    """Turns conversations into prompts."""

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True, think: Think = None) -> Prompt:
        """The prompt of a conversation; raises TemplateError when it can't be written."""
        ...

"""What a renderer makes: text that may hold control tokens, text that may not, and images, in order."""

from __future__ import annotations

from typing import Protocol

import msgspec

from arriero.chat.messages import Conversation, Think


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A piece of the prompt."""

    text: str
    control: bool = True
    """Whether control tokens written in it count; False for what a user wrote."""


class Image(msgspec.Struct, frozen=True, tag="image"):
    """The place of one image."""

    data: bytes


class Prompt(msgspec.Struct, frozen=True):
    """A rendered conversation."""

    segments: list[Text | Image]

    @property
    def text(self) -> str:
        """All text joined; images leave no trace."""
        return "".join(segment.text for segment in self.segments if isinstance(segment, Text))


class Renderer(Protocol):
    """Turns conversations into prompts."""

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True, think: Think = None) -> Prompt:
        """The prompt of a conversation; raises TemplateError when it can't be written."""
        ...

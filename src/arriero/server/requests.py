"""Checks that every generating request goes through, whatever API it came by."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Sequence
from typing import Any

from arriero.chat.messages import Message, Think, Tool
from arriero.durations import parse_keep_alive
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.server.models import OpenModel

log = logging.getLogger(__name__)

_LEVELS = ("high", "medium", "low", "max")
_BLANKS = dict.fromkeys(map(ord, " \t\r\n"))
_THINK_WORDS = '"high", "medium", "low", "max", true, or false'


def keep_alive_of(value: Any) -> float | None:
    """Seconds of a `keep_alive` field; None = the server's default, or what the model was loaded with."""
    return None if value is None else parse_keep_alive(value)


def think_of(value: Any) -> Think:
    """A `think` field, checked."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise InvalidRequest(f"think must be a boolean or string ({_THINK_WORDS})")
    if value not in _LEVELS:
        raise InvalidRequest(f'invalid think value: "{value}" (must be {_THINK_WORDS})')
    return value  # type: ignore[return-value]  # one of the literals, by the line above


def settle_think(model: OpenModel, think: Think) -> Think:
    """What `think` means for a model: on when unset and the model can, refused when asked for and it can't."""
    if model.can("thinking"):
        return True if think is None else think
    if think:
        raise UnsupportedFeature(f'"{model.asked}" does not support thinking')
    return None


MAX_IMAGES = 256
"""Of one request."""


def images_of(model: OpenModel, where: str, images: Sequence[str]) -> list[bytes]:
    """The files in an `images` field, base64 or data URLs; `where` names the field in errors.

    UnsupportedFeature for a model that takes no images, InvalidRequest for text that is neither.
    """
    if not images:
        return []
    if not model.can("vision"):
        reason = f": {model.text.no_media}" if model.text.no_media else ""
        raise UnsupportedFeature(f'"{model.asked}" does not support images{reason}')
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"{where} holds {len(images)} images; at most {MAX_IMAGES} are taken")
    return [_bytes_of(f"{where}[{index}]", text) for index, text in enumerate(images)]


def _bytes_of(where: str, text: str) -> bytes:
    if text.lstrip()[:8].lower().startswith(("http://", "https://")):
        raise UnsupportedFeature(
            f"{where} is a URL: image URLs are not fetched, send the image itself as base64 "
            "(a server with ARRIERO_FETCH_IMAGES=1 fetches them)"
        )
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest(f"{where} is a data URL without ';base64,'")
    try:
        return base64.b64decode(text.translate(_BLANKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where}: illegal base64 data ({error})") from None


def tools_of(model: OpenModel, definitions: Sequence[dict[str, Any]]) -> list[Tool]:
    """The functions among the tools on offer; other kinds are skipped with a warning, as a client may send them to all.

    Raises UnsupportedFeature for a model that can't call tools, InvalidRequest for a function without a name.
    """
    if not definitions:
        return []
    if not model.can("tools"):
        name = model.stored.name
        raise UnsupportedFeature(f"{name.host}/{name.namespace}/{name.model}:{name.tag} does not support tools")
    tools = []
    for index, definition in enumerate(definitions):
        kind = definition.get("type") or "function"
        if kind != "function":
            log.warning("tools[%d] is a '%s'; only functions are offered to the model", index, kind)
            continue
        tool = Tool(definition)
        if not tool.name:
            raise InvalidRequest(f"tools[{index}].function.name is missing")
        tools.append(tool)
    return tools


def opening(model: OpenModel, system: str | None, messages: Sequence[Message], history: bool = True) -> list[Message]:
    """The messages that a model sees: system, its own MESSAGEs (unless `history` is False), then the request's.

    `system` replaces the model's SYSTEM, '' leaves it out; None means the model's, unless the request's first message
    is a system message itself.
    """
    if system is None and not (messages and messages[0].role == "system"):
        system = model.stored.system
    first = [Message(role="system", content=system)] if system else []
    past = model.stored.messages if history else []
    return [*first, *(Message(role=str(m.get("role", "")), content=str(m.get("content", ""))) for m in past), *messages]

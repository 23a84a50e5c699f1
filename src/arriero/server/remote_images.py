"""Images that a request names by their addresses → the same request with the images themselves.

Nothing is fetched unless `ARRIERO_FETCH_IMAGES` says so, and for models that take images only: what is left as an
address is refused where images are read.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

from arriero.chat.media.picture import MAX_BYTES
from arriero.errors import InvalidRequest
from arriero.server.models import OpenModel
from arriero.server.services import Services

MOST = 32
"""Addresses of one request."""
_DEPTH = 8
"""Lists and objects around an image: contents, a message's parts, a tool's result and its parts, and some to spare."""


def is_address(text: Any) -> bool:
    """Whether an image is given by where it lies."""
    return isinstance(text, str) and text.lstrip()[:8].lower().startswith(("http://", "https://"))


async def fetched(services: Services, model: OpenModel, addresses: Iterable[Any]) -> dict[str, str]:
    """Address → base64 of what lies there, of those among some texts that are addresses; empty where none are fetched.

    Raises FetchError, and InvalidRequest for too many.
    """
    wanted = list(dict.fromkeys(text for text in addresses if is_address(text)))
    if not wanted or not services.settings.fetch_images or not model.can("vision"):
        return {}
    if len(wanted) > MOST:
        raise InvalidRequest(f"the request names {len(wanted)} images by their addresses; at most {MOST} are fetched")
    found: dict[str, str] = {}
    left = services.settings.max_body
    # One after another: what one request may take of the memory is what its body might have taken.
    for address in wanted:
        data = await services.fetcher.fetch(address.strip(), min(MAX_BYTES, left))
        left -= len(data)
        found[address] = base64.b64encode(data).decode("ascii")
    return found


async def with_images(services: Services, name: str, value: Any) -> Any:
    """Contents or items of OpenAI's and Anthropic's APIs with the images in them; they are not changed themselves."""
    addresses: list[str] = []

    def note(address: str) -> str:
        addresses.append(address)
        return address

    _changed(value, note)
    if not services.settings.fetch_images or not any(map(is_address, addresses)):
        return value
    model = await services.models.open(services.store, name)
    found = await fetched(services, model, addresses)
    return _changed(value, lambda address: found.get(address, address)) if found else value


def _changed(value: Any, change: Callable[[str], str], depth: int = _DEPTH) -> Any:
    """A copy in which every image's address has gone through `change`, which gives it back or base64 for it."""
    if depth == 0:
        return value
    if isinstance(value, list):
        return [_changed(item, change, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind in ("image_url", "input_image"):
        held = value.get("image_url")
        if isinstance(held, str):
            return value | {"image_url": _as_url(held, change)}
        if isinstance(held, dict) and isinstance(held.get("url"), str):
            return value | {"image_url": held | {"url": _as_url(held["url"], change)}}
        return value
    source = value.get("source")
    if kind == "image" and isinstance(source, dict) and source.get("type") == "url" and is_address(source.get("url")):
        data = change(source["url"])
        if data == source["url"]:
            return value
        return value | {"source": {"type": "base64", "media_type": "image/png", "data": data}}
    return value | {key: _changed(value[key], change, depth - 1) for key in ("content", "output") if key in value}


def _as_url(address: str, change: Callable[[str], str]) -> str:
    if not is_address(address):
        return address
    data = change(address)
    # The type is told by the bytes, whatever a URL says.
    return address if data == address else f"data:image/*;base64,{data}"

"""Bodies → typed requests: JSON read the way that clients rely on, errors that name the field.

Unknown fields are ignored, keys match whatever their case, an explicit null means "not given". Those rules hold for
the request object and for the structs inside it, not for free-form parts (a tool's schema, a call's arguments).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import ClientDisconnect, Request

from arriero.errors import Cancelled, InvalidRequest
from arriero.server.errors import BodyTooLarge
from arriero.server.services import services_of

T = TypeVar("T", bound=msgspec.Struct)
Check = Callable[[dict[str, Any]], None]

_QUICK = 1 << 20
"""Bytes of a body that may be read on the event loop: larger ones would hold up every other reply."""

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; BodyTooLarge above `limit` bytes, announced or not, Cancelled when it never ends."""
    announced = int(request.headers.get("content-length", 0))
    if announced > limit:
        raise BodyTooLarge(f"the request body has {announced} bytes; at most {limit} are taken")
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise BodyTooLarge(f"the request body is larger than {limit} bytes")
            pieces.append(piece)
    except ClientDisconnect:
        raise Cancelled(f"the client left after {size} bytes of its request") from None
    return b"".join(pieces)


async def read_request(request: Request, kind: type[T], check: Check | None = None) -> T:
    """The request's body as `kind`; InvalidRequest for an empty body, bad JSON or a field of the wrong type."""
    body = await read_body(request, services_of(request).settings.max_body)
    if len(body) < _QUICK:
        return parse(body, kind, check)
    return await asyncio.to_thread(parse, body, kind, check)


def parse(body: bytes, kind: type[T], check: Check | None = None) -> T:
    """A JSON body as `kind` (see the module's rules); `check` may refuse the object as it came."""
    if not body:
        raise InvalidRequest("missing request body")
    try:
        value = _decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object; it is {_json_kind(value)}")
    if check is not None:
        check(value)
    try:
        return msgspec.convert(_match(value, kind), kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_sentence(str(error))) from None


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        if not _SURROGATE.search(body):
            raise
        # Clients that cut a text in the middle of an emoji send half of a surrogate pair: it becomes U+FFFD.
        return _whole_characters(json.loads(body))


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def _match(value: Any, kind: Any) -> Any:
    """`value` with the keys of struct fields spelled as declared and nulls left out."""
    if isinstance(value, list):
        item = _item_kind(kind)
        return [_match(one, item) for one in value] if item is not None else value
    if not isinstance(value, dict) or _struct(kind) is None:
        return value
    fields = _fields(_struct(kind))
    matched: dict[str, Any] = {}
    for key, item in value.items():
        name = key if key in fields else key.lower()
        if item is not None and name in fields:
            matched[name] = _match(item, fields[name])
    return matched


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _struct(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return (
        next((option for option in get_args(kind) if _struct(option)), None) if get_origin(kind) is not list else None
    )


def _item_kind(kind: Any) -> Any:
    if get_origin(kind) is list:
        return get_args(kind)[0]
    return next((item for item in map(_item_kind, get_args(kind)) if item is not None), None)


def _sentence(text: str) -> str:
    """msgspec's `Expected `str`, got `int` - at `$.model`` as `model: expected str, got int`."""
    found = _PLACE.match(text)
    assert found is not None
    what = found["what"].replace("`", "")
    what = what[:1].lower() + what[1:]
    return f"{found['path']}: {what}" if found["path"] else what


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "an array", str: "a string", bool: "a boolean"}.get(type(value), "a number")

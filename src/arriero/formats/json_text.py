"""The JSON of a model's files, which Python has often written: NaN and Infinity are numbers there."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def decode(data: bytes, kind: Any = Any) -> Any:
    """The value of `data`, of the type `kind` as msgspec means it.

    Raises msgspec.MsgspecError for text that is no JSON even with Python's numbers or has another type, RecursionError
    for text that is nested too deep.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not any(word in data for word in (b"Infinity", b"NaN")):
            raise
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if value is None:
            raise
        return msgspec.convert(value, kind)

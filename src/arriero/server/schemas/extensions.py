"""Our own fields, which every /v1 route takes beside those of its API."""

from __future__ import annotations

from typing import Any

import msgspec


class Extensions(msgspec.Struct, kw_only=True):
    """As in the native API; what an API has a field of its own for goes over `options`."""

    options: dict[str, Any] = {}
    keep_alive: Any = None
    num_ctx: int | None = None
    truncate: bool = False
    """Leave out the oldest exchanges of a conversation that doesn't fit, instead of refusing it."""

"""How a native reply is written: JSON as one object."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from arriero.server.errors import JSON


def json_reply(value: Any, status: int = 200) -> Response:
    """A struct or plain value as a JSON reply."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)

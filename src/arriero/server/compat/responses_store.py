"""The responses of this process that later ones may continue, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from arriero.errors import NotFound

MAX_BYTES = 64 << 20
MAX_RESPONSES = 1000


class Kept(msgspec.Struct, frozen=True):
    """A response and all items that led to it."""

    response: dict[str, Any]
    input: list[dict[str, Any]]


class ResponsesStore:
    """Responses by id, as JSON; nothing of them outlives the server. For use in its event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._max_bytes, self._max_responses = max_bytes, max_responses
        self._bytes = 0

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, as far as it fits."""
        data = msgspec.json.encode(Kept(response, items))
        if len(data) > self._max_bytes:
            return
        self._kept[response["id"]] = data
        self._bytes += len(data)
        while self._bytes > self._max_bytes or len(self._kept) > self._max_responses:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, response_id: str) -> Kept:
        """A response; raises NotFound when it was never kept, or is kept no longer."""
        data = self._kept.get(response_id)
        if data is None:
            raise NotFound(f"response '{response_id[:80]}' not found: it was not stored, or not kept until now")
        self._kept.move_to_end(response_id)
        return msgspec.json.decode(data, type=Kept)

    def delete(self, response_id: str) -> None:
        """Forget a response; raises NotFound as `get`."""
        self.get(response_id)
        self._bytes -= len(self._kept.pop(response_id))

"""What a route does with every field of its API: honour it, ignore it by a documented list, or refuse it by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from arriero.errors import UnsupportedFeature
from arriero.server.schemas.wire import read_request

log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

_MOST_NAMES = 256
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, and the values that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldRules(Generic[T]):
    """The rules of one route. A field that isn't listed anywhere is a warning in the log, once."""

    route: str
    kind: type[T]
    """The fields that are honoured."""
    ignored: Mapping[str, str]
    """Fields without effect → why; names with a dot are fields of an object that is itself honoured."""
    refused: Mapping[str, Refusal]

    @property
    def honoured(self) -> frozenset[str]:
        """Names of the honoured fields."""
        return frozenset(field.encode_name for field in msgspec.structs.fields(self.kind))

    async def read(self, request: Request) -> T:
        """The request's body by these rules; raises InvalidRequest for what can't be honoured."""
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise UnsupportedFeature(f"bodies with content-encoding '{coding}' are not taken: send the JSON as it is")
        return await read_request(request, self.kind, self.check)

    def check(self, body: dict[str, Any]) -> None:
        """Refuse what must be refused, and say what has no effect."""
        honoured = self.honoured
        for key, value in body.items():
            name = key if key in honoured else key.lower()
            if value is None or name in honoured:
                continue
            refusal = self.refused.get(name)
            if refusal is not None:
                if not any(value == neutral for neutral in refusal.neutral):
                    raise UnsupportedFeature(f"{name} is not supported: {refusal.reason}")
            elif name not in self.ignored:
                warn_once(self.route, f"the field '{name[:80]}' is not known and has no effect")


def warn_once(where: str, text: str) -> None:
    """A warning that is logged once a process: clients send the same fields with every request."""
    if (where, text) not in _warned and len(_warned) < _MOST_NAMES:
        _warned.add((where, text))
        log.warning("%s: %s", where, text)

"""Sizes, counts and times as people read them, and borderless tables: Ollama's forms."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def size(count: int) -> str:
    """Decimal bytes: `9.1 GB`, `19 GB`, `512 B`."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= scale:
            value = count / scale
            if value >= 10:
                return f"{int(value)} {unit}"
            text = f"{int(value * 10) / 10:.1f}"
            return f"{text.removesuffix('.0')} {unit}"
    return f"{count} B"


def span(seconds: float) -> str:
    """A length of time in one rounded unit: `About a minute`, `3 hours`."""
    if seconds < 1:
        return "Less than a second"
    whole = int(seconds)
    if whole == 1:
        return "1 second"
    if whole < _MINUTE:
        return f"{whole} seconds"
    minutes = whole // _MINUTE
    if minutes == 1:
        return "About a minute"
    if minutes < 60:
        return f"{minutes} minutes"
    hours = (whole + _HOUR // 2) // _HOUR
    if hours <= 1:
        return "About an hour"
    if hours < 48:
        return f"{hours} hours"
    days = hours // 24
    if days < 14:
        return f"{days} days"
    if days < 60:
        return f"{days // 7} weeks"
    if days < 730:
        return f"{days // 30} months"
    return f"{days // 365} years"


def ago(timestamp: str, now: datetime | None = None) -> str:
    """`3 days ago` for an RFC 3339 time; `Never` for none."""
    when = parse_time(timestamp)
    if when is None:
        return "Never"
    return f"{span((_now(now) - when).total_seconds())} ago"


def until(timestamp: str, now: datetime | None = None) -> str:
    """`4 minutes from now`, `Forever`, or `Stopping...` for a time that has passed."""
    when = parse_time(timestamp)
    if when is None:
        return "Never"
    left = (when - _now(now)).total_seconds()
    if left < 0:
        return "Stopping..."
    if left > 20 * 365 * _DAY:
        return "Forever"
    return f"{span(left)} from now"


def _now(now: datetime | None) -> datetime:
    return datetime.now(UTC) if now is None else now


def parse_time(text: str) -> datetime | None:
    """An RFC 3339 time with up to nine fractional digits; None for the zero time or none."""
    if not text or text.startswith("0001-"):
        return None
    head, dot, tail = text.partition(".")
    if dot:
        digits = len(tail) - len(tail.lstrip("0123456789"))
        text = f"{head}.{tail[: min(digits, 6)]}{tail[digits:]}"
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def processor(total: int, on_device: int) -> str:
    """Where a loaded model lives, from its size and the part on the GPU."""
    if total <= 0 or on_device > total:
        return "Unknown"
    if on_device == 0:
        return "100% CPU"
    if on_device == total:
        return "100% GPU"
    share = round(100 * (total - on_device) / total)
    return f"{share}%/{100 - share}% CPU/GPU"


def width(text: str) -> int:
    """Terminal cells that a text takes (wide characters take two, combining ones none)."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, four spaces apart, no borders."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(width(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "".join(cell + " " * (widths[i] - width(cell) + 4) for i, cell in enumerate(line)).rstrip() for line in lines
    )

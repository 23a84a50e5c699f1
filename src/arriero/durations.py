"""Durations as Ollama's API writes them: Go's `1h30m`, `300ms`; numbers are seconds.

Source: Go's `time.ParseDuration` grammar.
"""

from __future__ import annotations

import math
import re

from arriero.errors import InvalidRequest

FOREVER = math.inf

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def parse_duration(text: str) -> float:
    """Seconds of a Go duration; raises InvalidRequest with Go's wording."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    if not rest:
        raise InvalidRequest(f'time: invalid duration "{text}"')
    seconds, at = 0.0, 0
    while at < len(rest):
        part = _PART.match(rest, at)
        if part is None:
            unitless = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)", rest[at:])
            problem = "missing unit in" if unitless else "invalid"
            raise InvalidRequest(f'time: {problem} duration "{text}"')
        seconds += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return sign * seconds


def parse_keep_alive(value: object) -> float:
    """Seconds that a `keep_alive` field means: a number of seconds or a duration; negative = for ever (infinity)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidRequest(
            f"keep_alive is {type(value).__name__}; it must be a number of seconds or a duration like '5m'"
        )
    if isinstance(value, str):
        seconds = parse_duration(value)
    else:
        try:
            seconds = float(value)
        except OverflowError:  # an integer beyond all floats
            seconds = FOREVER
    if math.isnan(seconds):
        raise InvalidRequest("keep_alive is not a number")
    return FOREVER if seconds < 0 else seconds


def format_duration(nanoseconds: int) -> str:
    """Go's `Duration.String()`: `1.5s`, `12ms`, `1h2m3s`."""
    if nanoseconds == 0:
        return "0s"
    sign, ns = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    for unit, size in (("ns", 1), ("µs", 1_000), ("ms", 1_000_000)):
        if ns < size * 1000:
            return f"{sign}{_decimal(ns, size)}{unit}"
    minutes, ns = divmod(ns, 60_000_000_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{_decimal(ns, 1_000_000_000)}s"
    if hours:
        return f"{sign}{hours}h{minutes}m{seconds}"
    return f"{sign}{minutes}m{seconds}" if minutes else f"{sign}{seconds}"


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    if not rest:
        return str(whole)
    digits = str(rest).rjust(len(str(unit)) - 1, "0").rstrip("0")
    return f"{whole}.{digits}"

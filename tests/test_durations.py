import math

import pytest

from arriero.durations import format_duration, parse_duration, parse_keep_alive
from arriero.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("1.5h", 5400), ("2h45m", 9900), ("-1m", -60), ("0", 0), ("+3s", 3), (".5s", 0.5), ("1us", 1e-6)],
)
def test_a_go_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


def test_a_number_without_unit_says_so() -> None:
    with pytest.raises(InvalidRequest, match='time: missing unit in duration "300"'):
        parse_duration("300")


@pytest.mark.parametrize("text", ["", "-", "banana", "1x", "1h banana", "s"])
def test_nonsense_is_an_invalid_duration(text: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (300, 300),
        (1.5, 1.5),
        ("5m", 300),
        (-1, math.inf),
        ("-1s", math.inf),
        (0, 0),
        ("0", 0),
        ("1h30m", 5400),
        (10**400, math.inf),
    ],
)
def test_keep_alive_takes_seconds_or_a_duration_and_negative_means_for_ever(value: object, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", [True, [], {}, "-1", math.nan])
def test_other_forms_of_keep_alive_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequest):
        parse_keep_alive(value)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (5, "5ns"),
        (1_500, "1.5µs"),
        (12_000_000, "12ms"),
        (1_234_567_000, "1.234567s"),
        (61_000_000_000, "1m1s"),
        (3_723_000_000_000, "1h2m3s"),
        (3_600_000_000_000, "1h0m0s"),
        (-1_000_000, "-1ms"),
    ],
)
def test_durations_print_as_go_prints_them(nanoseconds: int, text: str) -> None:
    assert format_duration(nanoseconds) == text

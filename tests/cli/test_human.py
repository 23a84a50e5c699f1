from datetime import UTC, datetime, timedelta

import pytest

from arriero.cli import human

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (9_150_000_000, "9.1 GB"),
        (5_000_000_000, "5 GB"),
        (19_999_999_999, "19 GB"),
    ],
)
def test_sizes_are_decimal_and_cut_off(count: int, text: str) -> None:
    assert human.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "Less than a second"),
        (1, "1 second"),
        (59, "59 seconds"),
        (60, "About a minute"),
        (150, "2 minutes"),
        (3600, "About an hour"),
        (47 * 3600, "47 hours"),
        (3 * 86400, "3 days"),
        (20 * 86400, "2 weeks"),
        (90 * 86400, "3 months"),
        (800 * 86400, "2 years"),
    ],
)
def test_a_length_of_time_has_one_unit(seconds: float, text: str) -> None:
    assert human.span(seconds) == text


def test_times_with_nine_digits_and_an_offset_are_read() -> None:
    assert human.ago("2026-11-30T11:58:00.123456789Z", NOW) == "About a minute ago"
    assert human.ago("2026-11-30T13:00:00.0+02:00", NOW) == "About an hour ago"
    assert human.ago("0001-01-01T00:00:00Z", NOW) == "Never"


def test_an_expiry_says_for_ever_or_that_it_has_passed() -> None:
    assert human.until((NOW + timedelta(minutes=4, seconds=5)).isoformat(), NOW) == "4 minutes from now"
    assert human.until((NOW + timedelta(days=100000)).isoformat(), NOW) == "Forever"
    assert human.until((NOW - timedelta(seconds=1)).isoformat(), NOW) == "Stopping..."


@pytest.mark.parametrize(
    ("total", "device", "text"),
    [(10, 0, "100% CPU"), (10, 10, "100% GPU"), (10, 4, "60%/40% CPU/GPU"), (0, 0, "Unknown"), (1, 2, "Unknown")],
)
def test_the_processor_column_says_where_a_model_lives(total: int, device: int, text: str) -> None:
    assert human.processor(total, device) == text


def test_columns_are_aligned_by_cells_not_by_characters() -> None:
    lines = human.table(("NAME", "ID"), [("漢字", "a"), ("abcd", "b")]).splitlines()
    assert lines == ["NAME    ID", "漢字    a", "abcd    b"]

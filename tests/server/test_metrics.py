"""The numbers that the server counts, and their text."""

import time

import pytest

from arriero.server.metrics import Counter, Histogram, Metrics, Reading, ReplyMeter
from tests.helpers.exposition import read, value


def text_of(*series: Counter | Histogram | Reading) -> str:
    return "\n".join([line for one in series for line in one.lines()] + [""])


def test_a_counter_adds_up_by_its_labels() -> None:
    counter = Counter("things_total", "Things.", "kind")
    for kind in ("a", "b", "a"):
        counter.add(2, kind)
    found = read(text_of(counter))
    assert (value(found, "things_total", kind="a"), value(found, "things_total", kind="b")) == (4, 2)


def test_labels_with_quotes_and_line_ends_come_back_as_they_were() -> None:
    odd = 'a"b\\c\nd\\n'
    found = read(text_of(Reading("x", "X.", ("name",), {(odd,): 1.5})))
    assert value(found, "x", name=odd) == 1.5


def test_a_number_on_a_bound_counts_below_it() -> None:
    histogram = Histogram("h", "H.", (1, 2.5))
    for number in (0.5, 1, 1.5, 2.5, 9):
        histogram.observe(number)
    histogram.observe(2, times=3)
    found = read(text_of(histogram))
    assert [value(found, "h_bucket", le=bound) for bound in ("1", "2.5", "+Inf")] == [2, 7, 8]
    assert (value(found, "h_count"), value(found, "h_sum")) == (8, 20.5)


def test_nothing_counted_is_still_a_text_of_the_format() -> None:
    assert read(Metrics().text([])) == {}


def test_a_meter_tells_the_first_token_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter((2_000_000_000, 2_400_000_000, 3_400_000_000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(moments))
    metrics = Metrics()
    meter = ReplyMeter(metrics, "m", 0)
    for count in (1, 4, 0, 1):
        meter.tokens(count)
    meter.prompt(7, 3)
    meter.end("stop")
    found = read(metrics.text([]))
    assert value(found, "arriero_time_to_first_token_seconds_sum", model="m") == 2
    assert value(found, "arriero_time_per_token_seconds_count", model="m") == 5
    assert value(found, "arriero_time_per_token_seconds_sum", model="m") == pytest.approx(1.4)
    assert value(found, "arriero_time_per_token_seconds_bucket", model="m", le="0.1") == 4
    assert value(found, "arriero_generated_tokens_total", model="m") == 6
    assert value(found, "arriero_prompt_tokens_total", model="m") == 7
    assert value(found, "arriero_cached_tokens_total", model="m") == 3
    assert value(found, "arriero_replies_total", model="m", reason="stop") == 1

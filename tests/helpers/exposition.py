"""A strict reader of Prometheus' text format."""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
_PLAIN = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Sample = tuple[str, frozenset[tuple[str, str]]]


def read(text: str) -> dict[Sample, float]:
    """Every sample by name and labels; AssertionError for what the format doesn't allow."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    family = ""
    found: dict[Sample, float] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in kinds, f"{family} comes twice"
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == family
            assert kind in ("counter", "gauge", "histogram")
            kinds[family] = kind
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match["name"].removeprefix(family) in (
            ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
        )
        key = match["name"], _labels(match["labels"] or "")
        assert key not in found, f"{line} comes twice"
        found[key] = float(match["value"])
    for family, kind in kinds.items():
        if kind == "histogram":
            _check_histogram(family, found)
    return found


def value(samples: dict[Sample, float], name: str, /, **labels: str) -> float:
    """One sample; 0 when it is not there."""
    return samples.get((name, frozenset(labels.items())), 0.0)


def _labels(text: str) -> frozenset[tuple[str, str]]:
    pairs, place = [], 0
    while place < len(text):
        match = _LABEL.match(text, place)
        assert match is not None, text
        pairs.append((match["name"], re.sub(r'\\[\\"n]', lambda found: _PLAIN[found[0]], match["value"])))
        place = match.end()
    assert len({name for name, _ in pairs}) == len(pairs)
    return frozenset(pairs)


def _check_histogram(family: str, found: dict[Sample, float]) -> None:
    series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
    for (name, labels), number in found.items():
        if name == f"{family}_bucket":
            bound = float(dict(labels)["le"])
            rest = frozenset(pair for pair in labels if pair[0] != "le")
            series.setdefault(rest, []).append((bound, number))
    for labels, buckets in series.items():
        counts = [count for _, count in sorted(buckets)]
        assert counts == sorted(counts)
        assert max(buckets)[0] == float("inf")
        assert counts[-1] == found[f"{family}_count", labels]
        assert (f"{family}_sum", labels) in found

"""Python's JSON, which has three numbers more than JSON."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from arriero.formats.json_text import decode


def test_infinity_and_nan_are_numbers() -> None:
    value = decode(b'{"limits": [0.0, Infinity, -Infinity], "none": NaN, "name": "x"}', dict[str, Any])
    assert value["limits"] == [0.0, math.inf, -math.inf]
    assert math.isnan(value["none"])
    assert value["name"] == "x"


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": Infinitys}', b"{NaN}", b'{"Infinity": 1,}', b"\xffNaN"])
def test_what_is_no_json_is_refused_with_its_place(text: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(text)


@pytest.mark.parametrize("text", [b"[1]", b"[Infinity]", b'"Infinity"'])
def test_another_type_is_refused(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(text, dict[str, Any])


def test_words_in_strings_stay_strings() -> None:
    assert decode(b'["Infinity", "NaN"]') == ["Infinity", "NaN"]

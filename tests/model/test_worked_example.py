"""The worked example of docs/adding-an-architecture.md is in the files that it speaks of, letter by letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-an-architecture.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FILES = [
    "src/arriero/model/architectures/granite.py",
    "src/arriero/model/architectures/__init__.py",
    "tools/golden_models.py",
]


def test_the_page_has_examples_of_every_file() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in FILES]
    assert all(any(example in text for example in EXAMPLES) for text in texts)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_in_its_file(example: str) -> None:
    assert any(example in (ROOT / name).read_text("utf-8") for name in FILES)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:src|tests|tools|bench)/[\w/.]+\.(?:py|cpp))`", PAGE))))
def test_every_named_file_is_there(path: str) -> None:
    assert (ROOT / path).is_file()

"""docs/bugs.md names tests that exist, and answers every entry."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (TESTS.parent / "docs" / "bugs.md").read_text("utf-8").splitlines()
    if re.match(r"\| [A-Z]\d\d", line)
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([\w/]+\.py::\w+)`", row[2])})
IDS = {name for row in ROWS for name in re.findall(r"[A-Z]\d\d", row[0])}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if hasattr(node, "name")}


def test_the_list_is_read() -> None:
    assert len(ROWS) > 80
    assert len(NAMED) > 150


@pytest.mark.parametrize("path", sorted({name.partition("::")[0] for name in NAMED}))
def test_every_named_test_exists(path: str) -> None:
    wanted = {name.partition("::")[2] for name in NAMED if name.startswith(f"{path}::")}
    assert wanted - functions(TESTS / path) == set()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_entry_has_a_test_or_says_what_is_missing(row: list[str]) -> None:
    answer = row[2]
    others = set(re.findall(r"(?<![\w`])[A-Z]\d\d(?!\w)", answer))
    assert "::" in answer or "later: " in answer or "kept" in answer or others
    assert others <= IDS

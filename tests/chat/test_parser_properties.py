"""Random replies: no exception, no lost character, the same whatever the split."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from arriero.chat.parsers.events import Event, ToolCallEvent
from arriero.chat.parsers.families import FAMILIES, Family
from tests.chat.test_tool_calls import BROKEN, CASES, TOOLS, events_of, folded

SEEDS = {
    family: [case["text"] for case in CASES if case["family"] == family]
    + [text for name, text in BROKEN if name == family]
    for family in FAMILIES
}
JUNK = ["\n", " ", '"', "\\", "{", "}", "[", "]", "<", ">", "</", ":", ",", "é", "漢", "\x00", "\ud800", "1", "a", "|"]
HEADER_WORDS = [
    *(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")),
    *("assistant", "analysis", "commentary", "final", "json", "code", "text"),
]
PROMPTS = ["", "<think>\n", "<|channel>thought\n", "[THINK]", "<|start|>assistant"]


def mutated(family: str, chance: random.Random) -> str:
    """One or two replies with a few pieces cut, moved, doubled or put in."""
    text = "".join(chance.choices(SEEDS[family], k=chance.randint(1, 2)))
    other = chance.choice(SEEDS[chance.choice(list(FAMILIES))] or JUNK)
    for _ in range(chance.randint(0, 4)):
        start, end = sorted(chance.choices(range(len(text) + 1), k=2))
        end = min(end, start + chance.randint(0, 20))
        piece = chance.choice(["", chance.choice(JUNK), text[start:end] * 2, other[start:end]])
        text = text[:start] + piece + text[end:]
    return text


def pieces_of(text: str, chance: random.Random) -> list[str]:
    """The text in pieces of the sizes that tokens have."""
    pieces, at = [], 0
    while at < len(text):
        size = chance.randint(1, 9)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def marks_of(family: Family) -> list[str]:
    if family.harmony:
        return HEADER_WORDS
    tags = family.tags
    return [*family.silent, *((tags.opening, tags.closing, tags.label.strip()) if tags else ())]


def spends(left: Counter[str], marks: Sequence[str]) -> bool:
    """Whether characters are those of whole marks, each any number of times."""
    if not +left:
        return True
    for index, mark in enumerate(marks):
        need = Counter(mark)
        if mark and all(left[char] >= count for char, count in need.items()):
            rest = left.copy()
            rest.subtract(need)
            if spends(rest, marks[index:]):
                return True
    return False


def characters(text: str) -> Counter[str]:
    return Counter("".join(text.split()))


def accounted(family: str, text: str, events: Sequence[Event]) -> bool:
    """Whether thinking, content and the sources of calls are the text but for white space and marks."""
    shown = "".join(event.source if isinstance(event, ToolCallEvent) else event.text for event in events)
    left = characters(text)
    left.subtract(characters(shown))
    if min(left.values(), default=0) < 0:
        return False
    return spends(+left, marks_of(FAMILIES[family]))


def check(family: str, seed: int) -> None:
    chance = random.Random(f"{family}{seed}")
    text, prompt = mutated(family, chance), chance.choice(PROMPTS)
    whole = events_of(family, [text], prompt)
    assert accounted(family, text, whole), (text, prompt, whole)
    for pieces in (list(text), pieces_of(text, chance)):
        events = events_of(family, pieces, prompt)
        assert folded(events) == folded(whole), (text, prompt, pieces)
    assert events_of(family, [text], prompt, TOOLS[:1]) is not None


@pytest.mark.parametrize("family", [name for name in FAMILIES if SEEDS[name]])
def test_no_mutation_of_a_reply_loses_a_character_or_depends_on_the_split(family: str) -> None:
    for seed in range(250):
        check(family, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", [name for name in FAMILIES if SEEDS[name]])
def test_a_hundred_thousand_mutations_lose_nothing(family: str) -> None:
    for seed in range(1000, 1000 + 100_000 // len(FAMILIES)):
        check(family, seed)

"""Random replies: no exception, no lost character, the same whatever the split."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from arriero.chat.parsers.events import Event, ToolCallEvent
from arriero.chat.parsers.families import FAMILIES, Family
from arriero.chat.parsers.guard import GuardedParser
from arriero.chat.tags import Tags
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


def tags_of(family: str) -> list[str]:
    """Everything that structures a reply of a family, as tokens of a vocabulary."""
    found = FAMILIES[family]
    openings = () if found.syntax is None else found.syntax.openings
    return [mark for mark in (*openings, *marks_of(found)) if mark and not mark[0].isalnum()]


def cut_at_tags(family: str, text: str, chance: random.Random) -> list[tuple[str, bool]]:
    """The text as tokens give it: about half of the tags in it are tokens, the others are spelled."""
    pattern = "|".join(map(re.escape, sorted(tags_of(family), key=len, reverse=True)))
    pieces = [piece for piece in re.split(f"({pattern})", text) if piece] if pattern else [text]
    return [(piece, piece in tags_of(family) and chance.random() < 0.5) for piece in pieces]


def check_guarded(family: str, seed: int) -> None:
    """Tags that are tokens and tags that are spelled: nothing is lost, and no split changes anything."""
    chance = random.Random(f"guarded {family}{seed}")
    text, prompt = mutated(family, chance), chance.choice(PROMPTS)
    cut = cut_at_tags(family, text, chance)
    whole = guarded_events(family, cut, prompt)
    assert accounted(family, text, whole), (cut, prompt, whole)
    finer = [(part, tag) for piece, tag in cut for part in ([piece] if tag else pieces_of(piece, chance))]
    assert folded(guarded_events(family, finer, prompt)) == folded(whole), (cut, prompt)
    plain = GuardedParser(FAMILIES[family].parser(prompt, TOOLS), Tags([]))
    assert [*plain.feed(text), *plain.flush()] == events_of(family, [text], prompt)


def guarded_events(family: str, pieces: Sequence[tuple[str, bool]], prompt: str) -> list[Event]:
    parser = GuardedParser(FAMILIES[family].parser(prompt, TOOLS), Tags(tags_of(family)))
    return [*(event for text, tag in pieces for event in parser.feed(text, tag)), *parser.flush()]


@pytest.mark.parametrize("family", [name for name in FAMILIES if SEEDS[name]])
def test_tags_among_spelled_ones_lose_nothing_whatever_the_split(family: str) -> None:
    for seed in range(60):
        check_guarded(family, seed)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].syntax])
def test_a_call_whose_tags_are_spelled_is_text_where_they_are_tokens(family: str) -> None:
    """But for calls that a name alone makes one."""
    for case in CASES:
        if case["family"] == family and case["calls"] and any(tag in case["text"] for tag in tags_of(family)):
            if case["text"].lstrip().startswith(("{", "[{", "```")):
                continue
            events = guarded_events(family, [(case["text"], False)], case["prompt"])
            openings = [tag for tag in FAMILIES[family].syntax.openings if tag in case["text"]]
            assert not any(isinstance(event, ToolCallEvent) for event in events) or not openings, case
            shown = "".join(event.text for event in events if not isinstance(event, ToolCallEvent))
            assert not openings or openings[0] in shown


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
        if seed % 5 == 0:
            check_guarded(family, seed)

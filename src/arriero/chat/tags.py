"""The tags of a vocabulary that are tokens of their own, found in text by their ends."""

from __future__ import annotations

from collections.abc import Iterable


class Tags:
    """Searched for by last character and length: vocabularies hold thousands of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        ends: dict[str, set[int]] = {}
        for text in self._texts:
            ends.setdefault(text[-1], set()).add(len(text))
        self._ends = {char: sorted(sizes) for char, sizes in ends.items()}
        self.longest = max(map(len, self._texts), default=0)

    def ends(self, text: str, start: int) -> list[int]:
        """The places from `start` on of the last characters of tags."""
        found = []
        for at in range(start, len(text)):
            for size in self._ends.get(text[at], ()):
                if size <= at + 1 and text[at + 1 - size : at + 1] in self._texts:
                    found.append(at)
                    break
        return found

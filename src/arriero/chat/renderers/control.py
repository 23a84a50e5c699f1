"""Finds the texts of control tokens in what a user wrote."""

from __future__ import annotations

from collections.abc import Iterable


class ControlText:
    """A set of token texts, searched for by first character and length (vocabularies hold thousands of them)."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if text)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where control tokens are written, in order, the longest at each place, without overlaps."""
        starts: list[int] = []
        for first in self._lengths:
            at = text.find(first)
            while at >= 0:
                starts.append(at)
                at = text.find(first, at + 1)
        found: list[tuple[int, int]] = []
        free = 0
        for start in sorted(starts):
            if start < free:
                continue
            for size in self._lengths[text[start]]:
                piece = text[start : start + size]
                if len(piece) == size and piece in self._texts:
                    free = start + size
                    found.append((start, free))
                    break
        return found

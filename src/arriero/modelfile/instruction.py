"""What a Modelfile consists of: instructions in order, and the usual questions about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

NAMES = tuple("from license template system adapter draft renderer parser parameter message requires".split())
"""Every instruction, in the order in which messages list them."""

KEYED = {"parameter": "a name and a value", "message": "a role and a text"}
"""Instructions whose value follows a key."""

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; two are equal when they say the same, wherever they stand."""

    name: str
    """In lower case."""
    value: str
    key: str = ""
    """Name of a parameter or role of a message."""
    line: int = field(default=0, compare=False)
    """Where the instruction starts, from 1; 0 for one that was not read from a text."""
    column: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Modelfile:
    """Instructions in the order of the file."""

    instructions: tuple[Instruction, ...]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def all(self, name: str) -> list[str]:
        """The values of every instruction of a name, in order."""
        return [instruction.value for instruction in self.instructions if instruction.name == name]

    def last(self, name: str) -> str | None:
        """The value that counts where the last one wins; None when there is none."""
        values = self.all(name)
        return values[-1] if values else None

    @property
    def parameters(self) -> dict[str, list[str]]:
        """Every text given for each parameter, in order; `arriero.options` knows which count and their types."""
        found: dict[str, list[str]] = {}
        for instruction in self.instructions:
            if instruction.name == "parameter":
                found.setdefault(instruction.key, []).append(instruction.value)
        return found

    @property
    def messages(self) -> list[tuple[str, str]]:
        """(role, text) in order."""
        return [(i.key, i.value) for i in self.instructions if i.name == "message"]

"""Instructions → text that parses back to the same instructions."""

from __future__ import annotations

from arriero.modelfile.instruction import Instruction, Modelfile
from arriero.modelfile.value import write_value


def format(modelfile: Modelfile) -> str:  # noqa: A001 - the verb of this room, used as `modelfile.format`
    """One instruction after another, in capitals, each value in the plainest quotes that hold it."""
    return "".join(f"{format_instruction(instruction)}\n" for instruction in modelfile)


def format_instruction(instruction: Instruction) -> str:
    """One instruction without the newline that ends it."""
    words = [instruction.name.upper(), instruction.key, write_value(instruction.value)]
    return " ".join(word for word in words if word)

"""The Modelfile grammar, both ways. Refuses to know everything else."""

from arriero.modelfile.instruction import Instruction, Modelfile
from arriero.modelfile.parse import parse
from arriero.modelfile.write import format, format_instruction  # noqa: A004 - the verb of this room

__all__ = ["Instruction", "Modelfile", "format", "format_instruction", "parse"]

"""The precisions that `create --quantize` knows, by name."""

from __future__ import annotations

from arriero.errors import InvalidRequest
from arriero.model.quantization import Quantization

PACKED: dict[str, Quantization] = {
    "nvfp4": Quantization("nvfp4", 4, 16),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "mxfp8": Quantization("mxfp8", 8, 32),
    "int4": Quantization("affine", 4, 64),
    "int8": Quantization("affine", 8, 64),
}
DENSE = {"bf16": "BF16", "f16": "F16"}
"""Plain numbers: our name → safetensors' type."""
PLAIN = DENSE | {"f32": "F32"}
"""And with what nobody asks for, but a tensor may be."""
ALIASES = {
    "fp4": "int4", "q4": "int4", "fp8": "int8", "q8": "int8",
    "bfloat16": "bf16", "float16": "f16", "fp16": "f16",
}  # fmt: skip
"""`fp4` and `fp8` mean whole numbers, as they do to Ollama."""
SOURCE = ""
"""Keeps what the tensor has."""


def parse_precision(text: str) -> str:
    """The name of a precision, whatever its case, aliases resolved; raises InvalidRequest with the known ones."""
    name = text.strip().lower()
    name = ALIASES.get(name, name)
    if name in PACKED or name in DENSE:
        return name
    known = ", ".join([*PACKED, *DENSE])
    raise InvalidRequest(f"quantisation {text!r:.40} is not known; it can be {known} (aliases: {', '.join(ALIASES)})")


def eight_bit(asked: str) -> str:
    """The 8-bit precision of the same family, for tensors that need more than was asked."""
    return "int8" if asked.startswith("int") else "mxfp8"


def fits(shape: tuple[int, ...], kind: str) -> bool:
    """Whether rows are whole groups of a packed precision, and whole 16 bytes of codes."""
    return len(shape) >= 2 and shape[-1] > 0 and shape[-1] % max(32, PACKED[kind].group_size) == 0

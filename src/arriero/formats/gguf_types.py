"""The tensor types of GGUF files: ids, names, and how many bytes a block of how many values takes.

Source: the GGUF specification (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); ids that it has retired
(5, 31 to 33, 36 to 38) are unknown here. One, 4, lives on: gpt-oss in Ollama's library holds MXFP4 under it, with two
neighbours in a byte.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type: `block` consecutive values of a row take `nbytes` bytes."""

    id: int
    name: str
    block: int
    nbytes: int

    @property
    def plain(self) -> bool:
        """One number per block: the bytes are an ordinary array."""
        return self.block == 1


_TYPES = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (4, "MXFP4_PAIRS", 32, 17),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

BY_ID: dict[int, BlockType] = {id_: BlockType(id_, name, block, nbytes) for id_, name, block, nbytes in _TYPES}
BY_NAME: dict[str, BlockType] = {block_type.name: block_type for block_type in BY_ID.values()}

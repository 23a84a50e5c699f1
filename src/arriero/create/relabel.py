"""FP8 whose scales are powers of two, as MXFP8: the same codes, and a byte of scale for each 32 of them. Exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arriero.create.made import Piece, Sink, Told
from arriero.formats import mxfp
from arriero.model.companions import Part


@dataclass(frozen=True)
class RelabelledFp8:
    """E4M3 codes and their scales by block, by row, or one for all."""

    name: str
    codes: Part
    scales: Part
    block: int
    lossless: bool = True

    @property
    def source_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.span.nbytes + self.scales.span.nbytes

    @property
    def pieces(self) -> dict[str, Piece]:
        """The packed words and their scales."""
        *lead, columns = self.codes.span.shape
        return {
            self.name: Piece("U32", (*lead, columns // 4)),
            f"{self.name}.scale": Piece("U8", (*lead, columns // mxfp.GROUP)),
        }

    def write(self, sink: Sink, told: Told) -> float:
        """See `Made.write`."""
        data = self.codes.file.raw(self.codes.span.name).data
        step = 1 << 22
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            sink(piece)
            told(len(piece))
        *lead, rows, columns = self.codes.span.shape
        scales = self.scales.file.view(self.scales.span.name).astype(np.float64)
        exponents = (np.frexp(scales)[1] + 126).astype(np.uint8)
        groups = columns // mxfp.GROUP
        if exponents.size == 1:
            wide = np.full((math.prod(lead), rows, groups), exponents.reshape(-1)[0], np.uint8)
        elif exponents.shape == (*lead, rows, 1):
            wide = np.broadcast_to(exponents.reshape(-1, rows, 1), (math.prod(lead), rows, groups))
        else:
            blocks = exponents.reshape(-1, *exponents.shape[-2:])
            wide = blocks.repeat(self.block, axis=1)[:, :rows].repeat(self.block // mxfp.GROUP, axis=2)[:, :, :groups]
        for matrix in wide:
            sink(np.ascontiguousarray(matrix).data.cast("B"))
        told(self.scales.span.nbytes)
        return 0.0

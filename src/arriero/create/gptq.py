"""GPTQ's and AWQ's whole numbers as MLX's affine layout: the same codes, transposed; scale and zero point per group.

Both store `[in, out]`. GPTQ packs eight inputs in a word, AWQ eight outputs in an order of its own. Exact: scales and
biases become float32, which holds a float16 scale times a zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arriero.create.made import Piece, Sink, Told
from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.formats import affine
from arriero.formats.safetensors import SafetensorsFile

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the nibbles of AWQ's words lie: output `i` of eight is nibble `_AWQ_ORDER[i]`."""
_SUFFIXES = (".qweight", ".qzeros", ".scales", ".g_idx")


@dataclass(frozen=True)
class GroupedInts:
    """One matrix of such a model."""

    name: str
    files: Mapping[str, SafetensorsFile]
    method: str
    bits: int
    group_size: int
    shape: tuple[int, int]
    zero_offset: int
    """What GPTQ's first format subtracts from the zero points that it stores."""
    lossless: bool = True

    @property
    def kind(self) -> str:
        """As precisions are called."""
        return f"int{self.bits}"

    @property
    def source(self) -> str:
        """What it was."""
        return f"{self.method} int{self.bits}"

    @property
    def elements(self) -> int:
        """Numbers in the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def source_bytes(self) -> int:
        """Bytes of codes, zero points and scales."""
        stem = self.name.removesuffix(".weight")
        return sum(self.files[n].tensors[n].nbytes for s in _SUFFIXES if (n := stem + s) in self.files)

    @property
    def pieces(self) -> dict[str, Piece]:
        """The packed words and their companions."""
        out, columns = self.shape
        groups = (out, columns // self.group_size)
        return {
            self.name: Piece("U32", (out, columns * self.bits // 32)),
            f"{self.name}.scale": Piece("F32", groups),
            f"{self.name}.bias": Piece("F32", groups),
        }

    def write(self, sink: Sink, told: Told) -> float:
        """See `Made.write`; holds the matrix's codes, a byte each."""
        stem = self.name.removesuffix(".weight")
        words, zeros = self._view(f"{stem}.qweight"), self._view(f"{stem}.qzeros")
        across = self._along_rows(words) if self.method == "awq" else self._along_rows(words.T).T
        zero = (self._along_rows(zeros).astype(np.float32) + np.float32(self.zero_offset)).T
        scales = self._view(f"{stem}.scales").astype(np.float32).T
        sink(affine.pack(np.ascontiguousarray(across.T), self.bits).data.cast("B"))
        sink(np.ascontiguousarray(scales).data.cast("B"))
        sink(np.ascontiguousarray(-scales * zero).data.cast("B"))
        told(self.source_bytes)
        return 0.0

    def _view(self, name: str) -> np.ndarray:
        return self.files[name].view(name)

    def _along_rows(self, words: np.ndarray) -> np.ndarray:
        """Codes uint8 `[rows, words · 32 / bits]`."""
        codes = affine.unpack(np.ascontiguousarray(words).view(np.uint32), self.bits)
        if self.method == "awq":
            codes = codes.reshape(len(codes), -1, 8)[..., list(_AWQ_ORDER)].reshape(len(codes), -1)
        return codes


def take_gptq(
    tensors: Mapping[str, SafetensorsFile], config: Mapping[str, Any]
) -> tuple[list[GroupedInts], dict[str, SafetensorsFile]]:
    """The matrices in these formats, and the tensors that belong to none.

    Raises UnsupportedFeature naming the tensor of a variant that we don't know, CheckpointError for shapes that don't
    fit.
    """
    stems = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    if not stems:
        return [], dict(tensors)
    declared = config.get("quantization_config")
    facts: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
    found = [_matrix(stem, tensors, facts) for stem in stems]
    taken = {stem + suffix for stem in stems for suffix in _SUFFIXES}
    return found, {name: file for name, file in tensors.items() if name not in taken}


def _matrix(stem: str, tensors: Mapping[str, SafetensorsFile], facts: Mapping[str, Any]) -> GroupedInts:
    where = f"tensor {stem}.qweight"
    method = str(facts.get("quant_method", "")).lower()
    bits = facts.get("bits", facts.get("w_bit"))
    if method not in ("gptq", "awq"):
        raise UnsupportedFeature(
            f"{where} is packed, but quantization_config names {method or 'no method'}, not gptq or awq; "
            "use the original model"
        )
    if bits not in ((4, 8) if method == "gptq" else (4,)):
        raise UnsupportedFeature(f"{where} is {method} with {bits} bits, which is not imported; use the original model")
    if method == "awq" and str(facts.get("version", "gemm")).lower() != "gemm":
        raise UnsupportedFeature(f"{where} is in AWQ's layout {facts['version']!r:.20}; only 'gemm' is imported")
    for suffix in (".qzeros", ".scales"):
        if stem + suffix not in tensors:
            raise CheckpointError(f"{where} has no {stem}{suffix} beside it; download the model again")
    words, scales = (tensors[n].tensors[n].shape for n in (f"{stem}.qweight", f"{stem}.scales"))
    zeros = tensors[f"{stem}.qzeros"].tensors[f"{stem}.qzeros"]
    per_word = 32 // bits
    if len(words) != 2 or len(scales) != 2 or not scales[0]:
        raise CheckpointError(f"{where} of shape {list(words)} has scales of shape {list(scales)}")
    columns, out = (words[0] * per_word, words[1]) if method == "gptq" else (words[0], words[1] * per_word)
    group = columns // scales[0]
    if scales[1] != out or zeros.shape != (scales[0], out // per_word) or group * scales[0] != columns:
        raise CheckpointError(
            f"{where} of shape {list(words)} has scales of shape {list(scales)} and zero points of {list(zeros.shape)}"
        )
    if group not in affine.GROUPS:
        raise UnsupportedFeature(
            f"{where} has groups of {group}; MLX multiplies with {', '.join(map(str, affine.GROUPS))}"
        )
    order = f"{stem}.g_idx"
    if order in tensors and not np.array_equal(tensors[order].view(order), np.arange(columns) // group):
        raise UnsupportedFeature(
            f"tensor {order} takes inputs out of their order (desc_act), which no layout of MLX has; "
            "use the original model"
        )
    second = method == "awq" or str(facts.get("checkpoint_format", "gptq")) == "gptq_v2"
    return GroupedInts(f"{stem}.weight", tensors, method, bits, group, (out, columns), 0 if second else 1)

"""How far the matrices of one checkpoint are from those of another, by groups of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from arriero.kernels.embedding import dequantize
from arriero.model.checkpoint import Checkpoint
from arriero.model.stored import TensorInfo
from arriero.model.weight import Weight
from arriero.store.tensors import NUMBER

BLOCK = 1 << 22
"""Numbers that are decoded at once; both sides and their difference are held, as float32."""
_WHOLE = ("BOOL", "U8", "U16", "U32", "U64", "I8", "I16", "I32", "I64")


@dataclass(frozen=True, slots=True)
class WeightError:
    """Matrices of one kind of layer; errors are those of the candidate's numbers against the reference's."""

    name: str
    """With `*` for each number."""
    count: int
    reference: str
    """What it is stored as: `BF16`, `int4`, `Q4_K`, …; several joined by `+`."""
    candidate: str
    reference_bytes: int
    bytes: int
    error: float
    """Root mean square of the differences over that of the reference's numbers."""
    largest: float
    """The largest difference over the reference's largest number."""


@dataclass(frozen=True, slots=True)
class WeightErrors:
    """All groups in order of names, and the matrices that have no partner of the same name and shape."""

    groups: list[WeightError]
    only_reference: list[str]
    only_candidate: list[str]
    error: float
    """Of all compared matrices together."""


@dataclass(slots=True)
class _Sums:
    count: int = 0
    kinds: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    reference_bytes: int = 0
    bytes: int = 0
    lost: float = 0.0
    size: float = 0.0
    widest: float = 0.0
    top: float = 0.0


def weight_errors(reference: Checkpoint, candidate: Checkpoint) -> WeightErrors:
    """Compare every matrix that both hold; vectors (norms, biases) are never packed and are left out.

    A group's names differ by numbers only. One matrix of each side is in memory as stored, and `BLOCK` numbers of each
    as float32. Raises CheckpointError.
    """
    ours, theirs = _matrices(reference), _matrices(candidate)
    shared = [name for name, info in ours.items() if name in theirs and theirs[name].shape == info.shape]
    sums: dict[str, _Sums] = {}
    for name in shared:
        found = sums.setdefault(NUMBER.sub("*", name), _Sums())
        found.count += 1
        for_both = (_kind(ours[name]), _kind(theirs[name]))
        found.kinds = (_added(found.kinds[0], for_both[0]), _added(found.kinds[1], for_both[1]))
        found.reference_bytes += ours[name].nbytes
        found.bytes += theirs[name].nbytes
        _compare(reference.weight(name), candidate.weight(name), found)
    compared = set(shared)
    return WeightErrors(
        [_group(name, found) for name, found in sorted(sums.items())],
        sorted(ours.keys() - compared),
        sorted(theirs.keys() - compared),
        _ratio(sum(found.lost for found in sums.values()), sum(found.size for found in sums.values())),
    )


def numbers(weight: Weight, rows: slice) -> mx.array:
    """Float32 values `[…, rows, in]` of some rows of a weight that has not been repacked."""
    part = weight.rows(rows)
    how = part.quantization
    if how is None or part.scales is None:
        return part.data.astype(mx.float32)
    values = dequantize(part.data, part.scales, part.biases, group_size=how.group_size, bits=how.bits, mode=how.mode)
    factor = weight.global_scale
    if factor is None:
        return values
    if factor.size == 1:
        return values * factor.reshape(())
    # One for each expert, or for each row of a matrix.
    return values * (factor.reshape(-1, 1, 1) if values.ndim == 3 else factor.reshape(-1, 1)[rows])


def _matrices(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    return {
        name: info
        for name, info in infos.items()
        if len(info.shape) in (2, 3) and (info.quantization is not None or info.dtype not in _WHOLE)
    }


def _compare(reference: Weight, candidate: Weight, found: _Sums) -> None:
    *lead, rows, columns = reference.shape
    step = max(1, BLOCK // max(1, columns * math.prod(lead)))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        wanted = numbers(reference, part)
        missed = numbers(candidate, part) - wanted
        squares = [mx.square(values).sum() for values in (missed, wanted)]
        tops = [mx.abs(values).max() for values in (missed, wanted)]
        lost, size, widest, top = np.array(mx.stack([*squares, *tops]))
        found.lost += float(lost)
        found.size += float(size)
        found.widest = max(found.widest, float(widest))
        found.top = max(found.top, float(top))


def _kind(info: TensorInfo) -> str:
    """GGUF's own word where there is one (`Q4_K`), else how the tensor is packed, else its type."""
    if info.quantization is None or info.dtype not in (*_WHOLE, "F8_E4M3"):
        return info.dtype
    return info.quantization.name


def _added(kinds: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return kinds if kind in kinds else (*kinds, kind)


def _ratio(lost: float, size: float) -> float:
    return math.sqrt(lost / size) if size else 0.0 if not lost else math.inf


def _group(name: str, found: _Sums) -> WeightError:
    return WeightError(
        name=name,
        count=found.count,
        reference="+".join(found.kinds[0]),
        candidate="+".join(found.kinds[1]),
        reference_bytes=found.reference_bytes,
        bytes=found.bytes,
        error=_ratio(found.lost, found.size),
        largest=found.widest / found.top if found.top else 0.0,
    )

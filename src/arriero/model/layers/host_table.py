"""A table of rows in several shards, of which a forward needs few: kept in the mapped files, or loaded as stored.

Both keep the rows packed, look at each distinct row once, and decode what was chosen with the same operations, so that
they give the same bits. A table on the host takes no memory of the device; what a forward needs is copied there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import ml_dtypes
import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.formats.mapped import read_here_and_there
from arriero.kernels import device
from arriero.kernels.cuda import ple as cuda
from arriero.kernels.embedding import decoded_rows
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.row_fetch import FileRows
from arriero.model.stored import HostWeight
from arriero.model.weight import Quantization, Weight

log = logging.getLogger(__name__)

TABLE_SCALES = ("weight_scale", "weight_scale_2", "weight.global_scale")
"""Names, beside the shards, of one factor for all of them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of all shards are stored: `dtype` as the file spells it, packed when `quantization` is given."""

    dtype: str
    quantization: Quantization | None
    width: int


class ShardedTable:
    """Rows by number. `factors` holds one float32 factor per shard, or is None where none is needed."""

    def __init__(
        self,
        layout: Layout,
        sizes: Sequence[int],
        factors: np.ndarray | None,
        dtype: mx.Dtype,
        *,
        views: Sequence[HostWeight] = (),
        weights: Sequence[Weight] = (),
    ) -> None:
        """Either `views` of the files or loaded `weights`, one a shard, of `sizes` rows."""
        self.layout = layout
        self.starts = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))])
        self.factors = factors
        self.dtype = dtype
        self.weights = [(w.data, w.scales, w.biases) for w in weights]
        parts = ("data", "scales", "biases") if layout.quantization is not None else ("data",)
        columns = [[getattr(view, part) for view in views if getattr(view, part) is not None] for part in parts]
        self.files = FileRows([column for column in columns if column], self.starts) if views else None

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, *, shards: int, rows: int, width: int, resident: bool
    ) -> Self:
        """`prefix.shard_0.weight` … in the order of their numbers, `rows` in all; loaded only if `resident`.

        Rows are 16- or 32-bit floats, E4M3 codes with one factor for the table or for each shard, or packed. Raises
        CheckpointError for a missing shard or factor, and for shards that do not belong together.
        """
        names = [f"{prefix}.shard_{index}.weight" for index in range(shards)]
        missing = [name for name in names if name not in checkpoint]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of {shards} shards of a table are missing, the first is {missing[0]}"
            )
        infos = [checkpoint.info(name) for name in names]
        layouts = [Layout(info.dtype, info.quantization, info.shape[-1]) for info in infos]
        for name, info, layout in zip(names, infos, layouts, strict=True):
            if layout != layouts[0] or len(info.shape) != 2 or info.shape[1] != width:
                raise CheckpointError(
                    f"tensor {name} is {info.dtype} {list(info.shape)}, but the table's rows have {width} numbers and "
                    f"its first shard is {infos[0].dtype} {list(infos[0].shape)}"
                )
        sizes = [info.shape[0] for info in infos]
        if sum(sizes) != rows:
            raise CheckpointError(f"the shards {prefix}.shard_* hold {sum(sizes)} rows, but {rows} are addressed")
        layout = layouts[0]
        known = ("F32", "F16", "BF16", "F8_E4M3")
        if layout.quantization is None and layout.dtype not in known:
            raise CheckpointError(
                f"tensor {names[0]} is stored as {layout.dtype} without scales that we know; use {', '.join(known)}, "
                "or a packed table with its scales"
            )
        # Codes of 8 bits are viewed even when they stay: loading would decode them to two bytes each.
        codes = layout.quantization is None and layout.dtype == "F8_E4M3"
        views: list[HostWeight] = []
        weights: list[Weight] = []
        if resident and not codes:
            weights = [checkpoint.weight(name) for name in names]
            scales = [None if w.global_scale is None else np.array(w.global_scale) for w in weights]
        else:
            views = [checkpoint.host_weight(name) for name in names]
            scales = [v.scales if codes else v.global_scale for v in views]
            for view in () if resident else views:
                for part in (view.data, view.scales, view.biases):
                    if part is not None and part.size:
                        read_here_and_there(part)
        factors = _factors(checkpoint, prefix, names, scales, layout)
        if resident and codes:
            weights = [Weight(mx.array(view.data)) for view in views]
            views = []
        size = sum(info.nbytes for info in infos)
        log.info("a table of %d rows (%.1f GB) %s", rows, size / 1e9, "is loaded" if resident else "stays in its files")
        return cls(layout, sizes, factors, dtype, views=views, weights=weights)

    def expect(self, rows: np.ndarray) -> None:
        """Start to copy rows from the files, of which the next call will ask for some; loaded ones need no start.

        Which rows were expected changes no bit of the result. ValueError for a number outside the table.
        """
        if self.files is not None:
            self.files.expect(self._checked(np.unique(rows)))

    def __call__(self, rows: np.ndarray) -> mx.array:
        """Row numbers `[n]` to rows `[n, width]`; ValueError for a number outside the table."""
        chosen, place = np.unique(rows, return_inverse=True)
        self._checked(chosen)
        edges = np.searchsorted(chosen, self.starts)
        used = [shard for shard in range(len(edges) - 1) if edges[shard] < edges[shard + 1]]
        factors = None
        if self.factors is not None:
            factors = np.repeat(self.factors[used], [edges[shard + 1] - edges[shard] for shard in used])
        if self.files is not None:
            columns = self.files.take(chosen)
            at_once = self._at_once(columns, factors, place)
            if at_once is not None:
                return at_once
            parts = [_uploaded(column) for column in columns]
        else:
            local = [chosen[edges[shard] : edges[shard + 1]] - self.starts[shard] for shard in used]
            parts = [part for part in self._held(used, local) if part is not None]
        return self._decode(
            mx.array(place.reshape(-1).astype(np.int32)), None if factors is None else mx.array(factors), *parts
        )

    def _at_once(self, columns: list[np.ndarray], factors: np.ndarray | None, place: np.ndarray) -> mx.array | None:
        """Uploaded as one array and decoded in one launch, to the same bits; None where there is no kernel for that."""
        layout = self._layout()
        if layout is None or not len(columns[0]):
            return None
        made = mx.array(cuda.packed(layout, columns, factors, place.reshape(-1)))
        return cuda.decode(layout, made, len(columns[0]), self.dtype)

    def place(self, count: int) -> mx.array | None:
        """Memory for `count` rows that `put` fills in later; None where rows can't be put there as they are stored."""
        layout = self._layout()
        if layout is None:
            return None
        return mx.array(cuda.packed(layout, [], None, np.arange(count), count=count))

    def put(self, place: mx.array, rows: np.ndarray) -> None:
        """Copy rows by number into what `place` gave for as many: before anything that reads it is computed."""
        layout, files = self._layout(), self.files
        if layout is None or files is None:
            raise RuntimeError("rows were to be put where no kernel decodes them")
        chosen, which = np.unique(rows, return_inverse=True)
        columns = [column[which] for column in files.take(self._checked(chosen))]
        factors = None
        if self.factors is not None:
            factors = self.factors[np.searchsorted(self.starts, rows, side="right") - 1]
        cuda.put(layout, place, columns, factors)

    def put_rows(self, place: mx.array, count: int) -> mx.array:
        """The `count` rows that were put there, `[count, width]`, decoded in one launch to the bits of a call."""
        layout = self._layout()
        if layout is None:
            raise RuntimeError("rows were put where no kernel decodes them")
        return cuda.decode(layout, place, count, self.dtype)

    def _layout(self) -> cuda.Rows | None:
        """How rows of the files lie in memory for the kernel that decodes them; None where there is none."""
        if device.cuda() is None or self.files is None:
            return None
        how = self.layout.quantization
        return cuda.rows_of(
            self.layout.dtype if how is None else how.mode,
            self.layout.width,
            0 if how is None else how.bits,
            0 if how is None else how.group_size,
            [(size, str(name)) for size, name in self.files.parts],
            factor=self.factors is not None,
            dtype=self.dtype,
        )

    def _checked(self, chosen: np.ndarray) -> np.ndarray:
        """Ascending numbers that are all in the table."""
        if chosen.size and not 0 <= chosen[0] <= chosen[-1] < self.starts[-1]:
            raise ValueError(f"rows {chosen[0]} … {chosen[-1]} of a table of {self.starts[-1]}")
        return chosen

    def _held(self, used: list[int], local: list[np.ndarray]) -> list[mx.array | None]:
        """Chosen rows and their scales and zero points, from loaded shards."""
        indices = [mx.array(index.astype(np.int32)) for index in local]
        found: list[mx.array | None] = []
        for which in range(3):
            column = [self.weights[shard][which] for shard in used]
            parts = [part[index] for part, index in zip(column, indices, strict=True) if part is not None]
            found.append(mx.concatenate(parts) if parts else None)
        return found

    def _decode(
        self,
        place: mx.array,
        factors: mx.array | None,
        data: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
    ) -> mx.array:
        """Rows `place` of those that were chosen, from what is stored of these and one factor for each."""
        how = self.layout.quantization
        if how is None:
            if self.layout.dtype != "F8_E4M3":
                return data.astype(self.dtype)[place]
            kind: dict[str, Any] = {"mode": "e4m3", "bits": 8, "group_size": 0}
        else:
            if scales is None:
                raise CheckpointError("a packed table has no scales")
            data = data if data.dtype == mx.uint32 else data.view(mx.uint32)
            kind = {"mode": how.mode, "bits": how.bits, "group_size": how.group_size}
        return decoded_rows(data, scales, biases, place, **kind, dtype=self.dtype, factors=factors)


def _uploaded(rows: np.ndarray) -> mx.array:
    if rows.dtype == ml_dtypes.bfloat16:
        return mx.array(rows.view(np.uint16)).view(mx.bfloat16)
    return mx.array(rows)


def _factors(
    checkpoint: Checkpoint, prefix: str, names: Sequence[str], scales: Sequence[np.ndarray | None], layout: Layout
) -> np.ndarray | None:
    """One factor per shard: its own, or that of the whole table; 8-bit codes must have one of the two, plain numbers
    none.
    """
    own = [scale for scale in scales if scale is not None]
    whole = [f"{prefix}.{name}" for name in TABLE_SCALES if f"{prefix}.{name}" in checkpoint]
    if (own and (whole or len(own) < len(scales))) or len(whole) > 1:
        raise CheckpointError(
            f"the table {prefix} has factors for {len(own)} of its {len(scales)} shards, and for all of it "
            f"{', '.join(whole) or 'none'}: expected one for the table, or one for each shard"
        )
    if layout.quantization is None and layout.dtype != "F8_E4M3":
        if whole:
            raise CheckpointError(
                f"the table {prefix} is stored as {layout.dtype}, plain numbers, and yet has a factor, {whole[0]}: "
                "it was decoded without removing it, or its codes were lost; use the original model"
            )
        return None
    if not own and not whole:
        if layout.quantization is None:
            raise CheckpointError(
                f"the table {prefix} is stored as 8-bit codes, but has no {prefix}.{TABLE_SCALES[0]}; without that "
                "factor every answer would be wrong"
            )
        log.info("the table %s has no factor beside its scales: it is taken as 1", prefix)
        return None
    values = [np.asarray(scale, np.float32).reshape(-1) for scale in own or [checkpoint.host(whole[0])]]
    for name, value in zip(names if own else whole, values, strict=True):
        if value.size != 1 or not np.isfinite(value[0]):
            raise CheckpointError(f"the factor of {name} should be one number, found {value.size}: {value[:4]}")
    factors = np.concatenate(values)
    return factors if own else np.repeat(factors, len(names))

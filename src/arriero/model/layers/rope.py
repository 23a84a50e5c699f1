"""Rotary positions: the frequencies of every scaling that we honour, and their tables by absolute position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.errors import CheckpointError
from arriero.kernels import device
from arriero.kernels.cuda.attention import LONGEST, give_angles
from arriero.kernels.rope import normed_rope, rope
from arriero.model.contract import Batch
from arriero.model.layers.config import LARGEST, Fields

BLOCK = 1024
"""Positions of one block of a table."""
HELD = 4
"""Blocks by which a table that is held on the device grows."""
DEVICE_BLOCKS = 64
"""Blocks of a table that stay on an NVIDIA GPU for prompts: up to 65,536 positions, 32 MB for heads of 128."""

COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
AXES = {"mrope_section", "mrope_interleaved"}
"""Which frequencies follow which axis of an image; in text all axes have the same positions."""
KINDS: dict[str, set[str]] = {
    "default": set(),
    "linear": set(),
    "proportional": set(),
    "llama3": {"low_freq_factor", "high_freq_factor"},
    "llama3_factors": {"factors"},
    "yarn": {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
        "max_position_embeddings",
    },
}
"""Each kind of `rope_type` with its own fields; a field outside is refused."""


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding as the configuration declares it."""

    theta: float
    kind: str = "default"
    partial: float = 1.0
    parameters: Mapping[str, Any] | None = None
    context_length: int = 0
    """What `original_max_position_embeddings` defaults to."""
    sections: tuple[int, ...] | None = None
    """How many frequencies follow each axis (time, height, width), interleaved; None where it isn't said."""

    @classmethod
    def read(
        cls,
        fields: Fields,
        *,
        theta: float,
        context_length: int,
        layer_type: str | None = None,
        partial: float = 1.0,
        axes: bool = False,
    ) -> RopeConfig:
        """From `rope_parameters` (by layer type where it is so) or from `rope_scaling` and `rope_theta`.

        `theta` and `partial` are the architecture's defaults; `axes` allows for positions of several axes.
        CheckpointError names an unknown kind or a field that we do not honour.
        """
        nested = fields.section("rope_parameters")
        legacy = fields.section("rope_scaling")
        base = fields.number("rope_theta", theta)
        partial = fields.number("partial_rotary_factor", partial)
        where, values = "rope_parameters", nested
        if nested is not None and any(isinstance(v, dict) for v in nested.values()):
            where = f"rope_parameters.{layer_type}"
            values = nested.get(layer_type or "full_attention") or {}
        if not values:
            where, values = "rope_scaling", legacy
        sections = read_sections(Fields(values or {}, f"config.json: {where}")) if axes else None
        values = {name: value for name, value in (values or {}).items() if not (axes and name in AXES)}
        found = cls.of(values, where=where, theta=base, partial=partial, context_length=context_length)
        return replace(found, sections=sections)

    @classmethod
    def of(
        cls, values: Mapping[str, Any], *, where: str, theta: float, partial: float, context_length: int
    ) -> RopeConfig:
        """From one object of parameters, checked."""
        fields = Fields(values, f"config.json: {where}")
        kind = fields.get("rope_type") or fields.get("type") or "default"
        if not isinstance(kind, str) or kind not in KINDS:
            raise CheckpointError(
                f"config.json: {where} asks for rope type {kind!r}, which is not supported (known: {', '.join(KINDS)})"
            )
        unknown = sorted(
            name for name, value in values.items() if name not in COMMON | KINDS[kind] and value not in (None, False)
        )
        if unknown:
            raise CheckpointError(f"config.json: {where} has {', '.join(unknown)}, which {kind} rope does not honour")
        theta = fields.number("rope_theta", theta)
        partial = fields.number("partial_rotary_factor", partial)
        if not 0 < partial <= 1:
            raise fields.wrong("partial_rotary_factor", "a number in (0, 1]", partial)
        return cls(theta, kind, partial, dict(values), context_length)

    @property
    def extended_length(self) -> int:
        """The context that the scaling was declared for, in tokens; 0 where it says nothing."""
        values = self.parameters or {}
        original, factor = values.get("original_max_position_embeddings"), values.get("factor")
        if self.kind != "yarn" or not original or not factor:
            return 0
        return int(min(original * factor, LARGEST))

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies, float64 `[R / 2]`, and the magnitude that multiplies the rotated elements."""
        fields = Fields(self.parameters or {}, f"config.json: {self.kind} rope")
        rotated = int(head_dim * self.partial)
        if rotated % 2 or rotated < 2:
            raise CheckpointError(f"rotary embedding of {rotated} of {head_dim} elements: the number must be even")
        inverse = 1.0 / self.theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        if self.kind == "linear":
            return inverse / fields.number("factor"), 1.0
        if self.kind == "proportional":
            full = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
            full[int(self.partial * head_dim // 2) :] = 0.0
            return full / fields.number("factor", 1.0), 1.0
        if self.kind == "llama3":
            return _llama3(inverse, fields), 1.0
        if self.kind == "llama3_factors":
            factors = fields.get("factors")
            if not isinstance(factors, list) or len(factors) != inverse.size:
                raise fields.wrong("factors", f"a list of {inverse.size} numbers", factors)
            return inverse / np.asarray(factors, np.float64), 1.0
        if self.kind == "yarn":
            return _yarn(inverse, self.theta, rotated, fields, self.context_length)
        return inverse, 1.0


class Rope:
    """Rotates the queries and keys of packed tokens by their absolute positions.

    Tables are made once, in blocks of positions and in double precision, so that a token's angles depend on nothing but
    its position.
    """

    def __init__(self, config: RopeConfig, head_dim: int, *, interleaved: bool = False) -> None:
        self.config = config
        self.inverse, self.magnitude = config.frequencies(head_dim)
        self.interleaved = interleaved
        self._axes: np.ndarray | None = None
        if config.sections is not None:
            self._axes = axes_of(config.sections, self.inverse.size)
        self._blocks: dict[int, np.ndarray] = {}
        self._held: mx.array | None = None
        self._device: dict[int, mx.array] = {}

    def __call__(self, x: mx.array, batch: Batch) -> mx.array:
        """x `[T, heads, D]`, rotated, in its dtype."""
        return rope(x, self.angles(batch), interleaved=self.interleaved)

    def normed(self, x: mx.array, norm: tuple[mx.array, float], batch: Batch) -> mx.array:
        """The same behind the norm of each head, its gain and epsilon given: one operation on some devices."""
        return normed_rope(x, norm, self.angles(batch), interleaved=self.interleaved)

    def angles(self, batch: Batch) -> mx.array:
        """The table of a batch's tokens, made once a forward."""
        key = ("rope", self)
        found: mx.array | None = batch.memo.get(key)
        if found is None:
            coordinates = batch.coordinates
            if coordinates is None and batch.tokens.shape[0] > LONGEST and device.cuda() is not None:
                found = self._of_blocks(batch)
                give_angles(batch.memo, found)
            else:
                found = mx.array(self.table(batch.positions) if coordinates is None else self.axes_table(coordinates))
            batch.memo[key] = found
        return found

    def _of_blocks(self, batch: Batch) -> mx.array:
        """The table of a prompt's tokens out of what is in the device's own memory: 0.4 ms for a chunk else (H200)."""
        parts: list[mx.array] = []
        for span in batch.spans:
            end = span.position + span.length
            for index in range(span.position // BLOCK, -(-end // BLOCK)):
                start = index * BLOCK
                if index not in self._device:
                    if len(self._device) == DEVICE_BLOCKS:
                        self._device.pop(next(iter(self._device)))
                    self._device[index] = mx.array(self._block(index)) + mx.zeros((1,))
                    mx.eval(self._device[index])
                parts.append(self._device[index][max(0, span.position - start) : end - start])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def axes_table(self, coordinates: np.ndarray) -> np.ndarray:
        """As `table`, of positions on several axes `[axes, T]`, each frequency by its own axis.

        Where the axes agree, as in text, the bits are those of `table`. ValueError when the configuration doesn't say
        which frequency follows which axis.
        """
        if self._axes is None:
            raise ValueError("positions of several axes for a rope that has one")
        table = self.table(coordinates[0])
        for axis in range(1, coordinates.shape[0]):
            chosen = self._axes == axis
            table[:, chosen] = self.table(coordinates[axis])[:, chosen]
        return table

    def table(self, positions: np.ndarray) -> np.ndarray:
        """Cosines and sines, float32 `[T, R / 2, 2]`, of absolute positions `[T]`."""
        blocks = positions // BLOCK
        if positions.size and (blocks == blocks[0]).all():
            rows: np.ndarray = self._block(int(blocks[0]))[positions % BLOCK]
            return rows
        out = np.empty((positions.size, self.inverse.size, 2), np.float32)
        for index in np.unique(blocks):
            chosen = blocks == index
            out[chosen] = self._block(int(index))[positions[chosen] % BLOCK]
        return out

    def held(self, positions: int) -> mx.array:
        """The table of all positions up to at least `positions`, in the device's own memory: `[n, R / 2, 2]`."""
        blocks = -(-positions // (HELD * BLOCK)) * HELD
        if self._held is None or self._held.shape[0] < blocks * BLOCK:
            parts = np.concatenate([self._block(index) for index in range(blocks)])
            # What the host made stays in managed memory until an operation has written it.
            self._held = mx.array(parts) + mx.zeros((1,))
            mx.eval(self._held)
        return self._held

    def _block(self, index: int) -> np.ndarray:
        if index not in self._blocks:
            angles = np.arange(index * BLOCK, (index + 1) * BLOCK, dtype=np.float64)[:, None] * self.inverse
            table = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * self.magnitude
            self._blocks[index] = table.astype(np.float32)
        return self._blocks[index]


def read_sections(fields: Fields) -> tuple[int, ...] | None:
    """`mrope_section`; CheckpointError for another arrangement than interleaved ones."""
    sections = fields.get("mrope_section")
    if sections is None:
        return None
    if not isinstance(sections, list) or len(sections) != 3 or any(type(n) is not int or n < 0 for n in sections):
        raise fields.wrong("mrope_section", "three whole numbers", sections)
    if not fields.flag("mrope_interleaved", True):
        raise fields.wrong("mrope_interleaved", "true", False)
    return tuple(sections)


def axes_of(sections: tuple[int, ...], count: int) -> np.ndarray:
    """The axis of each of `count` frequencies: by turns while an axis has some left, the rest is the first's."""
    if sum(sections) != count:
        raise CheckpointError(
            f"mrope_section {list(sections)} sums to {sum(sections)}, but the rotary embedding has {count} frequencies"
        )
    axes = np.zeros(count, np.int64)
    for axis in range(1, len(sections)):
        axes[axis : len(sections) * sections[axis] : len(sections)] = axis
    return axes


def _llama3(inverse: np.ndarray, fields: Fields) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, a blend between."""
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    original = fields.integer("original_max_position_embeddings")
    if high <= low:
        raise fields.wrong("high_freq_factor", f"more than low_freq_factor ({low:g})", high)
    turns = original * inverse / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled: np.ndarray = (1 - smooth) * inverse / factor + smooth * inverse
    return scaled


def _yarn(
    inverse: np.ndarray, theta: float, rotated: int, fields: Fields, context_length: int
) -> tuple[np.ndarray, float]:
    """Source: Peng et al., YaRN, 2023."""
    original = fields.integer("original_max_position_embeddings", context_length or 4096)
    factor = fields.number("factor", max(1.0, context_length / original))
    fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    mscale, mscale_all = fields.get("mscale"), fields.get("mscale_all_dim")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.has("attention_factor"):
        attention = fields.number("attention_factor")
    elif mscale and mscale_all:
        attention = magnitude(fields.number("mscale")) / magnitude(fields.number("mscale_all_dim"))
    else:
        attention = magnitude(1.0)
    if factor <= 1:
        return inverse, attention

    def dimension(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rotated // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return inverse / factor * ramp + inverse * (1 - ramp), attention

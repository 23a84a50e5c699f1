"""Blocks of a draft behind few new states, as one compiled graph on NVIDIA GPUs.

Built layer by layer a block costs the host several times what the GPU needs for it. Here the kernels of attention write
the keys of new states and of the block into the caches' own memory, so that nothing in the graph has the row's length
in its shape: where the row stands is data. New states are always `STATES`, of which the first may be nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import attention as cuda
from arriero.kernels.cuda.source import argument
from arriero.model.contract import Batch, Cache, Span
from arriero.runner.caches.linear import LinearCache

if TYPE_CHECKING:
    from arriero.model.drafts.dflash import BlockDraft

STATES = 8
"""New states that come with a block, at most."""
GROWTH = 1024
"""Positions by which caches grow: each size of theirs is compiled anew."""
LAYOUTS = 16
"""Places of buffers that are kept on the device."""
PLACED = "placed block"
"""The key of a batch's memo under which `Placed` is."""

OFFSET = (0, 0, 1, 0, 1, 0, 0, 0)
"""What the row's offset adds to each number of a group, as attention.cu names them."""


@dataclass(frozen=True, eq=False, slots=True)
class Placed:
    """Where a block stands while its graph is built."""

    context: mx.array
    """`[STATES, hidden]`."""
    angles: mx.array
    """Of the context's rows and of the block's, `[STATES + n, R / 2, 2]`."""
    groups: Sequence[mx.array]
    """Of each layer's buffers, int32 `[8]`."""
    buffers: Sequence[Sequence[mx.array]]
    """Of each layer, keys and values."""


class PlacedBlocks:
    """The blocks of one draft."""

    def __init__(self, draft: BlockDraft) -> None:
        self._draft = draft
        self._rows = draft.config.block
        self._fits = _fits(draft)
        self._run: Callable[[list[mx.array]], list[mx.array]] = mx.compile(self._graph)
        self._next: tuple[int, mx.array] | None = None
        """The offset that the latest block left on the device, and which it is."""
        self._counts: dict[int, mx.array] = {}
        self._layouts: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._fixed: list[mx.array] = []
        """Masks, steps from the last state's position, and `OFFSET`."""

    def __call__(self, span: Span, states: mx.array, anchor: mx.array, count: int) -> list[mx.array] | None:
        """What `prepared` makes of a block behind `states` and `anchor`, and the states are committed.

        None, and nothing done, for what must be built layer by layer.
        """
        gpu = device.cuda()
        caches = _linear(span.caches)
        if (
            gpu is None
            or not gpu.in_place
            or not self._fits
            or count + 1 != self._rows
            or not 0 < span.length <= STATES
            or states.dtype != mx.bfloat16
            or span.layout is not None
            or caches is None
        ):
            return None
        new = span.length + self._rows
        held = [cache.reserve_in_place(new if cache.room >= new else GROWTH) for cache in caches]
        inputs = [
            anchor.astype(mx.int32),
            states if span.length == STATES else mx.pad(states, [(STATES - span.length, 0), (0, 0)]),
            self._offset(span.position),
            self._count(span.length),
            self._draft.layers[0].attention.rope.held(span.position + new),
        ]
        inputs += [self._layout(base, keys.shape[2]) for keys, _, base in held]
        inputs += [buffer for keys, values, _ in held for buffer in (keys, values)]
        *found, offset = self._run(inputs)
        self._next = span.position + span.length, offset
        for cache in caches:
            cache.commit_in_place(span.length, found[-1])
        return found

    def _graph(self, inputs: list[mx.array]) -> list[mx.array]:
        """The block: what `prepared` makes of it, and the offset behind its states."""
        draft, layers = self._draft, len(self._draft.layers)
        anchor, states, offset, count, table, *rest = inputs
        layouts, buffers = rest[:layers], rest[layers:]
        masks, steps, scale = self._fixed
        positions = mx.maximum(offset[:1] + count[2:3] + steps, 0)
        placed = Placed(
            draft.context(states),
            mx.take(table, positions, axis=0),
            [offset * scale + count + layout for layout in layouts],
            [buffers[2 * slot : 2 * slot + 2] for slot in range(layers)],
        )
        tokens = mx.concatenate([anchor, masks])
        batch = Batch(tokens, [Span(0, self._rows, 0, ())], memo={PLACED: placed})
        x = draft.embed(tokens)
        for slot, layer in enumerate(draft.layers):
            x = layer(x, batch, slot)
        return [*draft.prepared(draft.norm(x)[1:], anchor), offset + count[2:3]]

    def _offset(self, position: int) -> mx.array:
        """The row's offset: that which the block before left on the device, or a new one from the host."""
        if not self._fixed:
            masks = argument(mx.full((self._rows - 1,), self._draft.config.mask, mx.int32))[: self._rows - 1]
            steps = argument(mx.arange(-STATES, self._rows, dtype=mx.int32))
            self._fixed = [masks, steps, _on_device(OFFSET)]
            mx.eval(self._fixed)
        before, self._next = self._next, None
        if before is not None and before[0] == position:
            return before[1]
        return argument(mx.full((8,), position, mx.int32))

    def _count(self, states: int) -> mx.array:
        """What so many new states add to each number of a group: the rows before them stand for nothing."""
        if states not in self._counts:
            self._counts[states] = _on_device((STATES, self._rows, states, STATES - states, 0, 0, 0, 0))
        return self._counts[states]

    def _layout(self, base: int, capacity: int) -> mx.array:
        """What buffers add to each number of a group."""
        key = base, capacity
        if key not in self._layouts:
            self._layouts[key] = _on_device((0, 0, -base, 0, -base, capacity, 0, 0))
            if len(self._layouts) > LAYOUTS:
                self._layouts.popitem(last=False)
        return self._layouts[key]


def _linear(caches: Sequence[Cache | None]) -> list[LinearCache] | None:
    """The caches where all are of keys and values."""
    found: list[LinearCache] = []
    for cache in caches:
        if not isinstance(cache, LinearCache):
            return None
        found.append(cache)
    return found


def _on_device(numbers: Sequence[int]) -> mx.array:
    made = argument(mx.array(list(numbers), mx.int32))
    mx.eval(made)
    return made


def _fits(draft: BlockDraft) -> bool:
    """Whether the kernel of attention takes a draft's layers, a whole block as one group."""
    config = draft.config
    rope = draft.layers[0].attention.rope
    return (
        not config.laguna
        and not config.interleaved
        and draft.target.facts.dtype == mx.bfloat16
        and all(layer.attention.all_three is not None for layer in draft.layers)
        and all(
            shape.head_dim in cuda.HEAD_DIMS
            and shape.heads % shape.kv_heads == 0
            and rope.inverse.size * 2 == shape.head_dim
            and config.block * shape.per_head <= cuda.LINES
            and config.block <= cuda.tokens_of(shape, config.block)
            # What a window hides from the whole block would not be written.
            and (shape.window is None or shape.window > STATES)
            for shape in (layer.attention.shape for layer in draft.layers)
        )
    )

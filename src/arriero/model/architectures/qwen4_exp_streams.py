"""Hyper-connections: several residual streams, of which each part of a layer reads a mix and to which it writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.kernels import device
from arriero.kernels.cuda import streams as cuda
from arriero.kernels.rms_norm import rms_norm
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.weight import Weight


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """`count` streams of `hidden` numbers; their mix is learned through `rank`."""

    count: int
    hidden: int
    rank: int
    eps: float

    @property
    def width(self) -> int:
        """Of all streams together."""
        return self.count * self.hidden


class StreamNorm:
    """`x / rms(x) · gain` of each stream by itself: x `[T, streams, hidden]`, in its dtype."""

    def __init__(self, gain: mx.array, eps: float) -> None:
        self.gain = gain
        self.eps = eps

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: StreamsConfig, *, baked: bool) -> Self:
        """`prefix.weight` `[streams · hidden]`, stored around 0 unless the file is `baked`; the gain is float32."""
        weight = checkpoint.tensor(f"{prefix}.weight")
        expect_shape(f"{prefix}.weight", tuple(weight.shape), (config.width,))
        gain = weight.astype(mx.float32).reshape(config.count, config.hidden)
        return cls(gain if baked else gain + 1, config.eps)

    def __call__(self, x: mx.array) -> mx.array:
        return (rms_norm(x.astype(mx.float32), None, self.eps) * self.gain).astype(x.dtype)


@dataclass(slots=True)
class Written:
    """Streams to which a part's result has not been added yet: whoever norms them next does both at once."""

    streams: mx.array
    y: mx.array
    weights: mx.array
    total: mx.array | None = None
    """The sum, once somebody has made it."""


Streams = mx.array | Written
"""Residual streams `[T, streams, hidden]`."""


def settled(streams: Streams) -> mx.array:
    """With everything added that was written."""
    if not isinstance(streams, Written):
        return streams
    if streams.total is None:
        streams.total = _written(streams.streams, streams.y[:, None], streams.weights[..., None])
    return streams.total


class StreamReader:
    """What a part of a layer takes from the streams, and the weight with which its result goes back to each.

    With n the normed streams and C their number: `mixed = Σ σ(up(silu(down(n) / C))) · n / C` over the streams, and
    `weights = 2σ(inject(n) / C)`. A reader without `inject` only reads. Source: Zhu et al., Hyper-Connections, 2024.
    """

    def __init__(
        self, config: StreamsConfig, norm: StreamNorm, down: Linear, up: Linear, inject: Linear | None
    ) -> None:
        self.config = config
        self.norm = norm
        self.down = FusedLinear([down] if inject is None else [down, inject])
        self.up = up

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: StreamsConfig, *, baked: bool, writes: bool
    ) -> Self:
        """`hc_norm`, `input_mix_weight_down`, `input_mix_weight_up` and, if it `writes`, `block_inject_weight`."""

        def project(name: str, shape: tuple[int, int]) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=False, shape=shape)

        c = config
        return cls(
            config,
            StreamNorm.load(checkpoint, f"{prefix}.hc_norm", config, baked=baked),
            project("input_mix_weight_down", (c.rank, c.width)),
            project("input_mix_weight_up", (c.width, c.rank)),
            project("block_inject_weight", (c.count, c.width)) if writes else None,
        )

    def mixed(self, streams: Streams) -> mx.array:
        """Streams `[T, streams, hidden]` to `[T, hidden]`."""
        return self.read(streams)[0]

    def read(self, streams: Streams) -> tuple[mx.array, mx.array]:
        """The mix `[T, hidden]`, and the weights `[T, streams]` for `write` (empty for one that only reads)."""
        if device.cuda() is not None and cuda.takes(streams.streams if isinstance(streams, Written) else streams):
            return self._on_cuda(streams)
        c, streams = self.config, settled(streams)
        normed = self.norm(streams)
        low, *inject = self.down(normed.reshape(-1, c.width))
        gate = self.up(_squashed(low, c.count)).reshape(normed.shape)
        weights = inject[0] if inject else low[:, :0]
        return _shares(gate, normed, c.count).sum(axis=1).astype(streams.dtype), _write_weights(weights, c.count)

    def _on_cuda(self, streams: Streams) -> tuple[mx.array, mx.array]:
        """The same in three launches for few tokens: with the write before it, the product, gates and mix."""
        c, (down, *injects) = self.config, self.down.parts
        inject = injects[0].weight if injects and injects[0].weight.quantization is None else None
        made = self._normed(streams, None if inject is None else inject.data)
        flat = made.normed.reshape(-1, c.width)
        rest: list[mx.array] = []
        if inject is not None or (not injects and len(self.down.sizes) == 1):
            matrix = _held(down.weight)
            if matrix is not None and cuda.fits_low(flat.shape[0], matrix, c.width):
                low = cuda.low_rank(flat, matrix)
            else:
                low = down(flat)
        else:
            low, *rest = self.down(flat)
        up = _held(self.up.weight)
        if up is not None and up.rank <= 1024 and flat.shape[0] <= cuda.FEW:
            mixed, weights = cuda.mix(low, made, up)
        else:
            mixed, weights = cuda.gated(self.up(_squashed(low, c.count)), made.normed), None
        if weights is None and made.shares is not None:
            rest = [made.shares.sum(axis=1).astype(flat.dtype)]
        if weights is None:
            # MLX fails on arrays without elements there.
            weights = _write_weights(rest[0], c.count) if rest else mx.zeros((flat.shape[0], 0))
        return mixed, weights

    def _normed(self, streams: Streams, inject: mx.array | None) -> cuda.Normed:
        """Adds what was written, and remembers that in `streams`."""
        norm = self.norm
        if not isinstance(streams, Written) or streams.total is not None:
            return cuda.norm(settled(streams), norm.gain, norm.eps, inject=inject)
        written = streams.y, streams.weights
        made = cuda.norm(streams.streams, norm.gain, norm.eps, written=written, inject=inject)
        streams.total = made.streams
        return made


def _held(weight: Weight) -> cuda.Up | None:
    """A matrix as the kernels take it."""
    how = weight.quantization
    return cuda.Up.of(weight.data, weight.scales, "" if how is None else how.mode, 0 if how is None else how.bits)


def write(streams: Streams, y: mx.array, weights: mx.array) -> Streams:
    """The streams with a part's result y `[T, hidden]` added, times each stream's weight."""
    written = Written(settled(streams), y, weights)
    return written if device.cuda() is not None else settled(written)


@device.fused
def _squashed(low: mx.array, count: int) -> mx.array:
    x = low.astype(mx.float32) / count
    return (x * mx.sigmoid(x)).astype(low.dtype)


@device.fused
def _shares(gate: mx.array, normed: mx.array, count: int) -> mx.array:
    return mx.sigmoid(gate.astype(mx.float32)) * normed.astype(mx.float32) / count


@device.fused
def _write_weights(inject: mx.array, count: int) -> mx.array:
    return 2 * mx.sigmoid(inject.astype(mx.float32) / count)


@device.fused
def _written(streams: mx.array, y: mx.array, weights: mx.array) -> mx.array:
    return (streams.astype(mx.float32) + weights * y.astype(mx.float32)).astype(streams.dtype)

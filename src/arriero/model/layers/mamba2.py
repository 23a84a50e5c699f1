"""The Mamba-2 mixer: a short convolution, a selective state space, and a norm of the gated result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels.activation import swiglu
from arriero.kernels.cuda.mamba2 import Heads
from arriero.kernels.mamba2 import mamba2_rows
from arriero.kernels.rms_norm import rms_norm
from arriero.kernels.spans import Carried, Stops
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.delta_net import load_taps
from arriero.model.layers.linear import Linear, expect_shape
from arriero.model.layers.recurrent import recur
from arriero.runner.caches.state import RecurrentCache


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Shape of one mixer; consecutive heads share what they write along and read by."""

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    """Numbers that a channel of a head remembers."""
    taps: int
    eps: float
    bias: bool = False
    """Of the projections."""
    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, float("inf"))
    """Of the time step."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, writes and reads."""
        return self.inner + 2 * self.groups * self.state

    def cache_bytes(self, dtype: mx.Dtype) -> int:
        """Bytes that a row takes however long it is."""
        return (self.taps - 1) * self.channels * dtype.size + self.inner * self.state * mx.float32.size


class Mamba2:
    """One projection to gate, convolution and time steps; convolution, state space; `rms_norm(y · silu(gate)) · gain`
    per group, output projection.

    Decay, state and norm are float32 whatever the activations are. Source: Dao and Gu, Transformers are SSMs, 2024.
    """

    def __init__(
        self,
        config: Mamba2Config,
        dtype: mx.Dtype,
        *,
        inputs: Linear,
        taps: mx.array,
        conv_bias: mx.array | None,
        rate: mx.array,
        bias: mx.array,
        skip: mx.array,
        gain: mx.array,
        out: Linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.inputs = inputs
        self.taps = taps
        self.conv_bias = conv_bias
        self.rate = rate
        self.bias = bias
        self.skip = skip
        self.gain = gain
        self.out = out

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: Mamba2Config) -> Self:
        """Tensors under `prefix`, e.g. `backbone.layers.0.mixer`."""
        c = config

        def vector(name: str, width: int) -> mx.array:
            """GGUF files hold vectors as columns, and the gain by groups."""
            values = checkpoint.tensor(f"{prefix}.{name}")
            if checkpoint.dialect == "gguf" and values.size == width:
                values = values.reshape(width)
            expect_shape(f"{prefix}.{name}", tuple(values.shape), (width,))
            return values.astype(mx.float32)

        log_rate = vector("A_log", c.heads)
        conv_bias = vector("conv1d.bias", c.channels).astype(dtype) if c.conv_bias else None
        if conv_bias is None and f"{prefix}.conv1d.bias" in checkpoint:
            raise CheckpointError(
                f"the checkpoint holds {prefix}.conv1d.bias, but its configuration says that convolutions have none "
                "(use_conv_bias: false)"
            )
        return cls(
            config,
            dtype,
            inputs=Linear.load(
                checkpoint, f"{prefix}.in_proj", dtype, bias=c.bias, shape=(c.inner + c.channels + c.heads, c.hidden)
            ),
            taps=load_taps(checkpoint, f"{prefix}.conv1d.weight", dtype, c.channels, c.taps),
            conv_bias=conv_bias,
            # GGUF files hold −exp(A_log).
            rate=-log_rate if checkpoint.dialect == "gguf" else mx.exp(log_rate),
            bias=vector("dt_bias", c.heads),
            skip=vector("D", c.heads),
            gain=vector("norm.weight", c.inner),
            out=Linear.load(checkpoint, f"{prefix}.out_proj", dtype, bias=c.bias, shape=(c.hidden, c.inner)),
        )

    def new_cache(self) -> RecurrentCache:
        """The last inputs of the convolution, and the state of each head."""
        c = self.config
        return RecurrentCache(c.taps - 1, c.channels, self.dtype, (c.heads, c.head_dim, c.state))

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        c = self.config
        rows = self.inputs(x)
        gate, convolved, _ = mx.split(rows, [c.inner, c.inner + c.channels], axis=-1)

        def rule(mixed: mx.array, *, states: Sequence[mx.array], lengths: Sequence[int], stops: Stops) -> Carried:
            return mamba2_rows(
                mixed,
                rows,
                Heads(c.heads, c.head_dim, c.groups, c.state),
                dt_at=c.inner + c.channels,
                rate=self.rate,
                bias=self.bias,
                skip=self.skip,
                states=states,
                lengths=lengths,
                stops=stops,
                limits=c.limits,
            )

        y = recur(convolved, batch, slot, taps=self.taps, bias=self.conv_bias, rule=rule)
        gated = swiglu(gate.astype(mx.float32), y.reshape(-1, c.inner).astype(mx.float32))
        normed = rms_norm(gated.reshape(-1, c.groups, c.inner // c.groups), None, c.eps).reshape(-1, c.inner)
        return self.out((normed * self.gain).astype(x.dtype))

"""The gated delta net: linear attention with a short convolution, a decaying state and a gated output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import mlx.core as mx

from arriero.errors import CheckpointError
from arriero.kernels import device
from arriero.kernels.cuda.gated_delta import Around, Heads
from arriero.kernels.delta_part import DeltaPart
from arriero.kernels.gated_delta import gated_delta_rows
from arriero.kernels.gated_norm import gated_norm
from arriero.kernels.spans import Carried, Stops
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch
from arriero.model.layers.config import Fields
from arriero.model.layers.linear import FusedLinear, Linear, expect_shape
from arriero.model.layers.norm import RMSNorm
from arriero.model.layers.recurrent import recur
from arriero.runner.caches.state import RecurrentCache


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Shape of one gated delta net; consecutive value heads share a key head."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    gate: Literal["silu", "sigmoid"] = "silu"
    """What the output is multiplied by, of `z`."""

    @classmethod
    def read(cls, fields: Fields, *, hidden: int, eps: float, gate: Literal["silu", "sigmoid"] = "silu") -> Self:
        """From the `linear_*` fields; CheckpointError names one that is missing or contradicts another."""
        key_heads, value_heads = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
        if value_heads % key_heads:
            raise fields.wrong(
                "linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})", value_heads
            )
        return cls(
            hidden=hidden,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=fields.integer("linear_key_head_dim"),
            value_dim=fields.integer("linear_value_head_dim"),
            taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
            eps=eps,
            gate=gate,
        )

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def cache_bytes(self, dtype: mx.Dtype) -> int:
        """Bytes that a row takes however long it is."""
        return (self.taps - 1) * self.channels * dtype.size + self.value_width * self.key_dim * mx.float32.size


class GatedDeltaNet:
    """Projections, convolution, delta rule, `rms_norm(y) · gain · gate(z)` per value head, output projection.

    Decay, write strength, state and norm are float32 whatever the activations are. Source: Yang, Kautz and
    Hatamizadeh, Gated Delta Networks, 2024.
    """

    def __init__(
        self,
        config: DeltaNetConfig,
        dtype: mx.Dtype,
        *,
        inputs: Sequence[Linear],
        taps: mx.array,
        rate: mx.array,
        bias: mx.array,
        gain: mx.array,
        out: Linear,
    ) -> None:
        """`inputs` are the projections to q, k and v together, to z, to b and to a."""
        qkv, z, b, a = inputs
        self.config = config
        self.dtype = dtype
        self.inputs = [FusedLinear([qkv, z, b, a])] if device.native() is None else []
        if not self.inputs or len(self.inputs[0].parts) > 1:
            self.inputs = [FusedLinear([qkv, z]), FusedLinear([b, a])]
        self.taps = taps
        self.rate = rate
        self.bias = bias
        self.gain = gain
        self.out = out
        self.surround()

    def surround(self, before: RMSNorm | None = None) -> None:
        """Take in the norm that stands before it: from now on calls include it."""
        c = self.config
        self.before = before
        self.part = DeltaPart(
            [matrix for inputs in self.inputs for matrix in inputs.matrices],
            self.out.matrix,
            self.heads,
            Around(self.taps, self.gain, c.eps, c.gate == "silu"),
            self.rate,
            self.bias,
            before=None if before is None else before.pair,
        )

    @property
    def heads(self) -> Heads:
        """As kernels take their numbers and widths."""
        c = self.config
        return Heads(c.key_heads, c.value_heads, c.key_dim, c.value_dim)

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: DeltaNetConfig) -> Self:
        """Tensors under `prefix`, e.g. `model.layers.0.linear_attn`."""
        c = config

        def vector(name: str, width: int) -> mx.array:
            values = checkpoint.tensor(f"{prefix}.{name}")
            expect_shape(f"{prefix}.{name}", tuple(values.shape), (width,))
            return values.astype(mx.float32)

        log_rate = vector("A_log", c.value_heads)
        return cls(
            config,
            dtype,
            inputs=load_inputs(checkpoint, prefix, dtype, config),
            taps=load_taps(checkpoint, f"{prefix}.conv1d.weight", dtype, c.channels, c.taps),
            # GGUF files hold −exp(A_log).
            rate=-log_rate if checkpoint.dialect == "gguf" else mx.exp(log_rate),
            bias=vector("dt_bias", c.value_heads),
            gain=vector("norm.weight", c.value_dim),
            out=Linear.load(checkpoint, f"{prefix}.out_proj", dtype, bias=False, shape=(c.hidden, c.value_width)),
        )

    def new_cache(self) -> RecurrentCache:
        """The last inputs of the convolution, and the state of each value head."""
        c = self.config
        return RecurrentCache(c.taps - 1, c.channels, self.dtype, (c.value_heads, c.value_dim, c.key_dim))

    def __call__(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        caches: list[RecurrentCache] = batch.caches(slot)
        lengths = [span.length for span in batch.spans]
        if not self.part.fits(x.dtype, lengths):
            return self._by_operations(x if self.before is None else self.before(x), batch, slot)
        y, made = self.part(
            x,
            held=[(tail, state) for tail, state in (cache.get() for cache in caches)],
            lengths=lengths,
            stops=[cache.splits(length) for cache, length in zip(caches, lengths, strict=True)],
        )
        for i, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
            states = zip(made.interior_tails[i], made.interior[i], strict=True)
            cache.put([*states, (made.tails[i], made.ends[i])], length, alone=True)
        return y

    def _by_operations(self, x: mx.array, batch: Batch, slot: int) -> mx.array:
        """The same behind its norm, one operation after another."""
        c = self.config
        qkv, (z, z_at), (gates, gates_at) = self._project(x)

        def rule(mixed: mx.array, *, states: Sequence[mx.array], lengths: Sequence[int], stops: Stops) -> Carried:
            return gated_delta_rows(
                mixed,
                gates,
                self.heads,
                gates_at=gates_at,
                rate=self.rate,
                bias=self.bias,
                states=states,
                lengths=lengths,
                stops=stops,
            )

        y = recur(qkv, batch, slot, taps=self.taps, rule=rule)
        return self.out(gated_norm(y, z, z_at, self.gain, c.eps, silu=c.gate == "silu"))

    def _project(self, x: mx.array) -> tuple[mx.array, tuple[mx.array, int], tuple[mx.array, int]]:
        """q, k and v together; rows that hold z, and those of b and a, each with the place where they begin."""
        c = self.config
        rows = [matrix(x) for matrix in self.part.inputs]
        joined = rows[0].shape[-1] > c.channels
        qkv = rows[0][:, : c.channels] if joined else rows[0]
        z = (rows[0], c.channels) if joined else (rows[1], 0)
        if len(self.inputs) == 1:
            return qkv, z, (rows[0], c.channels + c.value_width)
        return qkv, z, (rows[-1] if len(self.inputs[1].parts) == 1 else mx.concatenate(rows[-2:], axis=-1), 0)


def load_inputs(checkpoint: Checkpoint, prefix: str, dtype: mx.Dtype, config: DeltaNetConfig) -> list[Linear]:
    """The projections to q, k and v together, to z, to b and to a.

    Either they are there by these names, or `in_proj_qkvz` and `in_proj_ba` hold the rows of all, key head by key head.
    """
    c = config
    shared = c.value_heads // c.key_heads
    wide = shared * c.value_dim

    def project(name: str, rows: int) -> Linear:
        return Linear.load(checkpoint, f"{prefix}.{name}", dtype, bias=False, shape=(rows, c.hidden))

    def pair(fused: str, first: str, second: str, sizes: tuple[int, int]) -> list[Linear]:
        if f"{prefix}.{fused}.weight" not in checkpoint:
            return [project(first, sizes[0]), project(second, sizes[1])]
        if f"{prefix}.{first}.weight" in checkpoint:
            raise CheckpointError(
                f"the checkpoint holds {prefix}.{fused}.weight and {first}.weight, which are the same"
            )
        weight = project(fused, sum(sizes)).weight
        parts = [[c.key_dim, c.key_dim, wide], [wide]] if fused == "in_proj_qkvz" else [[shared], [shared]]
        rows = rows_of_parts([size for part in parts for size in part], c.key_heads)
        orders = [rows[: len(parts[0])], rows[len(parts[0]) :]]
        return [Linear(weight.rows(mx.concatenate(order))) for order in orders]

    return [
        *pair("in_proj_qkvz", "in_proj_qkv", "in_proj_z", (c.channels, c.value_width)),
        *pair("in_proj_ba", "in_proj_b", "in_proj_a", (c.value_heads, c.value_heads)),
    ]


def rows_of_parts(sizes: Sequence[int], groups: int) -> list[mx.array]:
    """Where the rows of each part are in a matrix that holds, group after group, all parts of a group."""
    rows = mx.arange(groups * sum(sizes)).reshape(groups, sum(sizes))
    edges = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return [part.reshape(-1) for part in mx.split(rows, edges, axis=1)]


def load_taps(checkpoint: Checkpoint, name: str, dtype: mx.Dtype, channels: int, taps: int) -> mx.array:
    """A depthwise kernel as `[K, channels]`.

    From `[channels, 1, K]`, MLX's `[channels, K, 1]` or GGUF's `[channels, K]`.
    """
    kernel = checkpoint.tensor(name)
    shape = tuple(kernel.shape)
    known = [(channels, taps)] if checkpoint.dialect == "gguf" else [(channels, 1, taps), (channels, taps, 1)]
    if shape not in known:
        raise CheckpointError(
            f"tensor {name} has shape {list(shape)}, but the configuration says {list(known[0])}; "
            "the checkpoint and its config.json do not belong together"
        )
    return mx.contiguous(kernel.reshape(channels, taps).T).astype(dtype)

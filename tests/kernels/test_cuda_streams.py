"""Hyper-connections on an NVIDIA GPU, against plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels.cuda import streams as cuda
from arriero.kernels.cuda.gpu import Gpu
from arriero.model.architectures import qwen4_exp_streams as module
from arriero.model.architectures.qwen4_exp_streams import StreamNorm, StreamReader, StreamsConfig, settled, write
from arriero.model.layers.linear import Linear
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight
from tests.helpers.cuda import SEED, error, exact, gpu, plain_mlx

__all__ = ["gpu"]

TOLERANCE = 5e-3
MXFP8 = Quantization("mxfp8", 8, 32)


def random(*shape: int, size: float = 1.0) -> mx.array:
    return mx.array(SEED.normal(0, size, shape).astype(np.float32)).astype(mx.bfloat16)


def linear(rows: int, columns: int, how: Quantization | None) -> Linear:
    dense = random(rows, columns, size=columns**-0.5 * 3)
    if how is None:
        return Linear(Weight(dense))
    w, scales = mx.quantize(dense, group_size=32, bits=8, mode="mxfp8")
    return Linear(Weight(w, how, scales))


def reader(count: int, hidden: int, rank: int, how: Quantization | None, inject: str) -> StreamReader:
    config = StreamsConfig(count, hidden, rank, 1e-6)
    gain = 1 + 0.2 * random(count, hidden).astype(mx.float32)
    injects = {"dense": None, "packed": MXFP8}
    return StreamReader(
        config,
        StreamNorm(gain, 1e-6),
        linear(rank, count * hidden, how),
        linear(count * hidden, rank, how),
        linear(count, count * hidden, injects[inject]) if inject in injects else None,
    )


def both(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    """What it gives with the kernels, and without."""
    ours = run()
    mx.eval([array for array in ours if array.size])
    with plain_mlx(monkeypatch):
        plain = run()
        mx.eval([array for array in plain if array.size])
    return ours, plain


@pytest.mark.parametrize("writes", [True, False])
def test_norms_of_what_is_written_and_the_shares_of_its_products(gpu: Gpu, writes: bool) -> None:
    tokens, count, hidden = 3, 4, 520
    x, y, inject = random(tokens, count, hidden), random(tokens, hidden), random(count, count * hidden, size=0.05)
    gain = mx.array(SEED.uniform(0.5, 1.5, (count, hidden)).astype(np.float32))
    weights = mx.array(SEED.uniform(0, 2, (tokens, count)).astype(np.float32))
    made = cuda.norm(x, gain, 1e-6, written=(y, weights) if writes else None, inject=inject)
    total = exact(x)
    if writes:
        total = total + exact(weights)[:, :, None] * exact(y)[:, None]
        assert error(made.streams, total) < TOLERANCE
        total = exact(made.streams)
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * exact(gain)
    assert error(made.normed, normed) < TOLERANCE
    assert made.shares is not None
    shares = np.einsum("tsh,csh->tsc", exact(made.normed), exact(inject).reshape(count, count, hidden))
    assert error(made.shares, shares) < 1e-5


@pytest.mark.parametrize(("tokens", "rank", "columns"), [(1, 320, 1280), (3, 7, 96), (8, 64, 2080)])
def test_products_with_a_matrix_of_few_rows(gpu: Gpu, tokens: int, rank: int, columns: int) -> None:
    x, weight = random(tokens, columns), linear(rank, columns, MXFP8).weight
    down = cuda.Up.of(weight.data, weight.scales, "mxfp8", 8)
    assert cuda.fits_low(tokens, down, columns)
    assert not cuda.fits_low(9, down, columns)
    assert down is not None
    dense = exact(mx.dequantize(weight.data, weight.scales, mode="mxfp8"))
    assert error(cuda.low_rank(x, down), exact(x) @ dense.T) < TOLERANCE


@pytest.mark.parametrize("how", [None, MXFP8])
@pytest.mark.parametrize("tokens", [1, 11])
def test_gates_and_mixes(gpu: Gpu, tokens: int, how: Quantization | None) -> None:
    count, hidden, rank = 4, 72, 320
    low, normed = random(tokens, rank, size=4.0), random(tokens, count, hidden)
    shares = mx.array(SEED.normal(0, 1, (tokens, count, count)).astype(np.float32))
    weight = linear(count * hidden, rank, how).weight
    up = cuda.Up.of(weight.data, weight.scales, "" if how is None else how.mode, 8)
    assert up is not None
    mixed, weights = cuda.mix(low, cuda.Normed(normed, normed, shares), up)
    dense = exact(weight.data) if how is None else exact(mx.dequantize(weight.data, weight.scales, mode="mxfp8"))
    x = exact(low) / count
    gate = (x / (1 + np.exp(-x))) @ dense.T
    gate = gate.reshape(tokens, count, hidden)
    assert error(mixed, (exact(normed) / (1 + np.exp(-gate))).mean(1)) < TOLERANCE
    assert weights is not None
    assert error(weights, 2 / (1 + np.exp(-exact(shares).sum(1) / count))) < TOLERANCE
    # The same where the gates are there.
    rounded = mx.array(gate.astype(np.float32)).astype(mx.bfloat16).reshape(tokens, -1)
    assert error(cuda.gated(rounded, normed), (exact(normed) / (1 + np.exp(-gate))).mean(1)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
@pytest.mark.parametrize(
    ("count", "hidden", "rank", "how", "inject"),
    [
        (4, 256, 64, MXFP8, "dense"),
        (4, 264, 96, None, "dense"),
        (2, 128, 64, MXFP8, "packed"),
        (4, 256, 64, MXFP8, "none"),
    ],
)
def test_a_part_reads_and_writes_as_plain_mlx_does(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    count: int,
    hidden: int,
    rank: int,
    how: Quantization | None,
    inject: str,
) -> None:
    first = reader(count, hidden, rank, how, "dense" if inject == "none" else inject)
    second = reader(count, hidden, rank, how, inject)
    x, y = random(tokens, count, hidden), random(tokens, hidden)

    def run() -> list[mx.array]:
        mixed, weights = first.read(x)
        streams = write(x, y, weights)
        again, more = second.read(streams)
        return [mixed, weights, settled(streams), again, more]

    ours, plain = both(monkeypatch, run)
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        if b.size:
            # Both round to bfloat16 five times on the way.
            assert error(a, exact(b)) < 1.5e-2
        else:
            assert a.shape == b.shape


def test_what_was_written_is_there_whoever_reads_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, y, weights = random(2, 4, 64), random(2, 64), mx.array(SEED.uniform(0, 2, (2, 4)).astype(np.float32))
    one = write(streams, y, weights)
    two = write(one, -y, weights)
    ours = settled(two)
    with plain_mlx(monkeypatch):
        assert not isinstance(write(streams, y, weights), module.Written)
        assert error(ours, exact(settled(write(write(streams, y, weights), -y, weights)))) < TOLERANCE
    assert error(ours, exact(streams)) < 1e-2

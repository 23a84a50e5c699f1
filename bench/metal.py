"""How long the Metal kernels take beside plain MLX on a Mac, at the shapes of real models.

    python bench/metal.py [--seconds 0.3] [--only product]

Prints for each the median time of a call in microseconds, the ratio (above 1 = ours is faster), the difference of the
two results as a part of plain MLX's, and for what reads weights GB/s of them. A kernel that is slower should go: see
docs/metal.md. Weights take turns, so that none is in a cache from the call before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from arriero.kernels import (
    activation,
    attention,
    depthwise_conv,
    embedding,
    gated_delta,
    gather_matmul,
    indexed_attention,
    quantized_matmul,
    rms_norm,
    rope,
    topk,
)
from arriero.kernels.metal import argmax as metal_argmax
from arriero.kernels.metal import attention as metal_attention
from arriero.kernels.metal import depthwise_conv as metal_conv
from arriero.kernels.metal import experts, heads, product, rows
from arriero.kernels.metal import gated_delta as metal_delta
from arriero.kernels.metal import topk as metal_topk

AT_ONCE = 16
"""Calls that are evaluated together, so that the host's part is not what is measured."""
COPIES_BYTES = 256 << 20
"""Weights of one case, more than any cache holds."""

NVFP4: dict[str, Any] = {"mode": "nvfp4", "bits": 4, "group_size": 16}
AFFINE: dict[str, Any] = {"mode": "affine", "bits": 4, "group_size": 64}
MXFP8: dict[str, Any] = {"mode": "mxfp8", "bits": 8, "group_size": 32}


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: both take the number of the call, by which they choose among copies of weights."""

    name: str
    ours: Callable[[int], mx.array]
    plain: Callable[[int], mx.array]
    nbytes: int = 0
    """Of weights that a call reads."""


def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    made = mx.random.normal(shape).astype(dtype)
    mx.eval(made)
    return made


def packed(shape: tuple[int, ...], how: dict[str, Any], small: bool) -> list[list[mx.array | None]]:
    """Copies of a random matrix or bank, with a factor for NVFP4."""
    parts = mx.quantize(normal(*shape) * 0.02, **how)
    one: list[mx.array | None] = [*parts] if len(parts) == 3 else [*parts, None]
    count = 2 if small else max(2, COPIES_BYTES // sum(part.nbytes for part in one if part is not None))
    return [[None if part is None else part + mx.zeros((1,), part.dtype) for part in one] for _ in range(count)]


def nbytes(parts: list[mx.array | None]) -> int:
    return sum(part.nbytes for part in parts if part is not None)


def products(small: bool) -> Iterator[Case]:
    """Few rows with a matrix, alone and with what goes before and after; many by decoding the matrix first."""
    depth, columns = (64, 32) if small else (4096, 12288)
    factor = mx.array(0.7)
    for name, how in (("nvfp4", NVFP4), ("affine4", AFFINE), ("mxfp8", MXFP8)):
        copies = packed((columns, depth), how, small)
        given = {**how, "global_scale": factor} if name == "nvfp4" else how
        for count in (1, 8):
            x = normal(count, depth)
            yield Case(
                f"product {name}, {count} rows, {columns} x {depth}",
                lambda i, x=x, c=copies, g=given: product.multiply(x, *c[i % len(c)], **g),
                lambda i, x=x, c=copies, g=given: quantized_matmul.graph(x, *c[i % len(c)], **g),
                nbytes(copies[0]),
            )
        many = normal(17 if small else 512, depth)

        def decoded(i: int, x: mx.array = many, c: Any = copies, g: Any = given, how: Any = how) -> mx.array:
            ids = mx.arange(columns, dtype=mx.int32)
            factors = g.get("global_scale")
            return x @ rows.take(*c[i % len(c)], ids, **how, dtype=x.dtype, factors=factors).T

        yield Case(
            f"product {name}, {many.shape[0]} rows: decoded first",
            decoded,
            lambda i, x=many, c=copies, g=given: quantized_matmul.graph(x, *c[i % len(c)], **g),
        )
    gate_up = packed((2 * columns, depth), NVFP4, small)
    x, branch, gain = normal(1, depth), normal(1, depth), normal(depth)

    def fused(i: int) -> mx.array:
        w, scales, _ = gate_up[i % len(gate_up)]
        assert w is not None
        assert scales is not None
        matrix = product.Operand(w, scales, None, "nvfp4", 4, 16, factor)
        return product.fused(x, matrix, branch=branch, norm=(gain, 1e-6), activation="silu").y

    def steps(i: int) -> mx.array:
        normed = rms_norm.graph(x + branch, gain, 1e-6)
        both = quantized_matmul.graph(normed, *gate_up[i % len(gate_up)], **NVFP4, global_scale=factor)
        return activation.swiglu_graph(*mx.split(both, 2, axis=-1))

    yield Case("norm, gate and up, silu", fused, steps, nbytes(gate_up[0]))


def mixtures(small: bool) -> Iterator[Case]:
    """Gate and up of the experts of one token and of eight."""
    count, columns, depth = (4, 16, 64) if small else (128, 1536, 2048)
    copies = packed((count, columns, depth), NVFP4, True)
    factors = mx.full((count,), 0.7)
    for tokens in (1, 8):
        x = normal(tokens, depth)
        chosen = (mx.arange(tokens * 4, dtype=mx.uint32) * 37 % count).astype(mx.uint32).reshape(tokens, 4)

        def ours(i: int, x: mx.array = x, chosen: mx.array = chosen) -> mx.array:
            w, scales, _ = copies[i % 2]
            assert w is not None
            assert scales is not None
            bank = product.Operand(w, scales, None, "nvfp4", 4, 16, factors)
            return experts.multiply(x, bank, chosen, activation="silu")

        def plain(i: int, x: mx.array = x, chosen: mx.array = chosen) -> mx.array:
            both = gather_matmul.quantized_graph(x, *copies[i % 2], indices=chosen, **NVFP4, global_scale=factors)
            return activation.swiglu_graph(*mx.split(both, 2, axis=-1))

        read = nbytes(copies[0]) * min(4 * tokens, count) // count
        yield Case(f"gate and up of 4 of {count} experts, {tokens} tokens", ours, plain, read)


def attentions(small: bool) -> Iterator[Case]:
    """One query over its cache; one and many over listed blocks."""
    q_heads, kv_heads, width = (4, 2, 16) if small else (32, 8, 128)
    for held in (40,) if small else (4096, 32768):
        q, k, v = normal(1, q_heads, width), normal(1, kv_heads, held, width), normal(1, kv_heads, held, width)
        how: dict[str, Any] = {"scale": width**-0.5, "position": held - 1, "base": 0, "window": None}
        how |= {"softcap": None, "sinks": None, "causal": True}
        yield Case(
            f"attention of 1 query, {held} keys",
            lambda _, a=(q, k, v), how=how: metal_attention.dense(*a, **how),
            lambda _, a=(q, k, v), how=how: attention.graph(a[0].swapaxes(0, 1)[None], *a[1:], **how, memo={})[
                0
            ].swapaxes(0, 1),
        )
        block, listed = (4, 3) if small else (64, 32)
        for queries in (1, 5) if small else (1, 256):
            part = normal(queries, q_heads, width)
            blocks = (mx.arange(queries * listed, dtype=mx.int32) * 13 % ((held - queries) // block)).reshape(
                queries, listed
            )
            given: dict[str, Any] = {"scale": width**-0.5, "position": held - queries, "block": block}
            yield Case(
                f"attention of {queries} queries, {listed} blocks of {block} of {held} keys",
                lambda _, a=(part, k, v, blocks), given=given: metal_attention.indexed(*a, **given),
                lambda _, a=(part, k[0], v[0], blocks), given=given: indexed_attention.graph(*a, **given),
            )


def recurrences(small: bool) -> Iterator[Case]:
    """The gated delta rule and the convolution before it: a step and a chunk."""
    keys, values, width, channels = (1, 2, 32, 48) if small else (16, 48, 128, 8192)
    taps, rate, bias = normal(4, channels), normal(values, dtype=mx.float32), normal(values, dtype=mx.float32)
    for tokens in (1, 9 if small else 512):
        q, k, v = normal(tokens, keys, width), normal(tokens, keys, width), normal(tokens, values, width)
        a, b = normal(tokens, values), normal(tokens, values)
        state = normal(values, width, width, dtype=mx.float32)
        gates: dict[str, Any] = {"rate": mx.exp(rate), "bias": bias, "eps": 1e-6}
        yield Case(
            f"gated delta, {tokens} tokens",
            lambda _, x=(q, k, v, a, b), s=state, n=tokens, g=gates: metal_delta.gated_delta(
                *x, **g, states=s[None], stops=[n]
            )[0],
            lambda _, x=(q, k, v, a, b), s=state, n=tokens, g=gates: (
                gated_delta.graph(*x, **g, states=[s], lengths=[n], stops=[[]]).y
            ),
        )
        x, tail = normal(tokens, channels), normal(3, channels)
        conv: dict[str, Any] = {"tails": [tail], "lengths": [tokens], "stops": [[]], "dilation": 1, "silu": True}
        yield Case(
            f"convolution, {tokens} tokens",
            lambda _, x=x, conv=conv: metal_conv.depthwise_conv(x, taps, None, **conv)[0],
            lambda _, x=x, conv=conv: depthwise_conv.graph(x, taps, None, **conv).y,
        )


def others(small: bool) -> Iterator[Case]:
    """Choices out of logits, rows of a table, and heads."""
    logits = normal(1, 300 if small else 151_936)
    yield Case("top 40", lambda _: metal_topk.top_k(logits, 40), lambda _: topk.graph(logits, 40))
    yield Case("argmax", lambda _: metal_argmax.argmax(logits), lambda _: topk.argmax_graph(logits))
    w, scales, _ = packed((40, 64) if small else (151_936, 2560), NVFP4, True)[0]
    assert w is not None
    assert scales is not None
    ids = (mx.arange(16, dtype=mx.int32) * 977) % w.shape[0]
    taken: dict[str, Any] = {**NVFP4, "dtype": mx.bfloat16}

    def plain_rows(_: int) -> mx.array:
        few, their = mx.take(w, ids, axis=0), mx.take(scales, ids, axis=0)
        return embedding.dequantize(few, their, None, **NVFP4).astype(mx.bfloat16)

    yield Case("16 rows of a table", lambda _: rows.take(w, scales, None, ids, **taken), plain_rows)
    for tokens in (1, 5 if small else 512):
        x, table, gain = normal(tokens, 32, 64), normal(tokens, 32, 2, dtype=mx.float32), normal(64)
        yield Case(
            f"norm and rotation of 32 heads, {tokens} tokens",
            lambda _, x=x, t=table, g=gain: heads.turned(x, (g, 1e-6), t),
            lambda _, x=x, t=table, g=gain: rope.graph(rms_norm.graph(x, g, 1e-6), t),
        )


def cases(*, small: bool = False) -> Iterator[Case]:
    """All of them; `small` ones show only that they run."""
    for group in (products, mixtures, attentions, recurrences, others):
        yield from group(small)


def difference(case: Case) -> float:
    """Of the results, as a part of plain MLX's."""
    ours, plain = case.ours(0).astype(mx.float32), case.plain(0).astype(mx.float32)
    assert ours.size == plain.size, case.name
    apart = mx.linalg.norm((ours - plain.reshape(ours.shape)).reshape(-1))
    return float(apart / mx.maximum(mx.linalg.norm(plain.reshape(-1)), mx.array(1e-9)))


def median_us(function: Callable[[int], mx.array], seconds: float) -> float:
    """Median time of a call, over at least three evaluations of AT_ONCE calls."""
    mx.eval([function(i) for i in range(AT_ONCE)])
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        mx.eval([function(i) for i in range(AT_ONCE)])
        times.append(1e6 * (time.perf_counter() - started) / AT_ONCE)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    asked = parser.parse_args()
    if not mx.metal.is_available():
        raise SystemExit("this MLX has no Metal: the kernels can be timed on a Mac with an Apple GPU only")
    print(f"{mx.device_info().get('device_name', 'Apple GPU')}, mlx {version('mlx')}; medians in µs")
    print(f"{'operation':58} {'ours':>9} {'plain':>9} {'ratio':>6} {'apart':>8} {'GB/s':>6}")
    for case in cases():
        if asked.only not in case.name:
            continue
        ours, plain = median_us(case.ours, asked.seconds), median_us(case.plain, asked.seconds)
        rate = f"{case.nbytes / ours / 1e3:6.0f}" if case.nbytes else ""
        print(f"{case.name:58} {ours:9.1f} {plain:9.1f} {plain / ours:6.2f} {difference(case):8.1e} {rate}", flush=True)


if __name__ == "__main__":
    main()

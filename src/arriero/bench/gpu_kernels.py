"""What the CUDA kernels reach on this machine's GPU, beside plain MLX in the same run.

Times are the device's own (`gpu_clock`), of chains over many different matrices, more than caches hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from arriero.bench.gpu_clock import device_seconds
from arriero.bench.gpu_models import random_weight
from arriero.bench.gpu_shapes import tensor_bytes
from arriero.kernels import device, topk
from arriero.kernels import gated_delta as delta
from arriero.kernels.cuda import attention, experts
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.product import operand
from arriero.kernels.gather_matmul import quantized_graph as gather_graph
from arriero.kernels.quantized_matmul import graph, quantized_matmul
from arriero.kernels.spans import Carried
from arriero.model.quantization import Quantization
from arriero.model.weight import Weight

MODES = {
    "nvfp4": Quantization("nvfp4", 4, 16),
    "mxfp8": Quantization("mxfp8", 8, 32),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "int4": Quantization("affine", 4, 64),
    "int8": Quantization("affine", 8, 64),
}
"""Formats by the names that tables have."""

FEW_ROWS = [(8192, 8192), (24576, 4096), (4096, 12288), (151936, 4096)]
"""Rows and columns of matrices: a square one, and three of Qwen3-8B."""
PROMPTS = (8192, 8192)
PROMPT_SHAPES = [(24576, 4096), (6144, 4096), (4096, 4096), (4096, 12288)]
"""Of Qwen3-8B: gate and up, queries, keys and values, what follows attention, down."""
EXPERTS = 128
BANKS = [(1536, 2048), (2048, 768)]
"""Of an expert of Qwen3-30B-A3B: gate and up, and down, of which each chosen row is another."""
CONTEXTS = (2048, 16384)
VOCABULARY = 151936
DELTA = (16, 48, 128)
"""Key heads, value heads and their size in Qwen3.8-27B."""
CHAIN = 24
"""Calls of one measurement of what has no weights."""

LEAST = 8
"""Matrices of one measurement."""
STREAMED = 2 << 30
"""Bytes of different weights in one measurement: many times what caches hold."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation, by the device's clock."""

    operation: str
    shape: str
    rows: int
    seconds: float
    plain_seconds: float | None
    """The same by plain MLX, where it was measured: its kernels take up to half a minute each to compile."""
    share: float
    """Of the copy rate for what reads weights, of the bfloat16 product's rate for prompts."""
    rate: float
    """Bytes or operations a second."""
    unit: str


def every_kernel(copy: float, tell: Callable[[str], object] = str) -> list[Measured]:
    """All of them, with `copy` bytes a second as the measure; RuntimeError where there is no GPU for them."""
    gpu = device.cuda()
    if gpu is None:
        raise RuntimeError("there is no GPU that the kernels work on")
    found: list[Measured] = []
    for each in (few_rows, prompts, rows_of_experts, decode_attention, choices, delta_steps):
        tell(each.__name__.replace("_", " "))
        for one in each(gpu, copy):
            tell(f"{one.operation}, {one.shape}, {one.rows}: {1e6 * one.seconds:.1f} µs, {100 * one.share:.0f} %")
            found.append(one)
        mx.clear_cache()
    return found


def compiled(call: Callable[[int], mx.array], count: int) -> Callable[[], list[mx.array]]:
    """`count` calls as one graph, so that Python's part is not measured."""
    recorded: Callable[[], list[mx.array]] = mx.compile(lambda: [call(i) for i in range(count)])
    return recorded


def copy_rate() -> float:
    """Bytes read and written a second by MLX's own element-wise kernel."""
    x = mx.zeros((1 << 30,), mx.float32) + 1.0
    mx.eval(x)
    return 2 * x.nbytes / device_seconds(lambda: [x + 1.0], 1)


def product_rate(size: int) -> float:
    """Operations a second of MLX's bfloat16 product of square matrices."""
    a, b = ((mx.random.normal((size, size)) * size**-0.5).astype(mx.bfloat16) for _ in range(2))
    mx.eval(a, b)
    return 2 * size**3 / device_seconds(lambda: [a @ b for _ in range(4)], 4)


def few_rows(gpu: Gpu, copy: float) -> Iterator[Measured]:
    """Products of 1 and 8 rows."""
    for name, how in MODES.items():
        for shape in FEW_ROWS if name == "nvfp4" else FEW_ROWS[:1]:
            bank = weights(shape, how)
            plain = 8 if name == "nvfp4" and shape == FEW_ROWS[0] else 0
            for rows in (1, 8):
                yield _product(name, bank, rows, plain, copy, "GB/s")
            del bank


def prompts(gpu: Gpu, copy: float) -> Iterator[Measured]:
    """Products of many rows, with the rate of bfloat16's as the measure."""
    for name, how in MODES.items():
        bank = weights(PROMPTS, how)[:8]
        for rows in (64, 512, 2048) if name == "nvfp4" else (512, 2048):
            plain = 2 if name == "nvfp4" else 0
            yield _product(name, bank, rows, plain, _dense_rate(rows, PROMPTS), "TFLOP/s")
        del bank
    for shape in PROMPT_SHAPES:
        bank = weights(shape, MODES["nvfp4"])[:32]
        for rows in (512, 2048):
            yield _product("nvfp4", bank, rows, 0, _dense_rate(rows, shape), "TFLOP/s")
        del bank


def _dense_rate(rows: int, shape: tuple[int, int]) -> float:
    """Operations a second of the same product with a bfloat16 matrix."""
    dense = [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(8)]
    x = mx.random.normal((rows, shape[1])).astype(mx.bfloat16)
    mx.eval(dense, x)
    return 2 * rows * shape[0] * shape[1] / device_seconds(compiled(lambda i: x @ dense[i].T, 8), 8)


def rows_of_experts(gpu: Gpu, copy: float) -> Iterator[Measured]:
    """Gate and up, and down, of 8 experts of 128, for one row and for eight."""
    for shape, spread in zip(BANKS, (False, True), strict=True):
        bank = weights((EXPERTS, *shape), MODES["nvfp4"])
        for rows in (1, 8):
            yield _experts(gpu, bank, rows, spread, copy)
        del bank


def _experts(gpu: Gpu, bank: Sequence[Weight], rows: int, spread: bool, copy: float) -> Measured:
    _, out, width = bank[0].shape
    chosen = mx.argsort(mx.random.uniform(shape=(rows, EXPERTS)), axis=-1)[:, :8].astype(mx.uint32)
    x = mx.random.normal((rows * 8 if spread else rows, width)).astype(mx.bfloat16)
    indices = chosen.reshape(-1) if spread else chosen
    mx.eval(x, indices)
    how: dict[str, Any] = {"mode": "nvfp4", "bits": 4, "group_size": 16}

    def ours(i: int) -> mx.array:
        w = bank[i]
        assert w.scales is not None
        found = operand(w.data, w.scales, None, **how, global_scale=w.global_scale)
        assert found is not None
        return experts.multiply(gpu, x, found, indices)

    def plain(i: int) -> mx.array:
        w = bank[i]
        assert w.scales is not None
        return gather_graph(x, w.data, w.scales, indices=indices, global_scale=w.global_scale, **how)

    # Rows choose some experts that others chose, which need be read only once.
    read = len(np.unique(np.array(chosen))) * tensor_bytes((out, width), MODES["nvfp4"])
    return _moved("experts nvfp4", f"8 of {EXPERTS}, {out} × {width}", rows, ours, plain, len(bank), read, copy)


def _moved(
    operation: str,
    shape: str,
    rows: int,
    ours: Callable[[int], mx.array],
    plain: Callable[[int], mx.array],
    count: int,
    moved: float,
    copy: float,
) -> Measured:
    """`count` different calls of ours, and 8 of plain MLX's, each of which moves so many bytes."""
    spent, few = device_seconds(compiled(ours, count), count), min(8, count)
    beside = device_seconds(compiled(plain, few), few)
    return Measured(operation, shape, rows, spent, beside, moved / spent / copy, moved / spent, "GB/s")


def choices(gpu: Gpu, copy: float) -> Iterator[Measured]:
    """The largest of a row of logits, and its 40 largest."""
    for rows in (1, 8):
        sets = [mx.random.normal((rows, VOCABULARY)).astype(mx.bfloat16) for _ in range(CHAIN)]
        mx.eval(sets)
        for name, ours, plain in (
            ("largest", topk.argmax, topk.argmax_graph),
            ("40 largest", lambda x: topk.top_k(x, 40), lambda x: topk.graph(x, 40)),
        ):
            yield _moved(
                name,
                f"of {VOCABULARY}",
                rows,
                lambda i, call=ours, of=sets: call(of[i]),  # type: ignore[misc]
                lambda i, call=plain, of=sets: call(of[i]),  # type: ignore[misc]
                CHAIN,
                2 * rows * VOCABULARY,
                copy,
            )


def delta_steps(gpu: Gpu, copy: float) -> Iterator[Measured]:
    """One token of each row through a gated delta net, whose states are read and written."""
    key_heads, heads, size = DELTA
    for rows in (1, 8):
        q, k = (mx.random.normal((rows, key_heads, size)).astype(mx.bfloat16) for _ in range(2))
        v = mx.random.normal((rows, heads, size)).astype(mx.bfloat16)
        a, b = (mx.random.normal((rows, heads)).astype(mx.bfloat16) for _ in range(2))
        sets = [[mx.random.normal((heads, size, size)) for _ in range(rows)] for _ in range(CHAIN)]
        how: dict[str, Any] = {"rate": mx.ones((heads,)), "bias": mx.ones((heads,)), "lengths": [1] * rows}
        mx.eval(q, k, v, a, b, sets, how["rate"], how["bias"])

        def step(
            function: Callable[..., Carried], i: int, given: Sequence[mx.array], of: list[list[mx.array]], how: Any
        ) -> mx.array:
            made = function(*given, states=of[i], **how)
            # Whoever computes one end has computed the rows.
            return made.ends[0]

        yield _moved(
            "gated delta step",
            f"{heads} heads of {size} × {size}",
            rows,
            lambda i, given=(q, k, v, a, b), of=sets, how=how: step(delta.gated_delta, i, given, of, how),  # type: ignore[misc]
            lambda i, given=(q, k, v, a, b), of=sets, how=how: step(  # type: ignore[misc]
                delta.graph, i, given, of, how | {"stops": [[]] * len(of[i]), "eps": 1e-6}
            ),
            CHAIN,
            2 * rows * heads * size * size * 4,
            copy,
        )


def decode_attention(gpu: Gpu, copy: float) -> Iterator[Measured]:
    """One row and eight rows with caches of their own, and eight tokens of one row, as Qwen3-8B has them."""
    for rows, tokens in ((1, 1), (8, 1), (1, 8)):
        for context in CONTEXTS:
            yield _attention(gpu, rows, tokens, context, copy)


def _attention(gpu: Gpu, rows: int, tokens: int, context: int, copy: float) -> Measured:
    shape = attention.Shape(32, 8, 128, 128**-0.5)
    many = 16
    # As many caches as caches of the device do not hold.
    sets = [
        [mx.random.normal((1, 8, context + 256, 128)).astype(mx.bfloat16) for _ in range(2 * rows)] for _ in range(many)
    ]
    qkv = [mx.random.normal((rows * tokens, shape.width)).astype(mx.bfloat16) for _ in range(many)]
    angles = mx.random.normal((rows * tokens, 64, 2)) + 0.0
    mx.eval(sets, qkv, angles)
    how: dict[str, Any] = {
        "lengths": [tokens] * rows,
        "positions": [context] * rows,
        "bases": [0] * rows,
        "query_norm": None,
        "key_norm": None,
        "memo": {},
    }

    def ours(i: int) -> mx.array:
        return attention.attend(gpu, shape, qkv[i], angles, sets[i], **how)[0]

    def plain(i: int) -> mx.array:
        q = qkv[i][:, : 32 * 128].reshape(rows, tokens, 32, 128).swapaxes(1, 2)
        held = [buffer[:, :, : context + tokens] for buffer in sets[i]]
        mask = "causal" if tokens > 1 else None
        return mx.concatenate(
            [
                mx.fast.scaled_dot_product_attention(
                    q[row : row + 1], held[2 * row], held[2 * row + 1], scale=shape.scale, mask=mask
                )
                for row in range(rows)
            ]
        )

    read = rows * 2 * 8 * (context + tokens) * 128 * 2
    return _moved("attention", f"{context} held, {tokens} new", rows, ours, plain, many, read, copy)


def weights(shape: tuple[int, ...], how: Quantization) -> list[Weight]:
    """Different matrices of one shape, `STREAMED` bytes together."""
    first = random_weight(shape, how)
    mx.eval(first.data)
    count = max(LEAST, min(64, STREAMED // first.data.nbytes))
    made = [first, *(random_weight(shape, how) for _ in range(count - 1))]
    for weight in made:
        mx.eval([part for part in (weight.data, weight.scales, weight.biases, weight.global_scale) if part is not None])
    return made


def _product(name: str, bank: Sequence[Weight], rows: int, plain_most: int, best: float, unit: str) -> Measured:
    """Ours with each of a bank, and plain MLX's with `plain_most` of it; the share is of `best`."""
    first = bank[0]
    assert first.quantization is not None
    assert first.scales is not None
    out, width = first.shape
    how: dict[str, Any] = {
        "mode": first.quantization.mode,
        "bits": first.quantization.bits,
        "group_size": first.quantization.group_size,
    }
    x = mx.random.normal((rows, width)).astype(mx.bfloat16)
    mx.eval(x)

    def of(function: Callable[..., mx.array], i: int) -> mx.array:
        w = bank[i]
        return function(x, w.data, w.scales, w.biases, global_scale=w.global_scale, **how)

    few = min(len(bank), plain_most)
    ours = device_seconds(compiled(lambda i: of(quantized_matmul, i), len(bank)), len(bank))
    plain = device_seconds(compiled(lambda i: of(graph, i), few), few) if few else None
    if unit == "GB/s":
        rate = sum(part.nbytes for part in (first.data, first.scales, first.biases) if part is not None) / ours
    else:
        rate = 2 * rows * out * width / ours
    return Measured(f"product {name}", f"{out} × {width}", rows, ours, plain, rate / best, rate, unit)

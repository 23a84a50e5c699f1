"""The CUDA kernels' own sources, executed on the CPU thread by thread: a few of what test_cuda_*.py asks of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.bench.gpu_models import CONFIGS, random_model
from arriero.kernels.cuda import attention, dequantize, layer, source
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.probe import probe
from arriero.kernels.cuda.product import multiply
from arriero.kernels.gather_matmul import gather_gated
from arriero.kernels.readable import read, readable
from arriero.kernels.topk import argmax, argmax_graph
from arriero.model.contract import Batch, Span
from arriero.model.quantization import Quantization
from tests.helpers.cuda import emulate, error, exact, packed, rows
from tests.helpers.cuda_on_cpu.run import compiler
from tests.kernels.test_cuda_attention import Case, check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
TOLERANCE = 5e-3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU of three multiprocessors, executed here."""
    return emulate(monkeypatch)


def test_a_product_with_all_that_goes_with_it(small: Gpu) -> None:
    out, width, count = 80, 384, 3
    scale, bias = mx.array(0.37), rows(1, 80)[0]
    matrix = packed((out, width), "nvfp4", 4, 16, deviation=1.0, global_scale=scale, bias=bias)
    x, branch, residual = rows(count, width), rows(count, width), rows(count, out)
    gain = rows(1, width)[0] * 0.2 + 1
    made = multiply(small, x, matrix.operand, branch=branch, norm=(gain, 1e-6), residual=residual)
    total = exact((x.astype(mx.float32) + branch.astype(mx.float32)).astype(mx.bfloat16))
    assert error(made.x, total) == 0
    normed = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * exact(gain)
    assert error(made.y, normed @ matrix.values.T + exact(bias) + exact(residual)) < TOLERANCE


def test_gate_and_up_of_experts_of_eight_bits(small: Gpu) -> None:
    bank = packed((5, 64, 128), "affine", 8, 64, deviation=0.1)
    x, chosen = rows(3, 128), np.array([[4, 0], [1, 1], [2, 3]], np.uint32)
    m = bank.operand
    how: dict[str, Any] = {"mode": "affine", "bits": 8, "group_size": 64, "activation": "silu"}
    ours = gather_gated(x, m.w, m.scales, m.biases, indices=mx.array(chosen), **how)
    assert ours is not None
    both = np.einsum("rk,rjok->rjo", exact(x), bank.values[chosen])
    gate, up = both[..., :32], both[..., 32:]
    assert error(ours, gate / (1 + np.exp(-gate)) * up) < TOLERANCE
    many = mx.zeros((200, 2), mx.uint32)
    assert gather_gated(rows(200, 128), m.w, m.scales, m.biases, indices=many, **how) is None


def test_decoding(small: Gpu) -> None:
    matrix = packed((32, 512), "mxfp8", 8, 32)
    assert error(dequantize.dequantize(matrix.operand), matrix.values) < 1e-12
    for mode in (("nvfp4", 4, 16), ("affine", 8, 64)):
        factored = packed((32, 512), *mode, global_scale=mx.array(0.3))
        assert 0 < error(dequantize.dequantize(factored.operand, factored=True), factored.values) < 3e-3


def test_the_largest_is_the_first_of_equals_and_never_a_nan(small: Gpu) -> None:
    nan, inf = float("nan"), float("inf")
    rows_of = [[1.0, 7.0, nan, 7.0, 3.0], [-inf, nan, -inf, -inf, nan], [-0.0, 0.0, -1.0, 0.0, -2.0], [nan] * 5]
    scores = mx.array(rows_of)
    for dtype in (mx.float32, mx.bfloat16):
        ours = argmax(scores.astype(dtype))
        assert ours.dtype == mx.uint32
        assert ours.tolist() == argmax_graph(scores.astype(dtype)).tolist() == [1, 0, 0, 0]


def test_products_in_a_row_are_those_of_a_launch_each(small: Gpu) -> None:
    gate_up, down, out, qkv = (
        packed(shape, "nvfp4", 4, 16, deviation=0.05).operand
        for shape in ((256, 256), (256, 128), (256, 128), (128, 256))
    )
    norm = mx.random.uniform(0.5, 1.5, (256,)).astype(mx.bfloat16), 1e-6
    chain = layer.Chain(gate_up, down, "silu", norm, out, qkv, norm)
    assert layer.fits(small, chain, 2)
    assert not layer.fits(small, chain, 9)
    h, y = rows(2, 256), rows(2, 128)
    inner = multiply(small, h, gate_up, branch=multiply(small, y, out).y, norm=norm, activation="silu")
    behind = multiply(small, inner.y, down, residual=inner.x).y
    made = layer.multiply(small, h, y, chain)
    assert made.qkv is not None
    assert mx.array_equal(made.h, behind)
    assert mx.array_equal(made.qkv, multiply(small, behind, qkv, norm=norm).y)


def test_the_host_reads_tokens_two_by_two(small: Gpu) -> None:
    for count in (1, 2, 3, 8, 9, 33):
        tokens = mx.arange(count, dtype=mx.int32) * 7919
        copies = readable(tokens)
        assert len(copies) == (-(-count // 2) if 2 < count <= 32 else 0)
        assert all(copy.nbytes <= 8 for copy in copies)
        assert read(tokens, copies) == tokens.tolist()


def test_blocks_that_share_a_row_find_the_largest_again_and_again(small: Gpu) -> None:
    for length in (8200, 9001):
        for seed in range(2):
            scores = mx.round(mx.random.normal((2, length), key=mx.random.key(seed)) * 2).astype(mx.bfloat16)
            assert argmax(scores).tolist() == argmax_graph(scores).tolist()


def test_attention_of_rows_with_windows_caps_and_sinks(small: Gpu) -> None:
    shape = attention.Shape(8, 2, 64, 0.2, window=70, softcap=30.0)
    check(small, Case(shape, [3, 1, 2], [150, 0, 90], [64, 0, 0], sunk=True))


def test_a_barrier_that_some_threads_miss_is_noticed(small: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = packed((32, 512), "mxfp8", 8, 32)
    change_source(
        monkeypatch, "dequantize_body", "  u32 q[WORDS];", "if (threadIdx.x & 1) __syncthreads(); u32 q[WORDS];"
    )
    with pytest.raises(AssertionError, match="barrier"):
        dequantize.dequantize(matrix.operand)


def test_a_missing_barrier_gives_wrong_numbers(small: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = packed((64, 256), "nvfp4", 4, 16)
    x = rows(1, 256)
    change_source(monkeypatch, "product", "  __syncthreads();\n  if (NORM) {  //", "  if (NORM) {  //")
    assert not error(multiply(small, x, matrix.operand).y, exact(x) @ matrix.values.T) < TOLERANCE


def change_source(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    """Plant a fault."""
    plain: Callable[[str], str] = source.text
    assert old in plain(name)
    changed = plain(name).replace(old, new)
    for module in ("arriero.kernels.cuda.source", "tests.helpers.cuda_on_cpu.run"):
        monkeypatch.setattr(f"{module}.text", lambda asked: changed if asked == name else plain(asked))


def test_the_probe_passes_and_notices_wrong_numbers(small: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    probe(small)
    monkeypatch.setattr("arriero.kernels.cuda.probe.TOLERANCE", 0.0)
    with pytest.raises(RuntimeError, match="differs from plain MLX"):
        probe(small)


def test_replayed_steps_are_those_built_layer_by_layer(small: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["Qwen3-8B"] | {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 64,
    }
    model = random_model(config, Quantization("nvfp4", 4, 16))
    recorded: list[object] = []

    def compiled(function: Callable[..., list[mx.array]]) -> Callable[..., list[mx.array]]:
        recorded.append(function)
        return function

    monkeypatch.setattr(mx, "compile", compiled)

    def steps(replay: bool) -> list[mx.array]:
        caches = [model.new_caches() for _ in range(2)]
        forward = model.forward if replay else model._by_layers  # type: ignore[attr-defined]
        made = []
        for position in range(4):
            spans = [Span(0, 1, position, caches[0]), Span(1, 1, position, caches[1])]
            made.append(forward(Batch(mx.array([position, position + 9], mx.int32), spans)).final)
            mx.eval(made[-1])
        return made

    plain = steps(False)
    assert not recorded
    again = steps(True)
    assert len(recorded) == 1
    for a, b in zip(plain, again, strict=True):
        assert mx.array_equal(a, b)

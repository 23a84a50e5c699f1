"""Linear layers, heads, norms and experts as they are built from tensors."""

from __future__ import annotations

import logging
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.model.layers import experts as experts_module
from arriero.model.layers.embedding import Embedding, load_head
from arriero.model.layers.experts import Experts, Router
from arriero.model.layers.linear import FusedLinear, Linear
from arriero.model.layers.norm import RMSNorm
from arriero.model.weight import Quantization, Weight, stack_experts
from tests.helpers.memory_checkpoint import MemoryCheckpoint, dequantize, quantize

pytestmark = pytest.mark.usefixtures("kernels")

INT4, NVFP4, MXFP8 = Quantization("affine", 4, 32), Quantization("nvfp4", 4, 16), Quantization("mxfp8", 8, 32)


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def checkpoint(dialect: str = "hf", **tensors: mx.array | Weight) -> MemoryCheckpoint:
    return MemoryCheckpoint({}, {name.replace("__", "."): value for name, value in tensors.items()}, dialect)


def scaled(weight: Weight, scale: mx.array) -> Weight:
    return Weight(weight.data, weight.quantization, weight.scales, weight.biases, scale)


def equal(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and bool(mx.array_equal(a, b).item())


def test_a_bias_is_added_in_the_activations_dtype() -> None:
    opened = checkpoint(up__weight=random(8, 32).astype(mx.float16), up__bias=random(8, seed=1))
    layer = Linear.load(opened.typed(), "up", mx.bfloat16)
    x = random(3, 32, seed=2).astype(mx.bfloat16)
    assert layer(x).dtype == mx.bfloat16
    assert not equal(layer(x), Linear(layer.weight)(x))


def test_a_bias_may_be_required_forbidden_or_optional() -> None:
    opened = checkpoint(up__weight=random(8, 32), up__bias=random(8, seed=1), down__weight=random(8, 32))
    assert Linear.load(opened.typed(), "up", mx.float32, bias=False).bias is None
    assert "up.bias" in opened.unused()
    assert Linear.load(opened.typed(), "up", mx.float32).bias is not None
    assert Linear.load(opened.typed(), "down", mx.float32).bias is None
    with pytest.raises(CheckpointError, match=r"down\.bias"):
        Linear.load(opened.typed(), "down", mx.float32, bias=True)


@pytest.mark.parametrize("how", [None, INT4, NVFP4, MXFP8], ids=["dense", "int4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("biases", [False, True])
def test_fused_layers_have_the_bits_of_separate_ones(how: Quantization | None, biases: bool) -> None:
    parts = []
    for i, rows in enumerate((32, 16, 16)):
        w = random(rows, 64, seed=i)
        parts.append(Linear(Weight(w) if how is None else quantize(w, how), random(rows, seed=9) if biases else None))
    fused = FusedLinear(parts)
    assert len(fused.parts) == 1
    x = random(5, 64, seed=7)
    assert all(equal(a, part(x)) for a, part in zip(fused(x), parts, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        Linear(quantize(random(16, 64, seed=1), NVFP4)),
        Linear(Weight(random(16, 64, seed=1))),
        Linear(quantize(random(16, 64, seed=1), INT4, mx.float16)),
        Linear(quantize(random(16, 64, seed=1), INT4), random(16)),
        Linear(scaled(quantize(random(16, 64, seed=1), INT4), mx.array(2.0))),
    ],
    ids=["mode", "dense", "scales", "bias", "global scale"],
)
def test_layers_of_different_formats_stay_separate(other: Linear) -> None:
    parts = [Linear(quantize(random(16, 64), INT4)), other]
    fused, x = FusedLinear(parts), random(5, 64, seed=7)
    assert len(fused.parts) == 2
    assert all(equal(a, part(x)) for a, part in zip(fused(x), parts, strict=True))


def head(opened: MemoryCheckpoint, *, tied: bool) -> tuple[Embedding, Linear]:
    embedding = Embedding.load(opened.typed(), "embed", mx.float32)
    return embedding, load_head(opened.typed(), embedding, ["model.lm_head", "lm_head"], mx.float32, tied=tied)


def test_a_tied_head_is_the_embedding_with_its_scales() -> None:
    table = scaled(quantize(random(24, 64), NVFP4), mx.array(0.25, mx.float32))
    embedding, out = head(checkpoint(embed__weight=table), tied=True)
    x = random(3, 64, seed=1)
    np.testing.assert_allclose(np.array(out(x)), np.array(x @ dequantize(table).T), atol=1e-5)
    np.testing.assert_array_equal(np.array(embedding(mx.array([5, 1]))), np.array(dequantize(table))[[5, 1]])


def test_a_stray_head_of_a_tied_model_is_left_aside_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    table = random(24, 64)
    opened = checkpoint(embed__weight=table, lm_head__weight=quantize(random(24, 64, seed=5), INT4))
    _, out = head(opened, tied=True)
    x = random(3, 64, seed=1)
    np.testing.assert_allclose(np.array(out(x)), np.array(x @ table.T), atol=1e-5)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "lm_head.weight" in caplog.text


def test_an_untied_model_uses_its_own_head() -> None:
    own = random(24, 64, seed=5)
    for name in ("lm_head__weight", "model__lm_head__weight"):
        _, out = head(checkpoint(embed__weight=random(24, 64), **{name: own}), tied=False)
        x = random(3, 64, seed=1)
        np.testing.assert_allclose(np.array(out(x)), np.array(x @ own.T), atol=1e-5)


def test_an_untied_model_without_a_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no model\.lm_head\.weight or lm_head\.weight.*tie_word_embeddings"):
        head(checkpoint(embed__weight=random(24, 64)), tied=False)


def test_gains_around_zero_are_held_in_float32_and_leave_the_dtype_alone() -> None:
    w = (0.01 * random(32)).astype(mx.bfloat16)
    norm = RMSNorm.load(checkpoint(n__weight=w).typed(), "n", mx.bfloat16, eps=1e-6, width=32, centred=True)
    assert norm.gain.dtype == mx.float32
    np.testing.assert_array_equal(np.array(norm.gain), np.array(w.astype(mx.float32)) + 1)
    assert norm(random(3, 32).astype(mx.bfloat16)).dtype == mx.bfloat16


def test_a_gguf_file_holds_the_sum_already() -> None:
    w = 1 + random(32)
    opened = checkpoint("gguf", n__weight=w)
    norm = RMSNorm.load(opened.typed(), "n", mx.bfloat16, eps=1e-6, width=32, centred=True)
    np.testing.assert_array_equal(np.array(norm.gain), np.array(w))


def test_plain_gains_take_the_activations_dtype() -> None:
    norm = RMSNorm.load(checkpoint(n__weight=random(32)).typed(), "n", mx.bfloat16, eps=1e-6, width=32)
    assert norm.gain.dtype == mx.bfloat16


def test_the_router_chooses_the_largest_and_may_normalise() -> None:
    gate, x = random(6, 32), random(9, 32, seed=1)
    logits = np.array(x @ gate.T).astype(np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for normalise in (False, True):
        chosen, weights = (np.array(a) for a in Router(Linear(Weight(gate)), 2, normalise)(x))
        for t in range(9):
            assert set(chosen[t]) == set(np.argsort(-scores[t])[:2])
            expected = scores[t][chosen[t]]
            np.testing.assert_allclose(weights[t], expected / expected.sum() if normalise else expected, rtol=1e-5)


def test_router_weights_are_float32_whatever_the_activations_are() -> None:
    router = Router(Linear(Weight(random(6, 32).astype(mx.bfloat16))), 2, True)
    chosen, weights = router(random(9, 32, seed=1).astype(mx.bfloat16))
    assert (chosen.dtype, weights.dtype) == (mx.uint32, mx.float32)


E, H, INNER = 5, 32, 64


def banks(how: Quantization | None = None) -> dict[str, Weight]:
    shapes = {"gate_proj": (E, INNER, H), "up_proj": (E, INNER, H), "down_proj": (E, H, INNER)}
    arrays = {name: 0.2 * random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {name: Weight(a) if how is None else quantize(a, how) for name, a in arrays.items()}


def routed(tokens: int) -> tuple[mx.array, mx.array, mx.array]:
    draws = np.random.default_rng(3)
    chosen = np.stack([draws.permutation(E)[:2] for _ in range(tokens)]).astype(np.uint32)
    return random(tokens, H, seed=8), mx.array(chosen), mx.array(draws.uniform(0.1, 1, (tokens, 2)).astype(np.float32))


def loop(parts: dict[str, Weight], x: mx.array, chosen: mx.array, weights: mx.array) -> np.ndarray:
    """One token and one expert at a time, in double precision."""
    gate, up, down = (
        np.array(dequantize(parts[name])).astype(np.float64) for name in ("gate_proj", "up_proj", "down_proj")
    )
    rows, out = np.array(x).astype(np.float64), np.zeros((x.shape[0], H))
    for t, row in enumerate(rows):
        for e, weight in zip(np.array(chosen)[t], np.array(weights)[t], strict=True):
            g = gate[e] @ row
            out[t] += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
    return out


def built(parts: dict[str, Weight]) -> Experts:
    # Copies, since layers repack what they are given.
    gate, up, down = (replace(parts[name]) for name in ("gate_proj", "up_proj", "down_proj"))
    return Experts(gate, up, down, "silu")


@pytest.mark.parametrize("how", [None, INT4, NVFP4, MXFP8], ids=["dense", "int4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_experts_are_weighted_sums_of_gated_networks(how: Quantization | None, tokens: int) -> None:
    parts, (x, chosen, weights) = banks(how), routed(tokens)
    found = built(parts)(x, chosen, weights)
    np.testing.assert_allclose(np.array(found), loop(parts, x, chosen, weights), atol=2e-5)


def test_sorting_by_expert_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, (x, chosen, weights) = built(banks(INT4)), routed(100)
    monkeypatch.setattr(experts_module, "SORT_FROM", 1000)
    plain = experts(x, chosen, weights)
    monkeypatch.setattr(experts_module, "SORT_FROM", 1)
    assert equal(plain, experts(x, chosen, weights))


def test_a_global_scale_of_each_expert_is_inside_the_activation() -> None:
    scales = {"gate_proj": 1.5, "up_proj": 0.25, "down_proj": 0.5}
    parts = {
        name: scaled(w, scales[name] * 4.0 ** mx.arange(-2, 3, dtype=mx.float32)) for name, w in banks(NVFP4).items()
    }
    for tokens in (7, 100):
        x, chosen, weights = routed(tokens)
        expected = loop(parts, x, chosen, weights)
        found = np.array(built(parts)(x, chosen, weights))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_projections_may_have_formats_of_their_own() -> None:
    parts, (x, chosen, weights) = banks(NVFP4), routed(9)
    parts["up_proj"], parts["down_proj"] = banks()["up_proj"], banks(INT4)["down_proj"]
    np.testing.assert_allclose(np.array(built(parts)(x, chosen, weights)), loop(parts, x, chosen, weights), atol=2e-5)


def test_experts_keep_sixteen_bits() -> None:
    for how in (None, NVFP4):
        x, chosen, weights = routed(9)
        found = built({n: w.astype(mx.bfloat16) for n, w in banks(how).items()})(x.astype(mx.bfloat16), chosen, weights)
        assert found.dtype == mx.bfloat16


def single(parts: dict[str, Weight], index: int, name: str) -> Weight:
    bank = parts[name]
    scale = None if bank.global_scale is None else bank.global_scale[index]
    return Weight(bank.data[index], bank.quantization, None if bank.scales is None else bank.scales[index], None, scale)


@pytest.mark.parametrize("layout", ["one by one", "stacked", "switch", "fused"])
def test_every_published_layout_gives_the_same_experts(layout: str) -> None:
    parts, (x, chosen, weights) = banks(NVFP4 if layout != "fused" else None), routed(9)
    if layout != "fused":
        parts = {n: scaled(w, 1 + mx.arange(E, dtype=mx.float32)) for n, w in parts.items()}
    tensors: dict[str, mx.array | Weight] = {}
    for name, bank in parts.items():
        if layout == "one by one":
            tensors |= {f"mlp.experts.{i}.{name}.weight": single(parts, i, name) for i in range(E)}
        elif layout == "switch":
            tensors[f"mlp.switch_mlp.{name}.weight"] = bank
        else:
            tensors[f"mlp.experts.{name}" + (".weight" if layout == "stacked" else "")] = bank
    if layout == "fused":
        gate, up = tensors.pop("mlp.experts.gate_proj"), tensors.pop("mlp.experts.up_proj")
        assert isinstance(gate, Weight)
        assert isinstance(up, Weight)
        tensors["mlp.experts.gate_up_proj"] = mx.concatenate([gate.data, up.data], axis=1)
    opened = MemoryCheckpoint({}, tensors)
    found = Experts.load(opened.typed(), "mlp", mx.float32, experts=E, hidden=H, intermediate=INNER)
    assert opened.unused() == []
    assert equal(found(x, chosen, weights), built(parts)(x, chosen, weights))


def test_experts_of_different_formats_are_refused() -> None:
    parts = banks(NVFP4)
    tensors: dict[str, mx.array | Weight] = {
        f"mlp.experts.{i}.{name}.weight": single(parts, i, name) for name in parts for i in range(E)
    }
    tensors["mlp.experts.3.up_proj.weight"] = quantize(random(INNER, H), INT4)
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.\*\.up_proj\.weight differ in format"):
        Experts.load(MemoryCheckpoint({}, tensors).typed(), "mlp", mx.float32, experts=E, hidden=H, intermediate=INNER)


def test_a_missing_expert_is_named() -> None:
    parts = banks()
    tensors: dict[str, mx.array | Weight] = {
        f"mlp.experts.{i}.{name}.weight": single(parts, i, name) for name in parts for i in range(E - 1)
    }
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.4\.gate_proj\.weight"):
        Experts.load(MemoryCheckpoint({}, tensors).typed(), "mlp", mx.float32, experts=E, hidden=H, intermediate=INNER)


def test_experts_of_which_some_have_a_global_scale_are_not_stacked():
    plain = quantize(mx.ones((32, 32)), Quantization("nvfp4", 4, 16))
    scaled = replace(plain, global_scale=mx.array(2.0))
    assert stack_experts([plain, scaled]) is None
    assert stack_experts([scaled, plain]) is None
    both = stack_experts([scaled, scaled])
    assert both is not None
    assert both.global_scale is not None
    assert both.global_scale.tolist() == [2.0, 2.0]

"""Products of many rows with packed matrices by warpgroups: executed on the CPU where there is no GPU that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import device
from arriero.kernels.cuda import dequantize, prompt_product, source
from arriero.kernels.cuda.formats import FORMATS
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.cuda.prompt_product import FORMS, LARGE, MIDDLE, SMALL, WIDE, Form, form_for, multiply, takes
from arriero.kernels.matrix import Matrix
from arriero.kernels.quantized_matmul import quantized_matmul
from tests.helpers.cuda import EMULATED, ON_GPU, Packed, emulate, error, exact, packed, rows
from tests.kernels.test_cuda_on_cpu import change_source

TOLERANCE = 5e-3
H200 = Gpu(multiprocessors=132, shared_memory=227 << 10, capability=(9, 0), in_place=True)
NVFP4 = ("nvfp4", 4, 16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU with warpgroups, or one that is executed."""
    found = device.cuda()
    return found if found is not None and found.capability == (9, 0) else emulate(monkeypatch)


def made(out: int, width: int, mode: tuple[str, int, int] = NVFP4, deviation: float = 1.0) -> Packed:
    """A matrix with all that it may have: one kernel serves most tests here."""
    return packed((out, width), *mode, deviation=deviation, global_scale=mx.array(0.37), bias=rows(1, out)[0])


def bias_of(matrix: Packed) -> np.ndarray:
    """In float64."""
    assert matrix.operand.bias is not None
    return exact(matrix.operand.bias)


@pytest.mark.parametrize("form", [*FORMS, replace(MIDDLE, cluster=2)])
def test_every_form_gives_the_product_of_float64(gpu: Gpu, form: Form) -> None:
    matrix, x = made(80, 384), rows(37, 384)
    expected = exact(x) @ matrix.values.T + bias_of(matrix)
    assert error(multiply(gpu, x, matrix.operand, form=form), expected) < TOLERANCE


@pytest.mark.parametrize("mode", [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("affine", 4, 64), ("affine", 8, 128)])
def test_every_format_is_decoded_in_registers(gpu: Gpu, mode: tuple[str, int, int]) -> None:
    matrix, x = made(64, 256, mode, 0.02), rows(33, 256)
    assert takes(gpu, x, matrix.operand)
    expected = exact(x) @ matrix.values.T + bias_of(matrix)
    assert error(multiply(gpu, x, matrix.operand, form=SMALL), expected) < TOLERANCE


@pytest.mark.parametrize("mode", [("mxfp8", 8, 32), ("affine", 8, 64)])
@pytest.mark.parametrize("form", [SMALL, MIDDLE])
def test_rows_of_an_odd_number_of_stages(gpu: Gpu, form: Form, mode: tuple[str, int, int]) -> None:
    matrix, x = packed((64, 448), *mode, deviation=0.02), rows(33, 448)
    expected = exact(x) @ matrix.values.T
    assert error(multiply(gpu, x, matrix.operand, form=form), expected) < TOLERANCE


@ON_GPU
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", sorted(FORMATS))
@pytest.mark.parametrize(("out", "width", "count"), [(528, 2048, 300), (4096, 4096, 33), (1040, 12288, 129)])
def test_large_products(gpu: Gpu, form: Form, mode: tuple[str, int, int], out: int, width: int, count: int) -> None:
    matrix, x = packed((out, width), *mode), rows(count, width)
    assert error(multiply(gpu, x, matrix.operand, form=form), exact(x) @ matrix.values.T) < TOLERANCE


def test_a_row_has_the_same_bits_in_every_form_and_beside_any_others(gpu: Gpu) -> None:
    matrix, x = made(80, 512), rows(140, 512)
    together = multiply(gpu, x, matrix.operand, form=LARGE)
    assert mx.array_equal(multiply(gpu, x, matrix.operand, form=WIDE), together)
    assert mx.array_equal(multiply(gpu, x, matrix.operand, form=MIDDLE), together)
    assert mx.array_equal(multiply(gpu, x, matrix.operand, form=SMALL), together)
    assert mx.array_equal(multiply(gpu, x[70:110], matrix.operand), together[70:110])


def test_scales_of_rows_multiply_what_was_summed(gpu: Gpu) -> None:
    factors = mx.concatenate([mx.full((48,), 1e-4), mx.full((32,), 3e3)])
    matrix, x = packed((80, 256), *NVFP4, global_scale=factors, bias=mx.zeros((80,), mx.bfloat16)), rows(34, 256)
    ours, expected = multiply(gpu, x, matrix.operand), exact(x) @ matrix.values.T
    assert error(ours[:, :48], expected[:, :48]) < TOLERANCE
    assert error(ours[:, 48:], expected[:, 48:]) < TOLERANCE


@pytest.mark.parametrize(("mode", "deviation"), [(("mxfp4", 4, 32), 1e-12), (("mxfp8", 8, 32), 1e9)])
def test_tiny_and_large_scales_are_exact(gpu: Gpu, mode: tuple[str, int, int], deviation: float) -> None:
    no_bias = mx.zeros((64,), mx.bfloat16)
    matrix = packed((64, 256), *mode, deviation=deviation, global_scale=mx.array(1.0), bias=no_bias)
    x = rows(33, 256)
    assert error(multiply(gpu, x, matrix.operand, form=SMALL), exact(x) @ matrix.values.T) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("prompt_product", "warpgroup_wait<1>();"),
        ("prompt_product", "barrier_wait(full + slot, parity);"),
        ("prompt_rows_body", " ^ (row & 7)"),
    ],
)
def test_faults_of_waiting_and_of_order_give_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, old: str
) -> None:
    emulated = emulate(monkeypatch)
    matrix, x = made(64, 512), rows(33, 512)
    change_source(monkeypatch, name, old, "")
    expected = exact(x) @ matrix.values.T + bias_of(matrix)
    assert not error(multiply(emulated, x, matrix.operand, form=SMALL), expected) < TOLERANCE


def test_a_stage_that_is_copied_to_before_it_is_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = emulate(monkeypatch)
    form, matrix, x = replace(SMALL, stages=2), made(64, 512), rows(33, 512)
    expected = exact(x) @ matrix.values.T + bias_of(matrix)
    assert error(multiply(emulated, x, matrix.operand, form=form), expected) < TOLERANCE
    change_source(monkeypatch, "prompt_product", "if (s >= STAGES) barrier_wait(empty + slot, parity);", "")
    with pytest.raises(AssertionError, match="do not reach"):
        multiply(emulated, x, matrix.operand, form=form)


def test_prompts_take_it_where_there_are_warpgroups(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "takes", lambda *_: False)
    matrix, x = packed((64, 256), *NVFP4), rows(2 * 20, 256).reshape(2, 20, 256)
    m = matrix.operand
    how: dict[str, Any] = matrix.how
    ours = quantized_matmul(x, m.w, m.scales, **how)
    assert ours.shape == (2, 20, 64)
    assert mx.array_equal(ours.reshape(-1, 64), multiply(gpu, x.reshape(-1, 256), m))
    assert not takes(replace(EMULATED, capability=(8, 0)), x, m)


def test_a_residual_is_added_to_what_would_be_kept(gpu: Gpu) -> None:
    packed_ = made(80, 256)
    how: dict[str, Any] = {**packed_.how, "global_scale": packed_.global_scale}
    matrix = Matrix(packed_.operand.w, packed_.operand.scales, None, **how)
    x, residual = rows(37, 256), rows(37, 80)
    operand = matrix.operand()
    assert operand is not None
    expected = (multiply(gpu, x, operand).astype(mx.float32) + residual.astype(mx.float32)).astype(mx.bfloat16)
    assert mx.array_equal(matrix.plus(x, residual), expected)


def test_few_rows_and_other_types_are_left_to_others() -> None:
    assert takes(H200, rows(33, 256), packed((64, 256), *NVFP4).operand)
    assert not takes(H200, rows(32, 256), packed((64, 256), *NVFP4).operand)
    assert not takes(H200, rows(33, 256).astype(mx.float32), packed((64, 256), *NVFP4).operand)
    assert not takes(H200, rows(33, 256), None)
    assert takes(H200, rows(1537, 256), packed((64, 256), "mxfp8", 8, 32).operand)
    eight = packed((64, 256), "affine", 8, 64).operand
    assert takes(H200, rows(1536, 256), eight)
    assert not takes(H200, rows(1537, 256), eight)


def test_all_forms_are_compiled_with_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[source.Kernel] = []
    monkeypatch.setattr(source, "in_use", object)
    monkeypatch.setattr(source, "_built", lambda kernel, *what: built.append(kernel))
    prompt_product._prepare.__wrapped__(FORMATS[NVFP4], False, frozenset({"factors"}), (mx.bfloat16,) * 5)
    assert [kernel.shared for kernel in built] == [form.shared for form in FORMS]


def test_forms_fit_a_multiprocessor() -> None:
    for form in FORMS:
        assert form.shared <= H200.shared_memory
        # What the compiler may give each thread: of 160 up to 255 registers.
        assert form.threads * {160: 255, 384: 168, 512: 128}[form.threads] <= 65536


@pytest.mark.parametrize(
    ("count", "out", "form"),
    [
        (512, 8192, LARGE),
        (2048, 6144, LARGE),
        (512, 6144, WIDE),
        (512, 4096, MIDDLE),
        (256, 8192, MIDDLE),
        (128, 8192, SMALL),
        (64, 24576, SMALL),
    ],
)
def test_a_form_is_what_was_fastest(count: int, out: int, form: Form) -> None:
    assert form_for(H200, count, out) == form

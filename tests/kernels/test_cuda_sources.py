"""What is decided about CUDA kernels before any GPU sees them: names, geometry, groups, arguments."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import device
from arriero.kernels.cuda import (
    attention,
    experts,
    gpu,
    grouped,
    indexed,
    indexed_choice,
    indexed_few,
    ple,
    product,
    source,
    streams,
    topk,
)
from arriero.kernels.cuda.formats import FORMATS
from arriero.kernels.cuda.gpu import Gpu

H200 = Gpu(multiprocessors=132, shared_memory=227 << 10, capability=(9, 0), in_place=True)
SMALL = Gpu(multiprocessors=30, shared_memory=99 << 10, capability=(8, 6), in_place=True)
KERNEL = product.kernel(frozenset({"factors"}), 1024)


def test_every_source_of_a_kernel_is_in_the_package() -> None:
    kernels = [
        KERNEL,
        attention.kernel(8, 128, 1024, True, True, True),
        *(indexed.kernel(rows, 128, 1024, few) for rows in (1, 8) for few in (True, False)),
        *(indexed_choice.scores_kernel(8, by_query) for by_query in (True, False)),
        indexed_choice.choice_kernel(256),
        indexed_few.prepare_kernel(8),
        topk.kernel(128, True, True),
        ple.KERNEL,
        *(streams.norm_kernel(256, True, True), streams.low_kernel(), streams.mix_kernel(True, True)),
        streams.gate_kernel(),
        *(grouped.tiles_kernel(), grouped.kernel(("x",), ()), grouped.SUM),
    ]
    for kernel in kernels:
        assert all(source.text(name) for name in (*kernel.headers, kernel.body))


def test_a_name_is_that_of_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        KERNEL.full_name,
        replace(KERNEL, inputs=(*KERNEL.inputs, "more")).full_name,
        replace(KERNEL, outputs=("out", "more")).full_name,
        replace(KERNEL, threads=256).full_name,
        replace(KERNEL, shared=2048).full_name,
        replace(KERNEL, resident=2).full_name,
        replace(KERNEL, defines=(("BRANCH", "x"),)).full_name,
    }
    assert len(names) == 7
    assert product.kernel(frozenset({"factors"}), 1024).full_name == KERNEL.full_name
    plain = source.text
    monkeypatch.setattr(source, "text", lambda name: plain(name) + ("// changed" if name == "formats" else ""))
    assert KERNEL.full_name not in names


def test_a_name_is_one_that_compilers_take() -> None:
    assert KERNEL.full_name.isidentifier()


def test_what_an_argument_is_missing_is_said_in_front_of_the_source() -> None:
    assert "#define FACTORS factors\n" in KERNEL.header
    assert "#define BRANCH nullptr\n" in KERNEL.header
    assert KERNEL.header.index("#define THREADS 512") < KERNEL.header.index("__launch_bounds__(THREADS")


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_arguments_are_never_in_the_pool_of_small_arrays(size: int) -> None:
    given = mx.arange(size, dtype=mx.float32)
    made = source.argument(given)
    assert made.nbytes >= source.ARGUMENT_BYTES
    assert mx.array_equal(made[:size], given)
    assert not mx.any(made[size:]).item()


@pytest.mark.parametrize("gpu", [H200, SMALL])
@pytest.mark.parametrize("mode", sorted(FORMATS))
@pytest.mark.parametrize(("rows", "columns"), [(151936, 4096), (4096, 12288), (1024, 25600), (16, 128), (6144, 2048)])
def test_launches_fit_the_device_and_cover_the_matrix(
    gpu: Gpu, mode: tuple[str, int, int], rows: int, columns: int
) -> None:
    unit = FORMATS[mode].unit
    for count in range(1, product.FEW + 1):
        bucket = product.bucket_for(gpu, count, rows, columns, unit, False)
        if not bucket:
            assert product.geometry(1, rows, columns, unit, False, gpu.multiprocessors).shared > gpu.shared_memory
            continue
        plan = product.geometry(bucket, rows, columns, unit, False, gpu.multiprocessors)
        share = -(-columns // unit // product.WARPS)
        assert plan.shared <= gpu.shared_memory
        assert share % plan.depth == 0
        assert plan.depth * plan.tiles <= 6


def test_formats_and_shapes_that_kernels_don_t_take_have_no_operand() -> None:
    def made(rows: int, columns: int, mode: str, bits: int, group: int, scales: mx.Dtype = mx.bfloat16) -> bool:
        w = mx.zeros((rows, columns * bits // 32), mx.uint32)
        s = mx.zeros((rows, columns // group), scales)
        b = s if mode == "affine" else None
        return product.operand(w, s, b, mode=mode, bits=bits, group_size=group) is not None

    assert made(64, 256, "affine", 4, 64)
    assert made(64, 256, "mxfp8", 8, 32, mx.uint8)
    assert not made(64, 256, "affine", 3, 64)
    assert not made(60, 256, "affine", 4, 64)
    assert not made(64, 192, "affine", 4, 64)
    assert not made(64, 256, "affine", 4, 64, mx.float16)


def test_a_gated_product_needs_whole_pairs_of_tiles() -> None:
    w, s = mx.zeros((48, 32), mx.uint32), mx.zeros((48, 16), mx.uint8)
    matrix = product.operand(w, s, None, mode="nvfp4", bits=4, group_size=16)
    assert product.fits(matrix, H200, 1)
    assert not product.fits(matrix, H200, 1, gated=True)
    assert not product.fits(matrix, H200, product.FEW + 1)
    assert not product.fits(None, H200, 1)


def test_a_global_scale_becomes_one_number_a_row_and_is_made_once() -> None:
    w, s, scale = mx.zeros((64, 32), mx.uint32), mx.zeros((64, 16), mx.uint8), mx.array(0.5)
    first = product.operand(w, s, None, mode="nvfp4", bits=4, group_size=16, global_scale=scale)
    again = product.operand(w, s, None, mode="nvfp4", bits=4, group_size=16, global_scale=scale)
    assert first is not None
    assert again is not None
    assert first.factors is not None
    assert mx.array_equal(first.factors, mx.full((64,), 0.5))
    assert first.factors is again.factors


def test_experts_of_more_rows_than_shared_memory_holds_are_left_to_others() -> None:
    assert experts.bucket_for(H200, 8, 2048, 128) == 8
    assert experts.bucket_for(H200, 128, 4096, 128) == 0


def test_groups_divide_the_tokens_of_rows() -> None:
    table = attention.table([5, 1], [10, 7], [256, 512], 4, 3)
    assert table.tolist() == [
        [3, 4, 10, 3, 10, 256, 0, 0],
        [7, 1, 14, 3, 10, 256, 0, 4],
        [8, 1, 7, 8, 7, 512, 1, 5],
    ]


def test_more_than_eight_rows_are_several_launches_of_one_forward() -> None:
    memo: dict[object, object] = {}
    lengths = [1] * 10
    made = attention.launches(lengths, list(range(10)), [0] * 10, [256] * 10, 1, memo)
    assert [(launch.first, launch.rows, launch.tokens) for launch in made] == [(0, 8, 8), (8, 2, 2)]
    assert made is attention.launches(lengths, list(range(10)), [0] * 10, [256] * 10, 1, memo)
    second = np.array(made[1].groups).reshape(-1, 8)
    assert second[:2, 0].tolist() == [8, 9]
    assert second[:2, 7].tolist() == [0, 1]


def test_attention_is_left_to_the_graph_where_it_has_another_form() -> None:
    shape = attention.Shape(32, 8, 128, 0.1)
    buffers = [mx.zeros((1, 8, 256, 128), mx.bfloat16)] * 2
    angles = mx.zeros((1, 64, 2))
    assert attention.takes(shape, [1], buffers, angles, [None, None])
    assert not attention.takes(shape, [attention.LONGEST + 1], buffers, angles, [None, None])
    assert not attention.takes(shape, [1], [b.astype(mx.float32) for b in buffers], angles, [None, None])
    assert not attention.takes(shape, [1], buffers, mx.zeros((1, 32, 2)), [None, None])
    assert not attention.takes(attention.Shape(24, 8, 96, 0.1), [1], buffers, None, [None, None])


def test_kernels_that_do_not_work_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Gpu:
        raise RuntimeError("NVIDIA's driver answers with error 100")

    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(device, "find", broken)
    device._gpu.cache_clear()
    with caplog.at_level(logging.INFO):
        assert device.cuda() is None
        assert device.cuda() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "error 100" in caplog.text
    device._gpu.cache_clear()


def test_the_environment_switches_the_cuda_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available", lambda: True)
    monkeypatch.setattr(device, "find", lambda: H200)
    monkeypatch.setattr(device, "probe", lambda found: None)
    monkeypatch.setenv("ARRIERO_KERNELS", "graph")
    device._gpu.cache_clear()
    assert device.cuda() is None
    monkeypatch.setenv("ARRIERO_KERNELS", "auto")
    device._gpu.cache_clear()
    assert device.cuda() is H200
    device._gpu.cache_clear()


def test_without_a_driver_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="driver library could not be loaded"):
        gpu.find()


@pytest.mark.parametrize("gpu", [H200, SMALL])
@pytest.mark.parametrize(
    ("queries", "heads", "per_head", "dim"), [(1, 2, 12, 256), (8, 2, 12, 256), (2048, 2, 12, 256)]
)
def test_listed_keys_are_shared_out_where_queries_are_few(
    gpu: Gpu, queries: int, heads: int, per_head: int, dim: int
) -> None:
    parts = indexed.splits(gpu, queries * heads, 513 * 4)
    assert parts & (parts - 1) == 0
    assert (parts > 1) == (queries * heads < gpu.multiprocessors)
    assert parts == 1 or queries * heads <= indexed.COUNTERS
    assert indexed.splits(gpu, 1, 64) == 1
    assert indexed.shared_bytes(per_head, dim, 512) <= gpu.shared_memory


@pytest.mark.parametrize("together", [4, 16])
def test_every_query_is_scored_once_whatever_the_chunk(together: int) -> None:
    lengths, positions, block = [19, 1, 30], [300, 7, 0], 4
    found = []
    for first in range(0, 50, 16):
        end = min(first + 16, 50)
        for at, count, row, seen in indexed_choice.groups(lengths, positions, block, together, first, end).tolist():
            assert 0 < count <= together
            start = sum(lengths[:row])
            last = first + at + count - 1
            assert start <= first + at <= last < start + lengths[row]
            assert seen == (positions[row] + last - start + 1) // block
            found += range(first + at, last + 1)
    assert found == list(range(50))

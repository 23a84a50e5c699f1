"""Machine code of CUDA kernels on disk: where MLX looks for it, and what happens when it cannot be kept."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.kernels.cuda import compiled, gpu, product
from arriero.kernels.cuda.compiled import Store, Text, hashed
from arriero.kernels.cuda.gpu import Gpu
from tests.helpers.cuda import gpu as real_gpu
from tests.helpers.cuda_on_cpu.run import compiler

__all__ = ["real_gpu"]

TEXT = Text(
    "arriero_sum_00",
    '#include "/a/numbers.cu"\n',
    "#define THREADS 32\n",
    "  out[0] = N > 1 && WIDE ? x_shape[0] + x_strides[1] : y[0];",
    (("x", mx.bfloat16), ("y", mx.uint32)),
    (("out", mx.float32),),
    (("N", 3), ("WIDE", True)),
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(compiled, "_compiled", lambda text, architecture: (architecture.encode(), "_Zsymbol"))
    return Store(tmp_path / "cuda", (9, 0))


@pytest.mark.skipif(compiler() is None, reason="needs g++ or clang++")
def test_hashes_are_those_of_the_standard_library(tmp_path: Path) -> None:
    texts = ["", "a", "abcdefg", "abcdefgh", "ñandú", "x" * 1000, "y" * 1003]
    lines = [f'printf("%zx ", std::hash<std::string>{{}}("{text}"));' for text in texts]
    program = f"#include <cstdio>\n#include <string>\nint main() {{ {' '.join(lines)} }}"
    (tmp_path / "hash.cpp").write_text(program, encoding="utf-8")
    subprocess.run([str(compiler()), "hash.cpp", "-o", "hash"], cwd=tmp_path, check=True)
    theirs = subprocess.run([tmp_path / "hash"], capture_output=True, text=True, check=True).stdout.split()
    assert theirs == [f"{hashed(text.encode()):x}" for text in texts]


def test_a_function_is_named_after_its_template() -> None:
    assert TEXT.function == "custom_kernel_arriero_sum_00_3_t"
    assert replace(TEXT, template=()).function == "custom_kernel_arriero_sum_00"


def test_a_signature_names_types_shapes_and_constants() -> None:
    arguments = (
        "    const __nv_bfloat16* x,\n    const __grid_constant__ Shape x_shape,\n"
        "    const __grid_constant__ Strides x_strides,\n    const uint32_t* y,\n    float* out) {\n"
    )
    assert arguments in TEXT.definition
    assert "  constexpr int N = 3;\n  constexpr bool WIDE = true;\n\n" in TEXT.definition


def test_what_changes_the_text_changes_the_file() -> None:
    others = [
        replace(TEXT, front=""),
        replace(TEXT, body=TEXT.body + " "),
        replace(TEXT, inputs=(("x", mx.bfloat16), ("y", mx.int32))),
        replace(TEXT, template=(("N", 4), ("WIDE", True))),
    ]
    assert len({text.module for text in [TEXT, *others]}) == 5


def test_code_lies_where_mlx_looks_and_is_made_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.keep(TEXT)
    place = store.folder / f"{TEXT.module}.ptx"
    assert place.read_bytes() == b"sm_90a"
    assert place.with_suffix(".txt").read_text() == f"mlx::core::cu::{TEXT.function}\t_Zsymbol\n"
    assert len(list(store.folder.iterdir())) == 2
    monkeypatch.setattr(compiled, "_compiled", lambda *what: pytest.fail("compiled twice"))
    os.utime(place, (0, 0))
    assert store.keep(TEXT)
    assert place.stat().st_mtime > time.time() - 60


def test_code_in_a_folder_that_is_only_read_serves_as_well(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.keep(TEXT)

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(compiled, "_compiled", lambda *what: pytest.fail("compiled twice"))
    assert store.keep(TEXT)
    assert "compiled anew" not in caplog.text


@pytest.mark.parametrize("what", ["no code", "cut", "no symbol", "empty symbol"])
def test_code_that_is_not_whole_is_made_again(store: Store, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    # A header of 64 bytes whose table of one section ends at byte 192.
    elf = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q4xHHHHHH", 128, 64, 56, 0, 64, 1, 0) + bytes(128)
    monkeypatch.setattr(compiled, "_compiled", lambda text, architecture: (elf, "_Zsymbol"))
    assert store.keep(TEXT)
    code = store.place(TEXT)
    symbol = code.with_suffix(".txt")
    if what == "no symbol":
        symbol.unlink()
    elif what == "empty symbol":
        symbol.write_bytes(b"")
    else:
        code.write_bytes(elf[:190] if what == "cut" else b"")
    assert store.keep(TEXT)
    assert (code.read_bytes(), symbol.read_text()) == (elf, f"mlx::core::cu::{TEXT.function}\t_Zsymbol\n")


def test_a_long_name_is_folders_as_mlx_makes_them(store: Store) -> None:
    long = replace(TEXT, name="arriero_" + "n" * 300)
    assert store.keep(long)
    assert store.place(long).is_file()
    assert store.place(long).parent == store.folder / long.module[:245]
    assert store.place(long).name == long.module[245:] + ".ptx"


def test_code_that_cannot_be_kept_is_a_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*what: object) -> None:
        raise RuntimeError("NVRTC does not compile it (line 3: error)")

    monkeypatch.setattr(compiled, "_compiled", fails)
    assert not store.keep(TEXT)
    assert "line 3: error" in caplog.text
    assert not store.folder.exists() or not list(store.folder.iterdir())


def test_code_that_was_not_loaded_for_long_is_removed(store: Store) -> None:
    other = replace(TEXT, name="arriero_other")
    for text in (TEXT, other):
        store.keep(text)
    theirs = store.folder / "gather_float32.ptx"
    theirs.write_bytes(b"")
    for path in (store.place(TEXT), theirs):
        os.utime(path, (0, 0))
    store.tidy()
    assert not store.place(TEXT).exists()
    assert not store.place(TEXT).with_suffix(".txt").exists()
    assert store.place(other).exists()
    assert theirs.exists()


def test_the_folder_is_one_for_each_gpu_compiler_and_mlx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setenv("ARRIERO_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "version", lambda: "13.0")
    assert compiled.folder_for((9, 0)) == tmp_path / "cuda" / "sm90-nvrtc13.0-mlx0.32.4"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/elsewhere")
    assert compiled.folder_for((9, 0)) == Path("/elsewhere")


def test_preparing_makes_the_folder_or_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "find", lambda: Gpu(132, 227 << 10, (9, 0), True))
    monkeypatch.setattr(compiled, "_USED", [])
    monkeypatch.setenv(gpu.COMMAND_GRAPHS, "1")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file" / "cuda"))
    gpu.prepare()
    assert "compiles them anew" in caplog.text
    assert compiled.in_use() is None
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "a" / "b"))
    monkeypatch.delenv(gpu.COMMAND_GRAPHS)
    gpu.prepare()
    assert (tmp_path / "a" / "b").is_dir()
    assert os.environ[gpu.COMMAND_GRAPHS] == "0"
    used = compiled.in_use()
    assert used is not None
    assert used.folder == tmp_path / "a" / "b"


def test_without_nvrtc_kernels_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    compiled.compiler.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not Store(tmp_path, (9, 0)).keep(TEXT)
    assert "cannot open" in caplog.text


def test_mlx_finds_the_code_of_a_kernel(real_gpu: Gpu, capfd: pytest.CaptureFixture[str]) -> None:
    if not mx.cuda.is_available():
        pytest.skip("MLX compiles nothing where kernels are emulated")
    kernel = product.kernel(frozenset(), 1024)
    template = {"N": 1}
    text = kernel.as_text(tuple(template.items()), [mx.bfloat16] * len(kernel.inputs), [mx.bfloat16])
    run = mx.fast.cuda_kernel(
        name=kernel.full_name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=text.body,
        header=kernel.front,
    )
    run(
        inputs=[mx.zeros((64,), mx.bfloat16) for _ in kernel.inputs],
        template=list(template.items()),
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.bfloat16],
        verbose=True,
    )
    said = capfd.readouterr().out
    written = said.split("```\n", 1)[1].rsplit("\n```", 1)[0]
    assert f"Generated source code for `{text.function}`" in said
    assert f"{text.function}_{hashed(written.encode()):x}" == text.module

"""Numbers that are read some rows at a time are those of the whole tensor, whatever it is stored as."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from arriero.create.layout import layout_of
from arriero.create.numbers import Fp8Numbers, Numbers, PackedNumbers
from arriero.formats import affine, blockfp8, nvfp4
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.model.companions import Bundle, bundle

NAME = "model.layers.0.mlp.experts.up_proj.weight"


def stored(folder: Path, held: dict[str, np.ndarray]) -> Bundle:
    write(folder / "x.safetensors", held)
    file = SafetensorsFile(folder / "x.safetensors")
    return next(found for found in bundle(dict.fromkeys(file.tensors, file)) if found.name == NAME)


def check(numbers: Numbers, want: np.ndarray) -> None:
    rows = want.shape[-2]
    flat = want.reshape(-1, want.shape[-1])
    assert numbers.shape == want.shape
    for matrix in range(len(flat) // rows):
        for start, stop in ((0, rows), (0, 1), (rows // 2 - 1, rows // 2 + 2), (rows - 3, rows)):
            at = slice(matrix * rows + start, matrix * rows + stop)
            np.testing.assert_array_equal(numbers.read(at.start, at.stop), flat[at])


@pytest.mark.parametrize("shape", [(200, 130), (3, 200, 130), (2, 128, 64)])
@pytest.mark.parametrize("kind", ["block", "row", "one"])
def test_fp8_has_the_scales_of_its_blocks_rows_or_of_all(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.normal(0, 1, shape).astype(ml_dtypes.float8_e4m3fn)
    *lead, rows, columns = shape
    sizes = {"block": (*lead, -(-rows // 128), -(-columns // 128)), "row": (*lead, rows, 1), "one": ()}
    scales = rng.uniform(0.5, 2, sizes[kind]).astype(np.float32)
    found = stored(tmp_path, {NAME: codes, f"{NAME}_scale_inv": scales})
    assert found.fp8_scale is not None
    check(Fp8Numbers(NAME, found.data, found.fp8_scale), blockfp8.dequantize(codes.view(np.uint8), scales))


@pytest.mark.parametrize("factors", [np.array([1.0, 2.0, 3.0], np.float32), np.float32(0.5)])
def test_each_expert_of_nvfp4_has_its_own_factor(tmp_path: Path, factors: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    words = affine.pack(rng.integers(0, 16, (3, 40, 64), dtype=np.uint8), 4)
    scales = rng.integers(1, 0x7E, (3, 40, 4), dtype=np.uint8)
    held = {NAME: words, f"{NAME}.scale": scales, f"{NAME}.global_scale": np.asarray(factors)}
    found = stored(tmp_path, held)
    want = nvfp4.dequantize(words, scales) * np.asarray(factors).reshape(-1, 1, 1)
    check(PackedNumbers(found, layout_of(found, {})), want)

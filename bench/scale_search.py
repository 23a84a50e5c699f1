"""What the search for scales gains and costs: weight error and time with it and without, for each format.

    python -m bench.scale_search [--model FOLDER]

Weights are random of three distributions, or the first 64 matrices of a folder's `model.safetensors`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from arriero.formats import mxfp, nvfp4
from arriero.formats.affine import pack
from arriero.formats.safetensors import SafetensorsFile
from bench.machine import facts

ROWS, COLUMNS = 128, 1024


def weights(model: Path | None) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Names of sources and their matrices."""
    if model is not None:
        file = SafetensorsFile(model / "model.safetensors")
        names = [n for n, s in file.tensors.items() if len(s.shape) == 2 and s.shape[1] % 32 == 0 and "embed" not in n]
        yield model.name, [file.view(name).astype(np.float32) for name in names[:64]]
        return
    rng = np.random.default_rng(0)
    for name, numbers in (
        ("normal", rng.normal(0, 0.02, (4, ROWS, COLUMNS))),
        ("student t, 4", 0.02 * rng.standard_t(4, (4, ROWS, COLUMNS))),
        ("laplace", rng.laplace(0, 0.02, (4, ROWS, COLUMNS))),
    ):
        yield name, list(numbers.astype(np.float32))


def coded(kind: str, matrix: np.ndarray, search: bool) -> np.ndarray:
    """The matrix through a format and back."""
    if kind == "nvfp4":
        multiplier = nvfp4.multiplier_for(float(np.abs(matrix).max()))
        codes, scales = nvfp4.quantize(matrix, multiplier, search=search)
        return nvfp4.dequantize(pack(codes, 4), scales, multiplier)
    bits = int(kind[-1])
    codes, scales = mxfp.quantize(matrix, bits, search=search)
    return mxfp.dequantize(pack(codes, bits), scales, bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with model.safetensors")
    asked = parser.parse_args()
    print(facts())
    print(f"{'weights':>16} {'format':>7} {'error first':>12} {'error best':>11} {'ns/weight first':>16} {'best':>6}")
    for name, matrices in weights(asked.model):
        size = sum(float(np.square(m).sum()) for m in matrices)
        count = sum(m.size for m in matrices)
        for kind in ("nvfp4", "mxfp4", "mxfp8"):
            errors, times = [], []
            for search in (False, True):
                started = time.perf_counter()
                lost = sum(float(np.square(coded(kind, m, search) - m).sum()) for m in matrices)
                times.append(1e9 * (time.perf_counter() - started) / count)
                errors.append((lost / size) ** 0.5)
            print(f"{name:>16} {kind:>7} {errors[0]:>12.3%} {errors[1]:>11.3%} {times[0]:>16.0f} {times[1]:>6.0f}")


if __name__ == "__main__":
    main()

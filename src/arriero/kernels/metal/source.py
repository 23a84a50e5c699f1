"""Kernels made of `.metal` files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx

FOLDER = Path(__file__).parent

LEAST_DEVICE_VALUES = 8
"""Inputs of fewer values are in Metal's `constant` address space, others in `device`: an input that may be of either
size would be compiled anew whenever it changes sides."""

TYPES = (mx.float32, mx.float16, mx.bfloat16)
"""Types of activations that the kernels have."""

Template = Sequence[tuple[str, "mx.Dtype | int | bool"]]


class Launch(Protocol):
    """What `mx.fast.metal_kernel` returns."""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]: ...


def load(path: Path) -> dict[str, Any]:
    """The arguments of `mx.fast.metal_kernel` in a file.

    Lines that begin with `//:` say what follows: `inputs` and `outputs` with names, `option` with `name=true|false`,
    `include` with files beside it that go in front of the header, then `header` and `body`, whose text goes to the
    compiler as it stands. ValueError for any other.
    """
    parts: dict[str, list[str]] = {"header": [], "body": []}
    included: list[str] = []
    spec: dict[str, Any] = {"name": f"arriero_{path.stem}", "input_names": [], "output_names": []}
    part = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        directive = re.match(r"//:\s*(\w+)\s*(.*)", line)
        if directive is None:
            if part:
                parts[part].append(line)
            continue
        kind, rest = directive[1], directive[2].split()
        if kind in ("inputs", "outputs"):
            spec[f"{kind[:-1]}_names"] = rest
        elif kind == "include":
            included += [(path.parent / name).read_text(encoding="utf-8") for name in rest]
        elif kind == "option":
            for option in rest:
                name, _, value = option.partition("=")
                if value not in ("true", "false"):
                    raise ValueError(f"{path.name}, line {number}: option {option} is neither true nor false")
                spec[name] = value == "true"
        elif kind in parts:
            part = kind
        else:
            raise ValueError(f"{path.name}, line {number}: //: {kind} is not known")
    spec["header"] = "".join([*included, *(f"{line}\n" for line in parts["header"])])
    spec["source"] = "".join(f"{line}\n" for line in parts["body"])
    return spec


@cache
def kernel(name: str) -> Launch:
    """The kernel of `name.metal`, made once; MLX compiles it for each template at its first call."""
    return cast(Launch, mx.fast.metal_kernel(**load(FOLDER / f"{name}.metal")))


def on_device(flat: mx.array, fill: int) -> mx.array:
    """The same numbers and enough of `fill` behind them to be in the `device` address space."""
    missing = LEAST_DEVICE_VALUES - flat.size
    return mx.pad(flat, [(0, missing)], constant_values=mx.array(fill, flat.dtype)) if missing > 0 else flat

"""What MLX makes of a kernel, which it can be made to print without a GPU: by exporting a function that calls it."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

import mlx.core as mx
import pytest

from arriero.kernels.metal.source import FOLDER, load
from tests.metal.harness.signature import ATTRIBUTES, signature
from tests.metal.launches import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="the export path is that of machines without a GPU")

ALL = " ".join(name for name, _, _ in ATTRIBUTES)


def printed(kernel: Any, inputs: list[mx.array], **call: Any) -> str:
    """What MLX prints for a call."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            mx.export_function(f"{folder}/f.mlxfn", lambda *a: kernel(inputs=list(a), verbose=True, **call), *inputs)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read()


@pytest.mark.parametrize(
    ("source", "inputs", "template", "atomic"),
    [
        ("out[0] = inp[thread_position_in_grid.x];", [mx.zeros((4, 4), mx.float16)], [("T", mx.float32)], False),
        (
            "out[threads_per_grid.x] = inp_shape[0] + inp_strides[1] + inp_ndim;",
            [mx.zeros((4, 4), mx.bfloat16)],
            [("T", mx.bfloat16), ("N", 3), ("B", True), ("C", False)],
            False,
        ),
        ("out[0] = inp[0];", [mx.zeros((7,), mx.uint8)], None, False),
        ("out[0] = inp[0];", [mx.zeros((8,), mx.int64)], None, False),
        ("out[0] = inp + inp_shape;", [mx.array(1.0)], None, False),
        (f"/* {ALL} */", [mx.zeros((2, 4), mx.bool_)], [("K", -1)], True),
    ],
    ids=["a matrix", "shapes and template", "few values", "enough values", "a scalar", "every attribute"],
)
def test_the_harness_writes_the_signature_that_mlx_writes(
    source: str, inputs: list[mx.array], template: Any, atomic: bool
) -> None:
    made = mx.fast.metal_kernel(
        name="sig", input_names=["inp"], output_names=["out", "out2"], source=source, atomic_outputs=atomic
    )
    dtypes = [mx.float32, mx.int32]
    text = printed(
        made,
        inputs,
        template=template,
        grid=(4, 1, 1),
        threadgroup=(4, 1, 1),
        output_shapes=[(4,), (4,)],
        output_dtypes=dtypes,
    )
    theirs = text[text.index("```") + 4 :]
    theirs = re.sub(r"custom_kernel_\w+\(", "F(", theirs[: theirs.index(source)])
    given = [(a.dtype, a.ndim, a.size) for a in inputs]
    ours, _, _ = signature("F", ["inp"], given, ["out", "out2"], dtypes, template or [], source, atomic)
    assert ours.split() == theirs.split()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.metal")), ids=lambda path: path.stem)
def test_a_file_reaches_mlx_unchanged(path: Any) -> None:
    spec = load(path)
    inputs = [mx.zeros((9, 9, 9, 9) if f"{name}_strides" in spec["source"] else (9,)) for name in spec["input_names"]]
    outputs = len(spec["output_names"])
    call: dict[str, Any] = {"output_shapes": [(4,)] * outputs, "output_dtypes": [mx.float32] * outputs}
    text = printed(mx.fast.metal_kernel(**spec), inputs, grid=(32, 1, 1), threadgroup=(32, 1, 1), **call)
    assert spec["source"] in text
    assert spec["header"] in text
    head = text[text.index("```") + 4 + len(spec["header"]) : text.index(spec["source"])]
    given = [(a.dtype, a.ndim, a.size) for a in inputs]
    ours, _, _ = signature(
        "F", spec["input_names"], given, spec["output_names"], call["output_dtypes"], [], spec["source"], False
    )
    assert ours.split() == re.sub(r"custom_kernel_\w+\(", "F(", head).split()

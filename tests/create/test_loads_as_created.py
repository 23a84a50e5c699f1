"""A stored model opens as the folder that it was made of: the same tensors, layouts and configuration."""

import ml_dtypes
import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import packed, tensors, upload, write_folder
from tests.helpers.unchecked import unchecked

NARROW = {name: value for name, value in tensors().items() if "down" not in name}
MIXED = packed(NARROW, 4, 32) | packed({"model.embed_tokens.weight": NARROW["model.embed_tokens.weight"]}, 8, 64)
FLOAT4 = {
    "x.weight": np.arange(4 * 8, dtype=np.uint32).reshape(4, 8),
    "x.scales": np.full((4, 4), 56, np.uint8),
    "y.weight_packed": np.arange(4 * 32, dtype=np.uint8).reshape(4, 32),
    "y.weight_scale": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
    "y.weight_global_scale": np.full(1, 2, np.float32),
}
FP8 = {
    f"{stem}.{part}": value
    for stem, name, scales in (
        ("a", "weight_scale_inv", np.full((2, 3), 0.5, ml_dtypes.bfloat16)),
        ("b", "weight_scale", np.full((), 0.25, np.float32)),
        ("c", "weight_scale", np.full((200, 1), 0.25, np.float32)),
    )
    for part, value in (("weight", np.ones((200, 300), ml_dtypes.float8_e4m3fn)), (name, scales))
}


@pytest.mark.parametrize(
    ("held", "quantization"),
    [
        (tensors(), None),
        (packed(NARROW, 4, 64), {"bits": 4, "group_size": 64}),
        (packed(NARROW, 4, 32), {"bits": 4, "group_size": 32}),
        (packed(NARROW, 8, 32), {"bits": 8, "group_size": 32}),
        (packed(NARROW, 3, 32), {"bits": 3, "group_size": 32}),
        (packed(NARROW, 2, 64), {"bits": 2, "group_size": 64}),
        (packed(NARROW, 2, 64), {"bits": 4, "group_size": 64}),
        (packed(NARROW, 4, 32), {"bits": 2, "group_size": 128}),
        (packed(NARROW, 6, 64), {"bits": 6, "group_size": 64}),
        (MIXED, {"bits": 4, "group_size": 32, "model.embed_tokens": {"bits": 8, "group_size": 64}}),
        (tensors() | FLOAT4, None),
        (tensors() | FP8, None),
    ],
    ids=[
        "plain",
        "int4",
        "int4/32",
        "int8/32",
        "int3",
        "int2",
        "not int4",
        "not int2/128",
        "int6",
        "mixed",
        "float4",
        "fp8",
    ],
)
def test_a_stored_model_opens_as_its_folder(tmp_path, held, quantization):
    config = {"quantization": quantization} if quantization else {}
    folder = write_folder(tmp_path / "m", {"model.safetensors": held}, config=config)
    store = Store(tmp_path / "store")
    model = create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None, check=unchecked)
    ours, theirs = Checkpoint.open(model.source()), Checkpoint.open(FolderSource(path=str(folder)))
    assert ours.config == theirs.config
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        mine, original = ours.info(name), theirs.info(name)
        assert (mine.shape, mine.dtype, mine.quantization) == (original.shape, original.dtype, original.quantization)
        left, right = ours.host_weight(name), theirs.host_weight(name)
        for part in ("data", "scales", "biases", "global_scale"):
            one, other = getattr(left, part), getattr(right, part)
            assert (one is None) == (other is None), f"{name} {part}"
            if one is not None:
                np.testing.assert_array_equal(one, other, err_msg=f"{name} {part}")


def test_an_mlx_conversion_stays_one(tmp_path):
    folder = write_folder(tmp_path / "m", metadata={"format": "mlx"})
    store = Store(tmp_path / "store")
    model = create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None, check=unchecked)
    assert Checkpoint.open(FolderSource(path=str(folder))).dialect == "mlx"
    assert Checkpoint.open(model.source()).dialect == "mlx"

"""Tensors kept on the host: never an MLX array, never part of the load."""

import json

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.errors import CheckpointError
from arriero.formats.safetensors import write
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource, GGUFSource
from tests.helpers.gguf_files import write_tiny_llama_gguf

TABLE = 16 << 20


@pytest.fixture
def big(tmp_path) -> Checkpoint:
    """A table of 16 MB and a small matrix in one file."""
    table = np.arange(TABLE // 2, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 64)
    write(tmp_path / "model.safetensors", {"table.weight": table, "small.weight": np.ones((8, 8), np.float32)})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    return Checkpoint.open(FolderSource(str(tmp_path)))


def test_a_host_table_allocates_nothing_in_mlx_even_when_its_file_is_loaded(big):
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    view = big.host("table.weight")
    small = big.tensor("small.weight")
    mx.eval(small)
    assert int(view.view(np.uint16)[3, 5]) == 3 * 64 + 5
    assert mx.get_active_memory() - before < 1 << 20
    assert mx.get_peak_memory() - before < 1 << 20


def test_a_tensor_that_nobody_takes_allocates_nothing_either(big):
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(big.tensor("small.weight"))
    assert mx.get_peak_memory() - before < 1 << 20
    assert big.unused() == ["table.weight"]


def test_a_lazy_tensor_is_read_when_it_is_evaluated(big):
    before = mx.get_active_memory()
    table = big.tensor("table.weight")
    assert mx.get_active_memory() - before < 1 << 20
    mx.eval(table)
    assert mx.get_active_memory() - before >= TABLE


def test_the_checkpoint_keeps_no_array_alive(big):
    before = mx.get_active_memory()
    table = big.tensor("table.weight")
    mx.eval(table)
    del table
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1 << 20


def test_host_tensors_are_no_part_of_what_is_to_be_loaded(big):
    assert big.nbytes == TABLE + 256
    big.host("table.weight")
    assert big.nbytes == 256
    assert big.unused() == ["small.weight"]


def test_a_tensor_is_on_the_host_or_loaded_but_not_both(big):
    big.host("table.weight")
    for take in (big.tensor, big.weight):
        with pytest.raises(CheckpointError, match=r"table\.weight is kept on the host"):
            take("table.weight")
    big.weight("small.weight")
    with pytest.raises(CheckpointError, match=r"small\.weight has been loaded"):
        big.host("small.weight")


def test_views_are_read_only(big):
    with pytest.raises(ValueError, match="read-only"):
        big.host("table.weight")[0, 0] = 1


def test_a_packed_host_tensor_comes_with_its_scales(tmp_path):
    rows = mx.random.normal((32, 160))
    data, scales = mx.quantize(rows, mode="nvfp4")
    tensors = {"t.weight": data, "t.scales": scales, "t.global_scale": mx.array(2688.0)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text("{}")
    host = Checkpoint.open(FolderSource(str(tmp_path))).host_weight("t.weight")
    assert (host.data.shape, host.scales.shape, host.global_scale.item()) == ((32, 20), (32, 10), 1.0)
    back = mx.dequantize(mx.array(host.data[5:6]), mx.array(host.scales[5:6]), mode="nvfp4", dtype=mx.float32)
    assert mx.array_equal(back, mx.dequantize(data, scales, mode="nvfp4", dtype=mx.float32)[5:6])


def test_gguf_tensors_are_viewed_as_their_blocks(tmp_path):
    write_tiny_llama_gguf(tmp_path / "m.gguf", "Q8_0")
    checkpoint = Checkpoint.open(GGUFSource((str(tmp_path / "m.gguf"),)))
    before = mx.get_active_memory()
    view = checkpoint.host("model.embed_tokens.weight")
    assert view.shape == (268, 64 // 32 * 34)
    assert not view.flags.writeable
    assert mx.get_active_memory() == before
    assert "model.embed_tokens.weight" not in checkpoint.unused()

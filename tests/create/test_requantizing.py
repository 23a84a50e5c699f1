"""`quantize` of what is stored already: only what changes is written, the rest are the base's own layers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import InvalidRequest
from arriero.formats.safetensors import write
from arriero.model.checkpoint import Checkpoint
from arriero.source import FolderSource
from arriero.store import manifests
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import packed, tensors, upload, write_folder
from tests.helpers.golden_store import small_tokenizer
from tests.helpers.layouts import LAYOUTS
from tests.helpers.memory_checkpoint import dequantize
from tests.helpers.unchecked import unchecked


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def made(store, **fields):
    seen = []
    model = create(store, CreateRequest(**({"model": "m"} | fields)), seen.append, check=unchecked)
    return model, [status["status"] for status in seen]


def base(store, tmp_path, held=None, **config):
    shards = None if held is None else {"model.safetensors": held}
    folder = write_folder(tmp_path / "f", shards, config=config)
    return made(store, model="base", files=upload(store, folder))[0]


def numbers(model, name):
    weight = Checkpoint.open(model.source()).weight(name)
    return np.array(dequantize(weight).astype(mx.float32))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "int4", "int8", "bf16", "f16"])
def test_a_stored_model_gives_what_its_files_would(store, tmp_path, kind):
    stored = base(store, tmp_path)
    again, _ = made(store, from_="base", quantize=kind)
    direct, _ = made(store, model="direct", files=upload(store, tmp_path / "f"), quantize=kind)
    layers = {layer.name: layer.digest for layer in again.manifest.of(manifests.TENSOR)}
    assert layers == {layer.name: layer.digest for layer in direct.manifest.of(manifests.TENSOR)}
    assert again.details.quantization_level == direct.details.quantization_level
    assert again.details.parameter_size == stored.details.parameter_size
    assert store.verify() == []


def test_what_does_not_change_is_the_bases_own_layer(store, tmp_path):
    stored = base(store, tmp_path)
    again, statuses = made(store, from_="base", quantize="int8", system="s")
    old = {layer.name: layer for layer in stored.manifest.of(manifests.TENSOR)}
    new = {layer.name: layer for layer in again.manifest.of(manifests.TENSOR)}
    assert set(old) == set(new)
    same = {name for name in old if old[name].digest == new[name].digest}
    assert "model.layers.0.input_layernorm.weight" in same
    assert "model.layers.0.self_attn.q_proj.weight" not in same
    assert {new[name].from_ for name in same} == {"base:latest"}
    assert f"using {len(same)} existing tensor layers" in statuses
    assert any("from F32 to int8: weight error" in status for status in statuses)
    assert again.system == "s"


def test_packed_tensors_are_decoded_and_packed_again(store, tmp_path):
    held = packed({name: value for name, value in tensors().items() if "down" not in name}, 8, 32)
    base(store, tmp_path, held, quantization={"bits": 8, "group_size": 32})
    again, statuses = made(store, from_="base", quantize="int4")
    name = "model.layers.0.self_attn.q_proj.weight"
    info = Checkpoint.open(again.source()).info(name)
    assert (info.quantization.bits, info.quantization.group_size) == (4, 64)
    assert any("from int8 to int4: weight error" in status for status in statuses)
    source = Checkpoint.open(FolderSource(str(tmp_path / "f")))
    before = np.array(dequantize(source.weight(name)))
    error = np.linalg.norm(numbers(again, name) - before) / np.linalg.norm(before)
    assert 0 < error < 0.15


def test_a_second_rounding_never_adds_precision(store, tmp_path):
    held = packed({name: value for name, value in tensors().items() if "down" not in name}, 4, 64)
    stored = base(store, tmp_path, held, quantization={"bits": 4, "group_size": 64})
    with pytest.raises(InvalidRequest, match="no tensor of the model becomes int8: it is int4 already"):
        made(store, from_="base", quantize="int8")
    plain, _ = made(store, from_="base", quantize="bf16")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert Checkpoint.open(plain.source()).info(name).quantization is None
        np.testing.assert_allclose(numbers(plain, name), numbers(stored, name), rtol=2**-8)


def test_the_factor_of_a_stored_table_goes_into_its_shards(store, tmp_path):
    folder = LAYOUTS["flash next, fp8"]().write(tmp_path / "f")
    (folder / "tokenizer.json").write_text(small_tokenizer())
    made(store, model="base", files=upload(store, folder))
    again, _ = made(store, from_="base", quantize="bf16")
    direct, _ = made(store, model="direct", files=upload(store, folder), quantize="bf16")
    layers = {layer.name: layer.digest for layer in again.manifest.of(manifests.TENSOR)}
    assert layers == {layer.name: layer.digest for layer in direct.manifest.of(manifests.TENSOR)}
    assert not [name for name in layers if name.endswith("ngram_embedding.weight_scale")]


def test_layers_of_several_tensors_are_written_again_whole(store, tmp_path):
    """As another program writes them: the stacked experts of a layer in one file, one of them packed."""
    prefix = "model.layers.0.mlp.experts"
    held = {
        f"{prefix}.up_proj.weight": np.random.default_rng(0).normal(0, 1, (2, 64, 64)).astype(np.float32),
        f"{prefix}.down_proj.weight": np.zeros((2, 64, 4), np.uint32),
        f"{prefix}.down_proj.weight.scale": np.ones((2, 64, 1), np.uint8),
    }
    path = tmp_path / "experts"
    write(path, held, {f"{prefix}.down_proj.weight.quant_type": "mxfp4"})
    stored = base(store, tmp_path, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
    blob = store.blobs.ingest([path.read_bytes()])
    layer = manifests.Layer(media_type=manifests.TENSOR, digest=blob.digest, size=blob.size, name=prefix)
    store.put("base", manifests.Manifest.build(stored.manifest.config, [*stored.manifest.layers, layer]))
    again, _ = made(store, from_="base", quantize="mxfp4")
    opened = Checkpoint.open(again.source())
    for name in ("up_proj", "down_proj"):
        assert opened.info(f"{prefix}.{name}.weight").quantization.name == "mxfp4"
    assert not opened.weight(f"{prefix}.down_proj.weight").data.any().item()
    assert sorted(opened.names()) == sorted(Checkpoint.open(store.get("base").source()).names())


def test_a_draft_stays_as_it_is_when_its_model_is_quantised(store, tmp_path):
    stored = base(store, tmp_path)
    draft = store.blobs.ingest([b"x"])
    layer = manifests.Layer(media_type=manifests.TENSOR, digest=draft.digest, size=draft.size, name="draft.w")
    store.put("base", manifests.Manifest.build(stored.manifest.config, [*stored.manifest.layers, layer]))
    again, _ = made(store, from_="base", quantize="int8")
    assert [layer.digest for layer in again.manifest.layers if layer.name == "draft.w"] == [draft.digest]

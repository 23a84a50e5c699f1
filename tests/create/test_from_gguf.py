"""GGUF models as tensor layers: the same model where nothing changes, and other precisions as from its original."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from arriero.chat.model_text import ModelText
from arriero.create.create import create
from arriero.create.from_gguf import plan_gguf
from arriero.create.recode import Recoding
from arriero.create.request import CreateRequest
from arriero.create.write import header_of
from arriero.errors import InvalidRequest
from arriero.formats.gguf import GGUFFile
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.gguf_config import config_of
from arriero.source import GGUFSource, LayersSource
from arriero.store import manifests
from arriero.store.store import Store
from tests.create.test_adapter import halves, peft
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.forward import whole
from tests.helpers.gguf_files import encode, gguf_bytes, random_blocks, write_tiny_llama_gguf
from tests.helpers.hybrid_gguf import write_gpt_oss, write_nemotron
from tests.helpers.memory_checkpoint import MemoryCheckpoint, dequantize
from tests.helpers.unchecked import unchecked
from tests.model.test_checkpoint_gguf import EMBEDDING, keys_of
from tests.model.test_qwen3_5_gguf import GOLDENS
from tests.model.test_qwen3_5_gguf import write as write_qwen

Q = "model.layers.0.self_attn.q_proj"


def layers_of(path: Path, asked: str = "") -> LayersSource:
    """The layers that a file becomes, written beside it."""
    files = [GGUFFile(path)]
    config = config_of(files)
    plan, _ = plan_gguf(files, config, Recoding.to(asked, config))
    tensors = {}
    for number, blob in enumerate(plan.blobs):
        pieces: list[bytes] = [header_of(blob)]
        told: list[int] = []
        assert blob.made is not None
        blob.made.write(lambda data, pieces=pieces: pieces.append(bytes(data)), told.append)
        assert sum(map(len, pieces[1:])) == blob.stored_bytes
        tensors[blob.name] = str(path.parent / f"{number}.safetensors")
        Path(tensors[blob.name]).write_bytes(b"".join(pieces))
    (path.parent / "config.json").write_bytes(msgspec.json.encode(config))
    return LayersSource(tensors, {"config.json": str(path.parent / "config.json")})


def golden_ids(name: str) -> list[int]:
    with np.load(GOLDENS / name / "golden.npz") as file:
        found: list[int] = file["ids"].tolist()
    return found


WRITERS: dict[str, tuple[Callable[[Path], Any], list[int]]] = {
    "llama F32": (lambda path: write_tiny_llama_gguf(path, "F32"), [3, 70, 5]),
    "llama BF16": (lambda path: write_tiny_llama_gguf(path, "BF16"), [3, 70, 5]),
    "llama Q4_0": (lambda path: write_tiny_llama_gguf(path, "Q4_0"), [3, 70, 5]),
    "llama Q8_0": (lambda path: write_tiny_llama_gguf(path, "Q8_0"), [3, 70, 5]),
    "qwen35": (lambda path: write_qwen(path, "qwen3_5", "qwen35"), golden_ids("qwen3_5")),
    "qwen35moe": (lambda path: write_qwen(path, "qwen3_5_moe", "qwen35moe"), golden_ids("qwen3_5_moe")),
    "nemotron_h": (
        lambda path: write_nemotron(path, MemoryCheckpoint.golden(GOLDENS / "nemotron_h_moe"), "nemotron_h_moe"),
        golden_ids("nemotron_h_moe"),
    ),
    "gpt-oss": (
        lambda path: write_gpt_oss(path, MemoryCheckpoint.golden(GOLDENS / "gpt_oss_mxfp4")),
        golden_ids("gpt_oss_mxfp4"),
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_nobody_changes_is_the_same_model(tmp_path, name):
    write, ids = WRITERS[name]
    write(tmp_path / "m.gguf")
    file, layers = (
        Checkpoint.open(GGUFSource((str(tmp_path / "m.gguf"),))),
        Checkpoint.open(layers_of(tmp_path / "m.gguf")),
    )
    assert layers.dialect == "gguf"
    assert layers.config == file.config
    assert sorted(layers.names()) == sorted(file.names())
    np.testing.assert_array_equal(whole(load_model(layers, mx.float32), ids), whole(load_model(file, mx.float32), ids))


@pytest.mark.parametrize("kind", ["int8", "nvfp4", "bf16"])
def test_a_plain_file_gives_the_codes_that_its_original_gives(tmp_path, kind):
    store = Store(tmp_path / "store")
    folder = tmp_path / "g"
    folder.mkdir()
    meant = write_tiny_llama_gguf(folder / "tiny.gguf", "F32")
    layers = {"num_hidden_layers": 2, "vocab_size": 268}
    original = write_folder(tmp_path / "f", {"model.safetensors": meant}, config=layers)
    models = [
        create(
            store, CreateRequest(model=name, files=upload(store, at), quantize=kind), lambda s: None, check=unchecked
        )
        for name, at in (("file", folder), ("folder", original))
    ]
    opened = [Checkpoint.open(model.source()) for model in models]
    assert sorted(opened[0].names()) == sorted(opened[1].names())
    assert models[0].details.quantization_level == models[1].details.quantization_level
    for name in opened[0].names():
        one, other = (checkpoint.weight(name) for checkpoint in opened)
        assert one.quantization == other.quantization, name
        for left, right in ((one.data, other.data), (one.scales, other.scales), (one.global_scale, other.global_scale)):
            assert (left is None) == (right is None)
            if left is not None:
                assert mx.array_equal(left, right).item(), name
    assert store.verify() == []


def test_a_stored_file_is_quantised_with_its_texts(tmp_path, judged):
    store = Store(tmp_path / "store")
    folder = tmp_path / "g"
    folder.mkdir()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    write_tiny_llama_gguf(folder / "tiny.gguf", "Q8_0", metadata={"tokenizer.chat_template": template})
    request = CreateRequest(model="base", files=upload(store, folder), system="Be brief.", parameters={"top_k": 3})
    base = create(store, request, lambda status: None, check=judged)
    seen: list[dict[str, Any]] = []
    model = create(store, CreateRequest(model="m", from_="base", quantize="int4"), seen.append, check=judged)
    assert any("from Q8_0 to int4: weight error" in status["status"] for status in seen)
    assert (model.format, model.details.quantization_level) == ("safetensors", "int4")
    assert (model.system, model.params) == ("Be brief.", {"top_k": 3})
    assert (model.chat_template, model.capabilities) == (template, base.capabilities)
    assert (model.details.context_length, model.details.family) == (base.details.context_length, "llama")
    assert manifests.MODEL not in {layer.media_type for layer in model.manifest.layers}
    before, after = ModelText.open(base.source()), ModelText.open(model.source())
    text = "Hello, <|im_end|> wörld 123"
    assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert (after.stop_ids, after.tokenizer.bos_id) == (before.stop_ids, before.tokenizer.bos_id)
    again = create(store, CreateRequest(model="n", from_="m", quantize="bf16"), lambda status: None, check=judged)
    assert Checkpoint.open(again.source()).dialect == "gguf"
    assert store.verify() == []


def test_a_second_rounding_of_a_file_never_adds_precision(tmp_path):
    store = Store(tmp_path / "store")
    folder = tmp_path / "g"
    folder.mkdir()
    write_tiny_llama_gguf(folder / "tiny.gguf", "Q4_0")
    request = CreateRequest(model="m", files=upload(store, folder), quantize="int8")
    with pytest.raises(InvalidRequest, match="no tensor of the model becomes int8: it is int4 already"):
        create(store, request, lambda status: None, check=unchecked)
    assert store.list() == []


def test_what_has_as_many_bits_as_asked_is_not_rounded_again(tmp_path):
    """A layout of other groups than ours would be another rounding, and no smaller."""
    write_tiny_llama_gguf(tmp_path / "m.gguf", "Q8_0")
    file = Checkpoint.open(GGUFSource((str(tmp_path / "m.gguf"),)))
    layers = Checkpoint.open(layers_of(tmp_path / "m.gguf", "int8"))
    one, other = (found.weight(f"{Q}.weight") for found in (file, layers))
    assert other.quantization == one.quantization
    np.testing.assert_array_equal(np.array(other.data), np.array(one.data))


def test_each_expert_of_an_nvfp4_stack_has_its_factor_in_its_numbers(tmp_path):
    keys = keys_of("qwen3moe", expert_count=4, expert_used_count=2, expert_feed_forward_length=32)
    factors = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    held = EMBEDDING | {
        "blk.0.ffn_up_exps.weight": ("NVFP4", random_blocks("NVFP4", 4 * 32, 64).reshape(4, 32, -1)),
        "blk.0.ffn_up_exps.scale": encode("F32", factors),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys, held))
    name = "model.layers.0.mlp.experts.up_proj.weight"
    want = dequantize(Checkpoint.open(GGUFSource((str(path),))).weight(name)).astype(mx.float32)
    got = Checkpoint.open(layers_of(path, "bf16")).weight(name).data
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(want.astype(mx.bfloat16).astype(mx.float32))
    )


def test_an_adapter_goes_onto_a_file(tmp_path):
    store = Store(tmp_path / "store")
    folder = tmp_path / "g"
    folder.mkdir()
    meant = write_tiny_llama_gguf(folder / "tiny.gguf", "F32")
    adapters = upload(store, peft(tmp_path / "a"))
    request = CreateRequest(model="m", files=upload(store, folder), adapters=adapters)
    model = create(store, request, lambda status: None, check=unchecked)
    opened = Checkpoint.open(model.source())
    expected = meant[f"{Q}.weight"] + 2 * halves((64, 4), 2) @ halves((4, 64), 1)
    np.testing.assert_array_equal(np.array(opened.weight(f"{Q}.weight").data), expected)
    other = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(np.array(dequantize(opened.weight(other))), meant[other])


def test_a_file_without_its_tensors_has_the_same_keys(tmp_path):
    keys = {"general.architecture": "llama", "a.list": ["x", "y"], "a.number": 7, "a.text": "é"}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys, {"t": ("F32", np.zeros((2, 32), np.float32))}))
    (tmp_path / "keys.gguf").write_bytes(GGUFFile(tmp_path / "m.gguf").without_tensors())
    bare = GGUFFile(tmp_path / "keys.gguf")
    assert dict(bare.metadata) == dict(GGUFFile(tmp_path / "m.gguf").metadata)
    assert bare.tensors == {}

"""Importing safetensors: layers byte for byte, packed layouts, and everything that is refused."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture, UnsupportedFeature
from arriero.formats.safetensors import SafetensorsFile
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import CONFIG, packed, tensors, upload, write_folder
from tests.helpers.unchecked import unchecked


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def make(store, folder, name="m", **fields):
    """Upload and create; the model and the status texts."""
    seen = []
    model = create(
        store, CreateRequest(model=name, files=upload(store, folder), **fields), seen.append, check=unchecked
    )
    return model, [status["status"] for status in seen]


def refused(store, folder, error, match, **fields):
    """Creating fails with this error and leaves nothing but the uploads."""
    files = upload(store, folder)
    before = {entry.name for entry in store.blobs.files()}
    with pytest.raises(error, match=match):
        create(store, CreateRequest(model="m", files=files, **fields), lambda status: None, check=unchecked)
    assert {entry.name for entry in store.blobs.files()} == before
    assert store.list() == []


def test_every_tensor_becomes_a_layer_of_its_own_with_the_same_bytes(store, tmp_path):
    model, statuses = make(store, write_folder(tmp_path / "m"))
    source = model.source()
    assert set(source.tensors) == set(tensors())
    for name, values in tensors().items():
        file = SafetensorsFile(source.tensors[name])
        assert list(file.tensors) == [name]
        np.testing.assert_array_equal(file.view(name), values)
        assert file.tensors[name].start % 8 == 0
    assert set(source.files) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert statuses[-2:] == ["writing manifest", "success"]
    assert "importing 11 tensors as they are (F32)" in statuses
    assert store.verify() == []


def test_the_configuration_blob_says_what_lists_need(store, tmp_path):
    model, _ = make(store, write_folder(tmp_path / "m"))
    details = model.details
    assert (details.format, details.family, details.quantization_level) == ("safetensors", "llama", "F32")
    assert details.parameter_size == "47K"
    assert (details.context_length, details.embedding_length) == (512, 64)
    assert model.capabilities == ["completion"]


def test_the_uploaded_shards_are_gone_afterwards(store, tmp_path):
    folder = write_folder(tmp_path / "m")
    model, _ = make(store, folder)
    left = {entry.name.replace("-", ":") for entry in store.blobs.files()}
    assert left == model.manifest.digests()


def test_digests_of_another_spelling_mean_the_same_blobs(store, tmp_path):
    files = upload(store, write_folder(tmp_path / "m"))
    spelled = {name: "sha256-" + digest[7:].upper() for name, digest in files.items()}
    model = create(store, CreateRequest(model="m", files=spelled), lambda status: None, check=unchecked)
    assert model.source().files.keys() == set(files) - {"model.safetensors"}
    assert store.verify() == []


def test_creating_again_reuses_every_layer(store, tmp_path):
    folder = write_folder(tmp_path / "m")
    first, _ = make(store, folder)
    second, statuses = make(store, folder, name="n")
    assert second.manifest.digest == first.manifest.digest
    assert not any(status.startswith("creating new layer") for status in statuses)


@pytest.mark.parametrize(
    ("bits", "group", "kind"), [(4, 64, "int4"), (4, 32, "int4"), (8, 64, "int8"), (8, 32, "int8")]
)
def test_a_packed_matrix_is_one_layer_with_its_scales_and_says_how(store, tmp_path, bits, group, kind):
    values = {name: value for name, value in tensors().items() if "down" not in name}
    config = {"quantization": {"group_size": group, "bits": bits}}
    model, _ = make(
        store, write_folder(tmp_path / "m", {"model.safetensors": packed(values, bits, group)}, config=config)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    file = SafetensorsFile(model.source().tensors[name])
    assert list(file.tensors) == [name, f"{name}.scale", f"{name}.bias"]
    assert file.metadata == {"quant_type": kind, "group_size": str(group)}
    assert model.details.quantization_level == kind
    assert model.details.parameter_size == "41K"


def test_a_module_of_other_bits_is_labelled_by_its_own_entry(store, tmp_path):
    values = {name: value for name, value in tensors().items() if "down" not in name}
    held = packed(values)
    gate = "model.layers.0.mlp.gate_proj"
    held |= packed({f"{gate}.weight": values[f"{gate}.weight"]}, bits=8, group=64)
    config = {"quantization": {"group_size": 32, "bits": 4, gate: {"group_size": 64, "bits": 8}}}
    model, _ = make(store, write_folder(tmp_path / "m", {"model.safetensors": held}, config=config))
    assert SafetensorsFile(model.source().tensors[f"{gate}.weight"]).metadata["quant_type"] == "int8"
    assert model.details.quantization_level == "int4"


def test_three_bits_are_labelled_too(store, tmp_path):
    values = {name: value for name, value in tensors().items() if "down" not in name}
    config = {"quantization": {"group_size": 32, "bits": 3}}
    folder = write_folder(tmp_path / "m", {"model.safetensors": packed(values, 3, 32)}, config=config)
    model, _ = make(store, folder)
    file = SafetensorsFile(model.source().tensors["model.embed_tokens.weight"])
    assert file.metadata == {"quant_type": "int3", "group_size": "32"}
    assert model.details.quantization_level == "int3"


def test_an_mlx_conversion_is_marked_in_every_blob(store, tmp_path):
    model, _ = make(store, write_folder(tmp_path / "m", metadata={"format": "mlx"}))
    assert SafetensorsFile(model.source().tensors["model.norm.weight"]).metadata == {"format": "mlx"}


def test_indexed_shards_are_joined_and_strays_left_out(store, tmp_path, caplog):
    values = tensors()
    names = sorted(values)
    first, second = {n: values[n] for n in names[:5]}, {n: values[n] for n in names[5:]}
    folder = write_folder(tmp_path / "m", {"a.safetensors": first, "b.safetensors": second}, index=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        model, _ = make(store, folder)
    assert set(model.source().tensors) == set(values) - {"model.norm.weight"}
    assert "1 tensors are not in model.safetensors.index.json" in caplog.text


def test_an_unknown_architecture_is_refused_with_the_known_ones(store, tmp_path):
    folder = write_folder(tmp_path / "m", config={"architectures": ["LamaForCausalLM"]})
    refused(store, folder, UnsupportedArchitecture, r"LamaForCausalLM .*Did you mean LlamaForCausalLM\?.*Known arch")


def test_a_model_type_alone_is_enough_and_the_first_known_of_two_wins(store, tmp_path):
    folder = write_folder(tmp_path / "a")
    config = {key: value for key, value in CONFIG.items() if key != "architectures"}
    (folder / "config.json").write_text(json.dumps(config))
    make(store, folder, name="a")
    make(store, write_folder(tmp_path / "b", config={"architectures": ["Nope", "LlamaForCausalLM"]}), name="b")
    assert len(store.list()) == 2


def edit(folder, name, data):
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "error", "match"),
    [
        ("config.json", b"{", CheckpointError, "config.json is not valid JSON"),
        ("config.json", b"[]", InvalidRequest, "config.json must hold a JSON object"),
        ("generation_config.json", b"{,}", CheckpointError, "generation_config.json is not valid JSON"),
        ("tokenizer.json", b'{"model":{}}', CheckpointError, "tokenizer.json"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", InvalidRequest, "is a Git LFS"),
        ("model.safetensors", b"PK\x03\x04rest", InvalidRequest, "model.safetensors holds PyTorch weights"),
        ("model.safetensors", b"", InvalidRequest, "model.safetensors is empty"),
        ("model.safetensors", b"\x05\0\0\0\0\0\0\0{}   trailing", CheckpointError, "model.safetensors: "),
        ("pytorch_model.bin", b"\x80\x02x", InvalidRequest, "PyTorch"),
        ("README.md", b"text", InvalidRequest, "unknown type of file 'README.md'"),
        ("model-00001.safetensors", b"\x02\0\0\0\0\0\0\0{}", InvalidRequest, "both model.safetensors and shards"),
        ("model.safetensors.index.json", b"{}", CheckpointError, "has no weight_map"),
        ("model.safetensors.index.json", b'{"weight_map":{"x":"../x"}}', CheckpointError, "bare file"),
        ("model.safetensors.index.json", b'{"weight_map":{"x":"y.safetensors"}}', CheckpointError, "shard y"),
        ("model.safetensors.index.json", b'{"weight_map":{"x":"model.safetensors"}}', CheckpointError, "x is in model"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_its_own_name(store, tmp_path, name, data, error, match):
    folder = write_folder(tmp_path / "m")
    edit(folder, name, data)
    refused(store, folder, error, match)


def test_a_missing_tokenizer_or_configuration_is_refused(store, tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    refused(store, folder, CheckpointError, "tokenizer.json")
    (folder / "config.json").unlink()
    refused(store, folder, InvalidRequest, "config.json is missing; found ")


def test_a_tokenizer_of_another_model_is_refused_but_added_tokens_may_have_no_row(store, tmp_path):
    embedding = "model.embed_tokens.weight"
    for rows in (256, 255):
        held = tensors() | {embedding: tensors()[embedding][:rows]}
        folder = write_folder(tmp_path / str(rows), {"model.safetensors": held}, config={"vocab_size": rows})
        if rows == 256:
            make(store, folder)
            store.delete("m")
        else:
            refused(store, folder, CheckpointError, "tokenizer.json has 256 tokens, config.json a vocab_size of 255")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_huge_document_is_refused_unread(store, tmp_path, monkeypatch, name):
    folder = write_folder(tmp_path / "m")
    with (folder / name).open("ab") as file:
        file.write(b" " * 20_000)
    monkeypatch.setattr("arriero.create.inventory.MOST_BYTES", 20_000)
    refused(store, folder, InvalidRequest, f"{name} has .* bytes; at most 20000")


def test_other_names_than_model_are_not_guessed(store, tmp_path):
    folder = write_folder(tmp_path / "m", {"llama.safetensors": tensors()})
    refused(store, folder, InvalidRequest, r"expected model.safetensors or shards .* found .*llama.safetensors")


def test_a_tensor_in_two_shards_is_refused(store, tmp_path):
    one = {"model.norm.weight": np.ones(4, np.float32)}
    folder = write_folder(tmp_path / "m", {"model-1.safetensors": one, "model-2.safetensors": one})
    refused(store, folder, CheckpointError, r"model.norm.weight is in both model-1.safetensors and model-2.safetensors")


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        ({"x.qweight": np.zeros((4, 4), np.int32)}, UnsupportedFeature, "x.qweight is packed, but .* names no method"),
        ({"x.scales": np.zeros((4, 4), np.float16)}, CheckpointError, "x.scales belongs to x.weight, which is missing"),
        (
            {"x.weight": np.zeros((4, 8), np.uint32), "x.scales": np.ones((4, 1), np.float16)},
            CheckpointError,
            "zero points",
        ),
        (
            {"x.weight": np.zeros((4, 7), np.uint32)}
            | {f"x.{n}": np.ones((4, 1), np.float16) for n in ("scales", "biases")},
            CheckpointError,
            "fit no affine layout",
        ),
        (
            {"x.weight": np.zeros((4, 8), np.uint32), "x.scales": np.ones((3, 1), np.float16)},
            CheckpointError,
            "do not belong",
        ),
        (
            {"x.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn), "x.weight_scale_inv": np.ones((2, 2), np.float32)},
            CheckpointError,
            r"x.weight of shape \[4, 8\] has FP8 scales of shape \[2, 2\]",
        ),
        (
            {
                "x.weight_packed": np.zeros((4, 8), np.int32),
                "x.weight_scale": np.ones((4, 2), np.float32),
                "x.weight_shape": np.array([4, 64], np.int64),
            },
            UnsupportedFeature,
            "x.weight is stored as I32, a quantisation that is not imported yet",
        ),
        (
            {"x.weight": np.ones((4, 8), ml_dtypes.float8_e5m2), "x.weight_scale": np.ones((), np.float32)},
            UnsupportedFeature,
            "x.weight is stored as F8_E5M2",
        ),
    ],
)
def test_a_quantisation_that_would_not_load_is_refused(store, tmp_path, extra, error, match):
    refused(store, write_folder(tmp_path / "m", {"model.safetensors": tensors() | extra}), error, match)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.float64])
def test_codes_without_scales_and_types_that_do_not_load_are_refused(store, tmp_path, dtype):
    name = "model.layers.0.self_attn.q_proj.weight"
    held = tensors() | {"model.layers.0.self_attn.q_proj.SCB": np.ones(64, np.float32)}
    held[name] = held[name].astype(dtype)
    folder = write_folder(tmp_path / "m", {"model.safetensors": held})
    refused(store, folder, UnsupportedFeature, f"tensor {name} is stored as .* not imported yet")


def test_fp8_keeps_its_codes_and_scales_and_is_called_so(store, tmp_path):
    held = tensors() | {
        "x.weight": np.zeros((4, 6), ml_dtypes.float8_e4m3fn),
        "x.weight_scale_inv": np.ones((1, 1), ml_dtypes.bfloat16),
        "x.input_scale": np.ones((), np.float32),
    }
    model, _ = make(store, write_folder(tmp_path / "m", {"model.safetensors": held}))
    assert {"x.weight", "x.weight_scale_inv"} <= set(model.source().tensors)
    assert "x.input_scale" not in model.source().tensors
    assert model.config.file_type == "fp8"


def test_stray_scales_of_a_tied_head_are_left_out_with_a_warning(store, tmp_path, caplog):
    held = tensors() | {"lm_head.scales": np.ones((4, 1), np.float16), "lm_head.biases": np.ones((4, 1), np.float16)}
    with caplog.at_level(logging.WARNING):
        model, _ = make(store, write_folder(tmp_path / "m", {"model.safetensors": held}))
    assert "lm_head.scales" not in model.source().tensors
    assert "lm_head.scales is left out" in caplog.text
    untied = write_folder(tmp_path / "n", {"model.safetensors": held}, config={"tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=r"lm_head.scales belongs to lm_head.weight, which is missing"):
        make(store, untied, name="n")


def test_an_nvfp4_checkpoint_of_another_producer_keeps_its_parts(store, tmp_path):
    import ml_dtypes

    held = tensors() | {
        "x.weight_packed": np.zeros((4, 32), np.uint8),
        "x.weight_scale": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
        "x.weight_global_scale": np.ones(1, np.float32),
    }
    model, _ = make(store, write_folder(tmp_path / "m", {"model.safetensors": held}))
    assert {"x.weight_packed", "x.weight_scale", "x.weight_global_scale"} <= set(model.source().tensors)
    assert model.details.quantization_level == "nvfp4"


def test_raising_from_the_progress_stops_and_cleans_up(store, tmp_path):
    class GoneAway(Exception):
        pass

    def stop(status):
        if status.get("completed"):
            raise GoneAway

    files = upload(store, write_folder(tmp_path / "m"))
    before = {entry.name for entry in store.blobs.files()}
    with pytest.raises(GoneAway):
        create(store, CreateRequest(model="m", files=files), stop, check=unchecked)
    assert {entry.name for entry in store.blobs.files()} == before

"""Checkpoints opened from folders and from stored tensor layers."""

import json

import ml_dtypes
import mlx.core as mx
import numpy as np
import psutil
import pytest

from arriero.errors import CheckpointError
from arriero.formats import blockfp8
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.model.checkpoint import Checkpoint
from arriero.model.weight import Quantization
from arriero.source import FolderSource, LayersSource
from tests.helpers.memory_checkpoint import dequantize

ROWS = mx.array(np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32))
AFFINE = Quantization("affine", 4, 32)


def folder(path, tensors, config=None, metadata=None) -> Checkpoint:
    mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata)
    (path / "config.json").write_text(json.dumps({"architectures": ["X"]} | (config or {})))
    return Checkpoint.open(FolderSource(str(path)))


def packed(how: Quantization, weight=ROWS, prefix="p", style="mlx"):
    parts = mx.quantize(weight, group_size=how.group_size, bits=how.bits, mode=how.mode)
    if style == "mlx":
        names = [f"{prefix}.weight", f"{prefix}.scales", f"{prefix}.biases"]
    else:
        names = [f"{prefix}.weight", f"{prefix}.weight.scale", f"{prefix}.weight.bias"]
    return dict(zip(names, parts, strict=False))


def layers(path, blobs, config=None) -> LayersSource:
    """Blobs: layer name → (tensors, metadata)."""
    (path / "config.json").write_text(json.dumps(config or {"architectures": ["X"]}))
    paths = {}
    for number, (layer, (tensors, metadata)) in enumerate(blobs.items()):
        target = path / f"blob{number}.safetensors"
        mx.save_safetensors(str(target), tensors, metadata)
        paths[layer] = str(target.rename(path / f"sha256-{number:064x}"))
    return LayersSource(paths, {"config.json": str(path / "config.json")})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dense_tensors_keep_their_dtype_and_the_folder_is_hugging_face(tmp_path, dtype):
    checkpoint = folder(
        tmp_path, {"p.weight": ROWS.astype(dtype), "p.bias": ROWS[0].astype(dtype)}, metadata={"format": "pt"}
    )
    assert checkpoint.dialect == "hf"
    assert checkpoint.tensor("p.weight").dtype == dtype
    assert mx.array_equal(checkpoint.tensor("p.weight"), ROWS.astype(dtype))
    assert checkpoint.weight("p.weight").quantization is None
    assert checkpoint.unused() == ["p.bias"]


def test_an_unpacked_file_written_by_mlx_is_of_its_dialect(tmp_path):
    assert folder(tmp_path, {"p.weight": ROWS}, metadata={"format": "mlx"}).dialect == "mlx"


def test_configurations_are_read_and_a_missing_or_broken_one_is_refused(tmp_path):
    folder(tmp_path, {"p.weight": ROWS})
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}')
    checkpoint = Checkpoint.open(FolderSource(str(tmp_path)))
    assert checkpoint.config == {"architectures": ["X"]}
    assert checkpoint.generation_config == {"top_k": 20}
    for text, message in (("{", "not readable JSON"), ("[]", "not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(FolderSource(str(tmp_path)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: the configuration is missing"):
        Checkpoint.open(FolderSource(str(tmp_path)))


ALL = [Quantization("affine", b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
FLOATS = [Quantization("nvfp4", 4, 16), Quantization("mxfp4", 4, 32), Quantization("mxfp8", 8, 32)]


@pytest.mark.parametrize("how", ALL + FLOATS, ids=lambda q: f"{q.name}-{q.group_size}")
def test_a_packed_matrix_is_given_as_stored(tmp_path, how):
    declared = {"quantization": {"bits": how.bits, "group_size": how.group_size, "mode": how.mode}}
    checkpoint = folder(tmp_path, packed(how), declared)
    assert checkpoint.names() == ["p.weight"]
    weight = checkpoint.weight("p.weight")
    assert weight.quantization == checkpoint.info("p.weight").quantization == how
    assert weight.shape == checkpoint.info("p.weight").shape == (64, 128)
    expected = mx.dequantize(
        *packed(how).values(), group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=mx.float32
    )
    assert mx.array_equal(dequantize(weight), expected)
    assert checkpoint.dialect == "mlx"
    assert checkpoint.unused() == []


@pytest.mark.parametrize("how", FLOATS, ids=lambda q: q.name)
def test_float_scales_decide_the_mode_whatever_is_declared(tmp_path, how):
    checkpoint = folder(tmp_path, packed(how), {"quantization": {"bits": 4, "group_size": 64}})
    assert checkpoint.weight("p.weight").quantization == how
    assert checkpoint.weight("p.weight").biases is None


def test_a_tensor_of_other_bits_than_declared_wins_with_the_group_size_kept(tmp_path):
    tensors = packed(AFFINE) | packed(Quantization("affine", 6, 32), prefix="q")
    checkpoint = folder(tmp_path, tensors, {"quantization": {"bits": 4, "group_size": 32}})
    assert checkpoint.weight("p.weight").quantization == AFFINE
    assert checkpoint.weight("q.weight").quantization == Quantization("affine", 6, 32)


def test_a_declared_module_decides_where_shapes_leave_it_open(tmp_path):
    how = Quantization("affine", 8, 32)
    config = {"quantization": {"bits": 4, "group_size": 64, "q": {"bits": 8, "group_size": 32}, "r": False}}
    tensors = packed(Quantization("affine", 4, 64)) | packed(how, prefix="q")
    checkpoint = folder(tmp_path, tensors, config)
    assert checkpoint.weight("p.weight").quantization == Quantization("affine", 4, 64)
    assert checkpoint.weight("q.weight").quantization == how


def test_nothing_declared_means_the_usual_sizes(tmp_path):
    tensors = packed(Quantization("affine", 4, 64)) | packed(Quantization("affine", 8, 64), prefix="q")
    checkpoint = folder(tmp_path, tensors | packed(AFFINE, prefix="r"))
    assert [checkpoint.info(f"{n}.weight").quantization.name for n in "pqr"] == ["int4", "int8", "int4"]
    assert [checkpoint.info(f"{n}.weight").quantization.group_size for n in "pqr"] == [64, 64, 32]


def test_stacks_are_packed_matrices_too(tmp_path):
    stack = mx.stack([ROWS, ROWS * 2])
    weight = folder(tmp_path, packed(AFFINE, stack), {"quantization": {"bits": 4, "group_size": 32}}).weight("p.weight")
    assert weight.shape == (2, 64, 128)


def test_an_mlx_global_scale_is_the_largest_value_and_becomes_a_multiplier(tmp_path):
    tensors = packed(FLOATS[0]) | {"p.global_scale": mx.array(2688.0 * 3)}
    stack = packed(FLOATS[0], mx.stack([ROWS, ROWS]), "e") | {"e.global_scale": mx.array([2688.0, 5376.0])}
    checkpoint = folder(tmp_path, tensors | stack)
    assert checkpoint.weight("p.weight").global_scale.item() == 3
    assert checkpoint.weight("e.weight").global_scale.tolist() == [1, 2]
    assert checkpoint.names() == ["e.weight", "p.weight"]


def test_a_global_scale_that_fits_no_matrix_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor p\.weight has a global scale"):
        folder(tmp_path, packed(FLOATS[0]) | {"p.global_scale": mx.array([1.0, 2.0])})


@pytest.mark.parametrize("take", ["weight", "host_weight"])
def test_a_global_scale_that_is_no_number_is_refused_with_its_matrix(tmp_path, take):
    checkpoint = folder(tmp_path, packed(FLOATS[0]) | {"p.global_scale": mx.array([float("nan")])})
    with pytest.raises(CheckpointError, match=r"tensor p\.weight has an unusable global scale"):
        getattr(checkpoint, take)("p.weight")


def test_opening_reads_no_global_scale(tmp_path, monkeypatch):
    """A model of 512 experts and 48 layers has 70,000: a read each, from a disk, took minutes."""
    monkeypatch.setattr(SafetensorsFile, "view", lambda self, name: pytest.fail(f"{name} was read"))
    folder(tmp_path, packed(FLOATS[0]) | {"p.global_scale": mx.array([1.0])})


def test_stray_head_tensors_of_a_fused_model_are_listed(tmp_path):
    strays = {name: part for name, part in packed(AFFINE, prefix="lm_head").items() if name != "lm_head.weight"}
    checkpoint = folder(
        tmp_path, packed(AFFINE) | strays, {"tie_word_embeddings": True, "quantization": {"bits": 4, "group_size": 32}}
    )
    assert sorted(checkpoint.unused()) == ["lm_head.biases", "lm_head.scales", "p.weight"]
    assert "lm_head.weight" not in checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p.biases": None}, "no zero points"),
        ({"p.biases": mx.zeros((64, 2))}, "zero points F32"),
        ({"p.scales": mx.zeros((32, 4)), "p.biases": mx.zeros((32, 4))}, r"scales of shape \[32, 4\]"),
        ({"p.scales": mx.zeros((64, 4), dtype=mx.int32)}, "scales of type I32"),
        ({"p.scales": mx.zeros((64, 3)), "p.biases": mx.zeros((64, 3))}, "do not belong together"),
        ({"p.scales": mx.zeros((64, 16)), "p.biases": mx.zeros((64, 16))}, "fit no affine layout"),
        ({"p.scales": mx.zeros((64, 16), dtype=mx.uint8), "p.biases": None}, "fit none of nvfp4, mxfp4, mxfp8"),
        ({"p.scales": mx.zeros((64, 8), dtype=mx.uint8)}, "8-bit float scales and zero points"),
    ],
)
def test_companions_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    tensors = {name: part for name, part in (packed(AFFINE) | change).items() if part is not None}
    with pytest.raises(CheckpointError, match=rf"tensor p\.weight.*{message}"):
        folder(tmp_path, tensors)


def test_gptq_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"a\.qweight is packed by GPTQ or AWQ"):
        folder(tmp_path, {"a.qweight": mx.zeros((4, 4), dtype=mx.int32)})


def modelopt(how: Quantization):
    data, scales = mx.quantize(ROWS, group_size=how.group_size, bits=how.bits, mode=how.mode)
    return np.array(data).view(np.uint8), np.array(scales)


def numpy_folder(path, tensors) -> Checkpoint:
    write(path / "model.safetensors", tensors)
    (path / "config.json").write_text('{"architectures": ["X"]}')
    return Checkpoint.open(FolderSource(str(path)))


def test_the_4_and_8_bit_floats_of_other_tools_are_relabelled(tmp_path):
    four, nv_scales = modelopt(FLOATS[0])
    mx4, mx4_scales = modelopt(FLOATS[1])
    eight, mx8_scales = modelopt(FLOATS[2])
    e4m3 = ml_dtypes.float8_e4m3fn
    checkpoint = numpy_folder(
        tmp_path,
        {
            "a.weight": four,
            "a.weight_scale": nv_scales.view(e4m3),
            "a.weight_scale_2": np.array(0.5, np.float32),
            "a.input_scale": np.array(1, np.float32),
            "b.weight_packed": four,
            "b.weight_scale": nv_scales.view(e4m3),
            "b.weight_global_scale": np.array([4], np.float32),
            "c.weight": mx4,
            "c.weight_scale": mx4_scales,
            "d.weight": eight.view(e4m3),
            "d.weight_scale": mx8_scales,
        },
    )
    assert checkpoint.names() == ["a.weight", "b.weight", "c.weight", "d.weight"]
    assert checkpoint.dialect == "hf"
    assert [checkpoint.weight(name).quantization for name in checkpoint.names()] == [FLOATS[0], *FLOATS]
    assert checkpoint.weight("a.weight").global_scale.item() == 0.5
    assert checkpoint.weight("b.weight").global_scale.item() == 0.25
    for name, how in zip("cd", FLOATS[1:], strict=True):
        again = mx.quantize(ROWS, group_size=how.group_size, bits=how.bits, mode=how.mode)
        assert mx.array_equal(checkpoint.weight(f"{name}.weight").data, again[0])


@pytest.mark.parametrize("shape", [(), (1,), (200, 1), (2, 3)], ids=["tensor", "one", "rows", "blocks"])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_fp8_matrices_are_decoded_when_loaded_and_their_codes_can_be_viewed(tmp_path, shape, name):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (200, 300), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    checkpoint = numpy_folder(tmp_path, {"a.weight": codes.view(ml_dtypes.float8_e4m3fn), f"a.{name}": scales})
    assert checkpoint.names() == ["a.weight"]
    loaded = checkpoint.tensor("a.weight")
    assert loaded.dtype == mx.float32
    np.testing.assert_array_equal(np.array(loaded), blockfp8.dequantize(codes, scales))
    viewed = Checkpoint.open(FolderSource(str(tmp_path))).host_weight("a.weight")
    np.testing.assert_array_equal(viewed.data, codes)
    np.testing.assert_array_equal(viewed.scales, scales)


def test_a_stack_of_fp8_matrices_has_scales_by_block_of_each(tmp_path):
    codes = np.random.default_rng(1).integers(0, 0x7F, (2, 128, 256), dtype=np.uint8)
    scales = np.array([[[1, 2]], [[3, 4]]], np.float32)
    checkpoint = numpy_folder(tmp_path, {"a.weight": codes.view(ml_dtypes.float8_e4m3fn), "a.weight_scale_inv": scales})
    np.testing.assert_array_equal(np.array(checkpoint.tensor("a.weight")), blockfp8.dequantize(codes, scales))


def test_fp8_scales_of_another_shape_are_refused(tmp_path):
    codes = np.zeros((128, 128), np.uint8).view(ml_dtypes.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"a\.weight .* FP8 scales of shape \[4, 4\]"):
        numpy_folder(tmp_path, {"a.weight": codes, "a.weight_scale_inv": np.ones((4, 4), np.float32)})


def test_an_unknown_8_bit_layout_can_be_viewed_but_is_not_loaded_as_numbers(tmp_path):
    codes = np.zeros((128, 128), np.uint8).view(ml_dtypes.float8_e5m2)
    checkpoint = numpy_folder(tmp_path, {"a.weight": codes, "a.weight_scale_inv": np.ones((1, 1), np.float32)})
    with pytest.raises(CheckpointError, match=r"a\.weight is F8_E5M2 in a layout that is not supported"):
        checkpoint.weight("a.weight")
    assert checkpoint.host("a.weight").dtype == np.uint8


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int32, mx.uint32])
def test_codes_without_scales_are_not_loaded_as_a_matrix(tmp_path, dtype):
    """LLM.int8() keeps the scales as `X.SCB`; the codes alone would be another model."""
    checkpoint = folder(tmp_path, {"x.weight": mx.ones((2, 4), dtype), "x.SCB": mx.ones(2)})
    with pytest.raises(CheckpointError, match=r"tensor x.weight is stored as .* and has no scales that we know"):
        checkpoint.weight("x.weight")
    assert checkpoint.tensor("x.weight").dtype == dtype


def test_a_file_with_a_type_that_mlx_cannot_read_still_gives_the_others(tmp_path):
    rows = np.array(ROWS)
    checkpoint = numpy_folder(tmp_path, {"a": rows.astype(np.float64), "b": rows, "c": rows.astype(ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(np.array(checkpoint.tensor("b")), rows)
    assert mx.array_equal(checkpoint.tensor("c"), ROWS.astype(mx.bfloat16))
    with pytest.raises(CheckpointError, match="tensor a is stored as F64"):
        checkpoint.tensor("a")


def test_layers_fold_their_companions_and_keep_real_biases(tmp_path):
    int4 = Quantization("affine", 4, 64)
    source = layers(
        tmp_path,
        {
            "a.weight": (packed(int4, prefix="a", style="layers"), {"quant_type": "int4", "group_size": "64"}),
            "a.bias": ({"a.bias": ROWS[0]}, None),
            "n.weight": ({"n.weight": ROWS[0]}, None),
            "f.weight": (
                packed(FLOATS[0], prefix="f", style="layers") | {"f.weight.global_scale": mx.array(0.5)},
                {"quant_type": "nvfp4", "group_size": "16"},
            ),
        },
    )
    checkpoint = Checkpoint.open(source)
    assert checkpoint.names() == ["a.weight", "a.bias", "n.weight", "f.weight"]
    assert checkpoint.dialect == "hf"
    assert checkpoint.weight("a.weight").quantization == int4
    assert checkpoint.weight("f.weight").global_scale.item() == 0.5
    assert checkpoint.tensor("a.bias").shape == (128,)


def test_members_of_an_expert_group_have_their_own_types(tmp_path):
    stack = mx.stack([ROWS, ROWS])
    eight = Quantization("affine", 8, 64)
    group = "model.layers.3.mlp.experts"
    tensors = packed(Quantization("affine", 4, 64), stack, f"{group}.up_proj", "layers")
    tensors |= packed(eight, stack, f"{group}.down_proj", "layers")
    metadata = {
        f"{group}.{n}.weight.{key}": item
        for n, kind in (("up_proj", "int4"), ("down_proj", "int8"))
        for key, item in (("quant_type", kind), ("group_size", "64"))
    }
    checkpoint = Checkpoint.open(layers(tmp_path, {group: (tensors, metadata)}))
    assert checkpoint.weight(f"{group}.down_proj.weight").quantization == eight
    assert checkpoint.weight(f"{group}.up_proj.weight").shape == (2, 64, 128)


@pytest.mark.parametrize(
    ("how", "metadata"),
    [
        (Quantization("affine", 4, 32), None),
        (Quantization("affine", 8, 64), None),
        (Quantization("affine", 4, 64), None),
        (Quantization("affine", 4, 64), {"quant_type": "Q4"}),
        (Quantization("affine", 8, 32), {"quant_type": "FP8"}),
        (Quantization("affine", 8, 64), {"quant_type": "int4", "group_size": "64"}),
        (Quantization("affine", 4, 32), {"quant_type": "int8", "group_size": "64"}),
        (Quantization("affine", 6, 32), {"quant_type": "int4", "group_size": "32"}),
    ],
)
def test_missing_or_wrong_types_of_a_blob_give_way_to_the_shapes(tmp_path, how, metadata):
    source = layers(tmp_path, {"p.weight": (packed(how, style="layers"), metadata)})
    assert Checkpoint.open(source).weight("p.weight").quantization == how


@pytest.mark.parametrize("metadata", [{"quant_type": "int7"}, {"quant_type": "int4", "group_size": "many"}])
def test_an_unknown_type_of_a_blob_is_refused(tmp_path, metadata):
    source = layers(tmp_path, {"p.weight": (packed(AFFINE, style="layers"), metadata)})
    with pytest.raises(CheckpointError, match=r"tensor p\.weight: the (quantisation type|group size)"):
        Checkpoint.open(source)


def test_a_missing_short_or_wrong_blob_is_named_with_what_to_do(tmp_path):
    source = layers(tmp_path, {"a.weight": ({"a.weight": ROWS}, None), "b.weight": ({"b.weight": ROWS}, None)})
    blob = tmp_path / f"sha256-{1:064x}"
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"layer b\.weight: .*incomplete; pull .* or create it again"):
        Checkpoint.open(source)
    blob.write_bytes((tmp_path / f"sha256-{0:064x}").read_bytes())
    with pytest.raises(CheckpointError, match=r"layer b\.weight: .* holds tensor a\.weight"):
        Checkpoint.open(source)
    blob.unlink()
    with pytest.raises(CheckpointError, match=r"layer b\.weight: .* missing; pull .* or create it again"):
        Checkpoint.open(source)


def test_a_model_without_configuration_is_refused(tmp_path):
    source = layers(tmp_path, {"a.weight": ({"a.weight": ROWS}, None)})
    with pytest.raises(CheckpointError, match=r"no config\.json layer"):
        Checkpoint.open(LayersSource(source.tensors, {}))


def test_hundreds_of_layers_do_not_hold_hundreds_of_files_open(tmp_path):
    small = ROWS[:2]
    source = layers(tmp_path, {f"l{i}.weight": ({f"l{i}.weight": small + i}, None) for i in range(200)})
    checkpoint = Checkpoint.open(source)
    before = psutil.Process().num_fds()
    arrays = [checkpoint.tensor(name) for name in checkpoint.names()]
    assert psutil.Process().num_fds() - before <= 65
    assert all(mx.array_equal(array, small + i) for i, array in enumerate(arrays))

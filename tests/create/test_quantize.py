"""`create --quantize` over every architecture: what is stored loads, and answers nearly as the reference did."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from arriero.create.create import create
from arriero.create.inventory import take_inventory
from arriero.create.plan import make_plan
from arriero.create.recode import Recoding
from arriero.create.request import CreateRequest
from arriero.errors import CheckpointError, InvalidRequest, UnsupportedFeature
from arriero.formats import affine, mxfp, nvfp4
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.quantization import Quantization
from arriero.source import FolderSource
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import CONFIG, packed, tensors, upload, write_folder
from tests.helpers.forward import whole
from tests.helpers.golden_store import small_tokenizer
from tests.helpers.layouts import LAYOUTS
from tests.helpers.unchecked import unchecked

GOLDENS = Path(__file__).parents[1] / "model" / "goldens"
NAMES = (
    "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gemma4_26b_a4b", "gemma4_e2b",
    "glm4_moe", "gpt_oss", "gpt_oss_mxfp4", "granite", "laguna", "llama", "nemotron_h", "nemotron_h_moe", "qwen2",
    "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen4_exp",
)  # fmt: skip


def make(tmp_path, folder, kind="nvfp4", check=unchecked, **fields):
    """Import at a precision; the model and the status texts."""
    seen = []
    store = Store(tmp_path / "store")
    request = CreateRequest(model="m", files=upload(store, folder), quantize=kind, **fields)
    return create(store, request, seen.append, check=check), [status["status"] for status in seen]


def golden_folder(tmp_path, name):
    folder = tmp_path / "golden"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((GOLDENS / name / file).read_bytes())
    (folder / "tokenizer.json").write_text(small_tokenizer())
    return folder


def decoded(checkpoint: Checkpoint, folder: Path) -> Path:
    """A folder with the plain float32 numbers that the packed tensors of a checkpoint mean."""
    folder.mkdir()
    plain = {}
    for name in checkpoint.names():
        weight = checkpoint.host_weight(name)
        how = weight.quantization
        if how is None:
            plain[name] = weight.data
        elif how.mode == "nvfp4":
            values = nvfp4.dequantize(weight.data, weight.scales)
            factor = weight.global_scale
            plain[name] = values * factor.reshape(factor.shape + (1,) * (values.ndim - factor.ndim))
        else:
            plain[name] = mxfp.dequantize(weight.data, weight.scales, how.bits)
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    write(folder / "model.safetensors", plain)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_answers_with_the_numbers_that_were_stored(tmp_path, name):
    model, _ = make(tmp_path, golden_folder(tmp_path, name), "nvfp4")
    found = Checkpoint.open(model.source())
    # All layers of a golden of two may be among those that get eight bits.
    assert {info.quantization.name for n in found.names() if (info := found.info(n)).quantization} & {"nvfp4", "mxfp8"}
    plain = Checkpoint.open(FolderSource(str(decoded(Checkpoint.open(model.source()), tmp_path / "plain"))))
    ids = np.load(GOLDENS / name / "golden.npz")["ids"].tolist()[:12]
    want = whole(load_model(plain, mx.float32), ids)
    got = whole(load_model(found, mx.float32), ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * float(np.abs(want).max()))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8", "int4", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_mlx_decodes_what_was_stored_to_nearly_the_source(tmp_path, kind, dtype):
    held = {name: value.astype(dtype) for name, value in tensors().items()}
    model, statuses = make(tmp_path, write_folder(tmp_path / "m", {"model.safetensors": held}), kind)
    checkpoint = Checkpoint.open(model.source())
    bounds = {"nvfp4": 0.09, "mxfp4": 0.12, "mxfp8": 0.028, "int4": 0.1, "int8": 0.006}
    seen = set()
    for name in checkpoint.names():
        how = checkpoint.info(name).quantization
        weight = checkpoint.weight(name)
        if how is None:
            np.testing.assert_array_equal(np.array(weight.data.astype(mx.float32)), held[name].astype(np.float32))
            continue
        seen.add(how.name)
        wide = [None if part is None else part.astype(mx.float32) for part in (weight.scales, weight.biases)]
        got = mx.dequantize(
            weight.data,
            *(wide if how.mode == "affine" else (weight.scales, None)),
            group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=mx.float32,
        )  # fmt: skip
        got = np.array(got) * (1 if weight.global_scale is None else float(weight.global_scale))
        values = held[name].astype(np.float32)
        assert np.sqrt(np.square(got - values).sum() / np.square(values).sum()) < bounds[how.name]
    assert kind in seen
    assert any(f"to {kind}: weight error" in status for status in statuses)
    assert model.details.quantization_level == kind


def test_the_scale_search_can_be_turned_off_and_costs_error(tmp_path):
    folder = write_folder(tmp_path / "m")
    errors = {}
    for search in (True, False):
        _, statuses = make(tmp_path / str(search), folder, "nvfp4", scale_search=search)
        line = next(status for status in statuses if "to nvfp4" in status)
        errors[search] = float(line.rpartition(" ")[2].rstrip("%"))
    assert errors[True] < 0.9 * errors[False]


def test_experts_have_a_global_scale_each(tmp_path):
    model, _ = make(tmp_path, golden_folder(tmp_path, "gemma4_26b_a4b"), "nvfp4")
    checkpoint = Checkpoint.open(model.source())
    banks = [name for name in checkpoint.names() if name.endswith("experts.gate_up_proj")]
    assert banks
    for name in banks:
        assert checkpoint.weight(name).global_scale.shape == (checkpoint.info(name).shape[0],)


@pytest.mark.parametrize(("kind", "stored"), [("bf16", "BF16"), ("f16", "F16")])
def test_plain_types_round_matrices_and_leave_vectors(tmp_path, kind, stored):
    model, _ = make(tmp_path, write_folder(tmp_path / "m"), kind)
    source = model.source()
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    for name, values in tensors().items():
        file = SafetensorsFile(source.tensors[name])
        assert file.tensors[name].dtype == (stored if values.ndim == 2 else "F32")
        np.testing.assert_array_equal(file.view(name), values.astype(dtype) if values.ndim == 2 else values)


def test_a_number_beyond_float16_is_refused_with_its_tensor(tmp_path):
    held = tensors()
    held["model.layers.0.mlp.up_proj.weight"][3, 3] = 1e6
    with pytest.raises(CheckpointError, match=r"up_proj.weight holds numbers beyond 65504; ask for bf16"):
        make(tmp_path, write_folder(tmp_path / "m", {"model.safetensors": held}), "f16")


@pytest.mark.parametrize("kind", ["int8", "bf16", "nvfp4"])
def test_the_error_of_huge_numbers_is_known(tmp_path, kind):
    values = np.random.default_rng(0).normal(0, 1e30, (64, 64)).astype(np.float32)
    _, statuses = make(tmp_path, one_changed(tmp_path, {f"{QUERY}.weight": values}), kind)
    errors = [float(status.rpartition(" ")[2].rstrip("%")) for status in statuses if "weight error" in status]
    assert len(errors) > 0
    assert all(0 < error < 10 for error in errors)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_with_their_tensor(tmp_path, bad):
    held = tensors()
    held["model.layers.0.mlp.up_proj.weight"][3, 3] = bad
    with pytest.raises(CheckpointError, match=r"up_proj.weight holds numbers that are not finite"):
        make(tmp_path, write_folder(tmp_path / "m", {"model.safetensors": held}))


QUERY = "model.layers.0.self_attn.q_proj"


def one_changed(tmp_path, changed, **config):
    """A folder whose query projection is stored otherwise."""
    held = {name: value for name, value in tensors().items() if name != f"{QUERY}.weight"}
    return write_folder(tmp_path / "m", {"model.safetensors": held | changed}, config=config)


def test_fp8_under_powers_of_two_becomes_mxfp8_without_error(tmp_path):
    rng = np.random.default_rng(3)
    codes = rng.normal(0, 30, (64, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[2.0**-9]], np.float32)
    folder = one_changed(tmp_path, {f"{QUERY}.weight": codes, f"{QUERY}.weight_scale_inv": scale})
    model, statuses = make(tmp_path, folder, "mxfp8")
    assert "1 tensors from fp8 to mxfp8: exact" in statuses
    weight = Checkpoint.open(model.source()).weight(f"{QUERY}.weight")
    got = mx.dequantize(weight.data, weight.scales, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32)
    np.testing.assert_array_equal(np.array(got), codes.astype(np.float32) * scale)


@pytest.mark.parametrize(
    "scales",
    [np.array([[0.003]], np.float32), np.full((64, 1), 0.003, np.float32), np.array(0.003, np.float32)],
    ids=["block", "row", "tensor"],
)
def test_fp8_under_other_scales_is_rounded_again_and_says_so(tmp_path, scales):
    codes = np.random.default_rng(3).normal(0, 30, (64, 64)).astype(ml_dtypes.float8_e4m3fn)
    name = "weight_scale_inv" if scales.shape == (1, 1) else "weight_scale"
    model, statuses = make(
        tmp_path, one_changed(tmp_path, {f"{QUERY}.weight": codes, f"{QUERY}.{name}": scales}), "mxfp8"
    )
    assert any(status.startswith("1 tensors from fp8 to mxfp8: weight error") for status in statuses)
    weight = Checkpoint.open(model.source()).weight(f"{QUERY}.weight")
    got = np.array(mx.dequantize(weight.data, weight.scales, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32))
    want = codes.astype(np.float32) * np.float32(0.003)
    assert np.sqrt(np.square(got - want).sum() / np.square(want).sum()) < 0.03


def test_blocks_of_fp8_have_their_own_scales(tmp_path):
    codes = np.ones((200, 320), ml_dtypes.float8_e4m3fn)
    scales = (2.0 ** np.arange(-6, 0)).reshape(2, 3).astype(np.float32)
    for factor, exact in ((1, True), (0.75, False)):
        held = {f"{QUERY}.weight": codes, f"{QUERY}.weight_scale_inv": scales * np.float32(factor)}
        place = tmp_path / str(factor)
        model, statuses = make(place, one_changed(place, held), "mxfp8")
        assert ("1 tensors from fp8 to mxfp8: exact" in statuses) is True
        weight = Checkpoint.open(model.source()).weight(f"{QUERY}.weight")
        assert weight.quantization == Quantization("mxfp8", 8, 32)
        got = np.array(mx.dequantize(weight.data, weight.scales, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32))
        want = (scales * factor).repeat(128, 0)[:200].repeat(128, 1)[:, :320]
        np.testing.assert_array_equal(got, want)
        assert exact is (factor == 1)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_what_is_packed_as_narrowly_already_is_copied(tmp_path, kind):
    words = np.random.default_rng(5).integers(0, 2**32, (64, 8), dtype=np.uint32)
    scales = np.full((64, 4), 0x38, np.uint8)
    model, _ = make(tmp_path, one_changed(tmp_path, {f"{QUERY}.weight": words, f"{QUERY}.scales": scales}), kind)
    weight = Checkpoint.open(model.source()).weight(f"{QUERY}.weight")
    assert weight.quantization == Quantization("nvfp4", 4, 16)
    np.testing.assert_array_equal(np.array(weight.data), words)
    np.testing.assert_array_equal(np.array(weight.scales), scales)


def test_what_is_packed_with_more_bits_is_rounded_again(tmp_path):
    held = packed({f"{QUERY}.weight": np.zeros((64, 64), np.float32)}, 8, 32)
    model, statuses = make(tmp_path, one_changed(tmp_path, held, quantization={"bits": 8, "group_size": 32}), "nvfp4")
    assert any(status.startswith("1 tensors from int8 to nvfp4: weight error") for status in statuses)
    weight = Checkpoint.open(model.source()).weight(f"{QUERY}.weight")
    assert weight.quantization == Quantization("nvfp4", 4, 16)


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_nvfp4_of_other_producers_decodes_to_plain_numbers(tmp_path, producer):
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (64, 32), dtype=np.uint8)
    scales = rng.uniform(0.5, 2, (64, 4)).astype(ml_dtypes.float8_e4m3fn)
    if producer == "modelopt":
        held = {f"{QUERY}.weight": codes, f"{QUERY}.weight_scale_2": np.array(0.25, np.float32)}
    else:
        held = {f"{QUERY}.weight_packed": codes, f"{QUERY}.weight_global_scale": np.array([4], np.float32)}
    folder = one_changed(tmp_path, held | {f"{QUERY}.weight_scale": scales})
    model, _ = make(tmp_path, folder, "bf16")
    theirs = Checkpoint.open(FolderSource(str(folder))).weight(f"{QUERY}.weight")
    want = mx.dequantize(theirs.data, theirs.scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32) * 0.25
    got = Checkpoint.open(model.source()).tensor(f"{QUERY}.weight")
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(want.astype(mx.bfloat16).astype(mx.float32))
    )


def in_words(codes: np.ndarray, order=range(8)) -> np.ndarray:
    """Nibbles of eight neighbours in a row, in the order given."""
    eights = codes.reshape(len(codes), -1, 8).astype(np.uint32)[..., list(order)]
    return (eights << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_become_affine_without_error(tmp_path, method):
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 16, (64, 64), dtype=np.uint8)  # in, out
    zeros = rng.integers(1, 16, (2, 64), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (2, 64)).astype(np.float16)
    if method == "gptq":
        held = {f"{QUERY}.qweight": in_words(codes.T).T, f"{QUERY}.qzeros": in_words(zeros - 1)}
        held[f"{QUERY}.g_idx"] = (np.arange(64) // 32).astype(np.int32)
    else:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        held = {f"{QUERY}.qweight": in_words(codes, order), f"{QUERY}.qzeros": in_words(zeros, order)}
    held[f"{QUERY}.scales"] = scales
    declared = {"quant_method": method, "bits": 4, "group_size": 32}
    folder = one_changed(tmp_path, held, quantization_config=declared)
    store = Store(tmp_path / "store")
    model = create(store, CreateRequest(model="m", files=upload(store, folder)), lambda status: None)
    weight = Checkpoint.open(model.source()).weight(f"{QUERY}.weight")
    got = affine.dequantize(*(np.array(part) for part in (weight.data, weight.scales, weight.biases)), 32, 4)
    groups = np.arange(64) // 32
    want = (codes.astype(np.float32) - zeros[groups].astype(np.float32)) * scales.astype(np.float32)[groups]
    np.testing.assert_allclose(got, want.T, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("declared", "extra", "error", "match"),
    [
        ({"quant_method": "gptq", "bits": 3}, {}, UnsupportedFeature, "q_proj.qweight is gptq with 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, {}, UnsupportedFeature, "layout 'gemv'"),
        ({"quant_method": "hqq", "bits": 4}, {}, UnsupportedFeature, "q_proj.qweight is packed, but .* names hqq"),
        (
            {"quant_method": "gptq", "bits": 4},
            {f"{QUERY}.g_idx": np.arange(64, dtype=np.int32)[::-1] // 32},
            UnsupportedFeature,
            "q_proj.g_idx takes inputs out of their order",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            {f"{QUERY}.scales": np.ones((2, 32), np.float16)},
            CheckpointError,
            "q_proj.qweight of shape",
        ),
    ],
)
def test_a_scheme_that_is_not_known_is_refused_with_the_tensor_that_shows_it(tmp_path, declared, extra, error, match):
    held = {
        f"{QUERY}.qweight": np.zeros((8, 64), np.int32),
        f"{QUERY}.qzeros": np.zeros((2, 8), np.int32),
        f"{QUERY}.scales": np.ones((2, 64), np.float16),
    }
    folder = one_changed(tmp_path, held | extra, quantization_config=declared)
    with pytest.raises(error, match=match):
        make(tmp_path, folder, "")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"model.layers.0.mlp.up_proj.weight": None},
            r"not created: tensor model.layers.0.mlp.up_proj.weight is missing",
        ),
        ({"model.layers.0.mlp.up_proj.weight": (96, 96)}, r"not created: .*up_proj.weight.*\[96, 96\]"),
        ({"model.norm.weight": (32,)}, r"not created: .*model.norm.weight"),
    ],
)
@pytest.mark.parametrize("kind", ["", "nvfp4"])
def test_a_missing_tensor_and_a_lying_shape_are_refused_and_nothing_is_left(tmp_path, change, match, kind):
    held = tensors()
    for name, shape in change.items():
        del held[name]
        if shape is not None:
            held[name] = np.zeros(shape, np.float32)
    folder = write_folder(tmp_path / "m", {"model.safetensors": held})
    store = Store(tmp_path / "store")
    files = upload(store, folder)
    before = {entry.name for entry in store.blobs.files()}
    with pytest.raises(CheckpointError, match=match):
        create(store, CreateRequest(model="m", files=files, quantize=kind), lambda status: None)
    assert {entry.name for entry in store.blobs.files()} == before
    assert store.list() == []


def test_nothing_to_quantise_is_an_error(tmp_path):
    held = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors().items()}
    with pytest.raises(InvalidRequest, match="no tensor of the model becomes bf16"):
        make(tmp_path, write_folder(tmp_path / "m", {"model.safetensors": held}), "bf16")


def test_the_checked_model_of_quantised_weights_is_stored_whole(tmp_path):
    folder = write_folder(tmp_path / "m")
    store = Store(tmp_path / "store")
    request = CreateRequest(model="m", files=upload(store, folder), quantize="Q4")
    model = create(store, request, lambda status: None)
    assert store.verify() == []
    assert model.details.quantization_level == "int4"
    assert set(model.source().tensors) == set(tensors())
    config = json.loads(Path(model.source().files["config.json"]).read_text())
    assert config["architectures"] == CONFIG["architectures"]


def test_blocks_of_rows_do_not_show_in_what_is_stored(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m")
    whole_model, _ = make(tmp_path / "a", folder, "nvfp4")
    monkeypatch.setattr("arriero.create.quantize.BLOCK", 200)
    piecewise, _ = make(tmp_path / "b", folder, "nvfp4")
    assert [layer.digest for layer in piecewise.manifest.layers] == [
        layer.digest for layer in whole_model.manifest.layers
    ]


def near(tmp_path, layout, kind):
    """The largest distance of a table's rows, made from a published layout, to the plain numbers that it means."""
    found = LAYOUTS[layout]()
    folder = found.write(tmp_path / "m")
    (folder / "tokenizer.json").write_text(small_tokenizer())
    model, _ = make(tmp_path, folder, kind)
    checkpoint = Checkpoint.open(model.source())
    assert not [name for name in checkpoint.names() if re.search(r"ngram_embedding\.weight(_scale|\.global)", name)]
    plain = decoded(checkpoint, tmp_path / "plain")
    values = SafetensorsFile(plain / "model.safetensors")
    worst = 0.0
    for name, meant in found.meant.items():
        if "ngram_embedding.shard" in name:
            got = values.view(name).astype(np.float32)
            worst = max(worst, float(np.sqrt(np.square(got - meant).sum() / np.square(meant).sum())))
    load_model(Checkpoint.open(model.source()), mx.float32)
    return worst


@pytest.mark.parametrize(
    ("layout", "kind", "bound"),
    [
        ("flash next, fp8", "bf16", 0.003),
        ("flash next, nvfp4 and mxfp8", "bf16", 0.003),
        ("flash next, nvfp4 with its table", "bf16", 0.003),
    ],
)
def test_the_factor_of_a_table_is_in_what_is_made_of_its_shards_and_nowhere_else(tmp_path, layout, kind, bound):
    assert near(tmp_path, layout, kind) < bound


def test_shards_of_fp8_become_nvfp4_with_a_factor_each(tmp_path):
    table, config = "model.layers.1.ple.ple_embedding.ngram_embedding", {"architectures": ["Qwen4ExpForCausalLM"]}
    codes = [np.random.default_rng(n).normal(0, 30, (64, 32)).astype(ml_dtypes.float8_e4m3fn) for n in range(2)]
    held = {f"{table}.shard_{n}.weight": values for n, values in enumerate(codes)}
    held[f"{table}.weight_scale"] = np.array([0.25], ml_dtypes.bfloat16)
    path = tmp_path / "model.safetensors"
    write(path, held)
    (tmp_path / "config.json").write_text(json.dumps(config))
    inventory = take_inventory({"model.safetensors": path, "config.json": tmp_path / "config.json"})
    plan = make_plan(inventory, Recoding.to("nvfp4", config))
    assert [blob.name for blob in plan.blobs] == [f"{table}.shard_{n}.weight" for n in range(2)]
    for blob, values in zip(plan.blobs, codes, strict=True):
        data = bytearray()
        assert blob.made.write(data.extend, lambda count: None) < 0.1
        words, scales, factor = np.split(np.frombuffer(data, np.uint8), [1024, 1152])
        got = nvfp4.dequantize(
            words.view(np.uint32).reshape(64, 4), scales.reshape(64, 2), float(factor.view(np.float32)[0])
        )
        want = values.astype(np.float32) * 0.25
        assert np.sqrt(np.square(got - want).sum() / np.square(want).sum()) < 0.1


@pytest.mark.parametrize("kind", ["", "nvfp4", "mxfp4"])
def test_mxfp4_of_compressed_tensors_is_copied(tmp_path, kind):
    codes = np.random.default_rng(11).integers(0, 256, (64, 32), dtype=np.uint8)
    held = {f"{QUERY}.weight_packed": codes, f"{QUERY}.weight_scale": np.full((64, 2), 120, np.uint8)}
    model, _ = make(tmp_path, one_changed(tmp_path, held), kind)
    weight = Checkpoint.open(model.source()).host_weight(f"{QUERY}.weight")
    assert weight.quantization == Quantization("mxfp4", 4, 32)
    np.testing.assert_array_equal(weight.data, codes)


def test_mxfp8_codes_with_exponents_for_scales_can_be_rounded_to_fewer_bits(tmp_path):
    codes = np.random.default_rng(12).normal(0, 30, (64, 64)).astype(ml_dtypes.float8_e4m3fn)
    held = {f"{QUERY}.weight": codes, f"{QUERY}.weight_scale": np.full((64, 2), 120, np.uint8)}
    model, statuses = make(tmp_path, one_changed(tmp_path, held), "nvfp4")
    assert any(status.startswith("1 tensors from mxfp8 to nvfp4: weight error") for status in statuses)
    weight = Checkpoint.open(model.source()).host_weight(f"{QUERY}.weight")
    got = nvfp4.dequantize(weight.data, weight.scales, float(weight.global_scale))
    want = codes.astype(np.float32) / 128
    assert np.sqrt(np.square(got - want).sum() / np.square(want).sum()) < 0.1


@pytest.mark.parametrize("kind", ["", "nvfp4"])
def test_experts_of_one_module_share_a_layer(tmp_path, kind):
    model, _ = make(tmp_path, golden_folder(tmp_path, "qwen3_moe"), kind)
    layers = model.source().tensors
    assert "model.layers.0.mlp.experts" in layers
    assert not [name for name in layers if ".experts." in name]
    golden = SafetensorsFile(GOLDENS / "qwen3_moe" / "model.safetensors")
    assert sorted(Checkpoint.open(model.source()).names()) == sorted(golden.tensors)


def test_companions_of_experts_are_in_their_layer(tmp_path):
    for layout in ("flash next, nvfp4 by radixark", "flash next, fp8"):
        folder = LAYOUTS[layout]().write(tmp_path / layout)
        (folder / "tokenizer.json").write_text(small_tokenizer())
        model, _ = make(tmp_path / f"{layout} stored", folder, "")
        alone = [name for name in model.source().tensors if ".layers.0.mlp.experts." in name]
        assert alone == []

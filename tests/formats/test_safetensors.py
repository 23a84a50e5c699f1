"""Safetensors headers, views, the writer, and which files of a folder count."""

import json
import struct

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.errors import CheckpointError
from arriero.formats.safetensors import MAX_HEADER, SafetensorsFile, write
from arriero.formats.safetensors_folder import INDEX, open_folder

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def raw_file(header, data: bytes = ROWS.tobytes(), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.fixture
def opened(tmp_path):
    def open_(data: bytes) -> SafetensorsFile:
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        return SafetensorsFile(path)

    return open_


def test_what_is_written_is_read_back_with_types_and_metadata(tmp_path):
    arrays = {
        "f32": ROWS,
        "bf16": ROWS.astype(ml_dtypes.bfloat16),
        "f16": ROWS.astype(np.float16),
        "u32": np.arange(4, dtype=np.uint32),
        "u8": np.arange(3, dtype=np.uint8),
        "i64": np.array(5, np.int64),
        "flag": np.array([True, False]),
        "none": np.zeros((0, 4), np.float32),
    }
    write(tmp_path / "x", arrays, {"quant_type": "int4"})
    file = SafetensorsFile(tmp_path / "x")
    assert file.metadata == {"quant_type": "int4"}
    for name, array in arrays.items():
        view = file.view(name)
        assert view.dtype == array.dtype
        assert not view.flags.writeable
        np.testing.assert_array_equal(view, array)


def test_mlx_reads_what_we_write_and_the_reverse(tmp_path):
    path = str(tmp_path / "x.safetensors")
    write(path, {"a": ROWS, "codes": np.arange(8, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)})
    loaded = mx.load(path)
    np.testing.assert_array_equal(np.array(loaded["a"]), ROWS)
    assert loaded["codes"].tolist() == list(range(8))
    assert SafetensorsFile(path).tensors["codes"].dtype == "F8_E4M3"
    mx.save_safetensors(path, {"a": mx.array(ROWS)})
    np.testing.assert_array_equal(SafetensorsFile(path).view("a"), ROWS)


def test_the_header_is_padded_so_that_data_start_at_a_multiple_of_8(tmp_path):
    write(tmp_path / "x", {"odd": ROWS})
    assert SafetensorsFile(tmp_path / "x").tensors["odd"].start % 8 == 0


def test_a_type_that_the_format_lacks_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="no type for complex128"):
        write(tmp_path / "x", {"c": np.zeros(2, np.complex128)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\x01\0\0\0", "too few"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (raw_file({"a": ENTRY}, length=MAX_HEADER + 1), "over the limit"),
        (raw_file({"a": ENTRY}, length=5000), "does not fit"),
        (raw_file(b"[1, 2, 3, 4]"), "does not start with"),
        (raw_file(b"{'a': 1}    "), "not valid JSON"),
        (raw_file(b'{"a":' * 100_000), "not valid JSON"),
        (raw_file(b'{"a": {}, "a": {}}'), "duplicate name 'a'"),
        (raw_file({"__metadata__": {"a": 1}}, b""), "map strings to strings"),
        (raw_file({"a": {"dtype": "F32", "shape": [2, 3]}}), "tensor a lacks"),
        (raw_file({"a": [1]}), "tensor a lacks"),
        (raw_file({"a": {**ENTRY, "dtype": "Q9"}}), "tensor a has the unknown element type 'Q9'"),
        (raw_file({"a": {**ENTRY, "shape": [2, -3]}}), "tensor a has an invalid shape"),
        (raw_file({"a": {**ENTRY, "shape": [2, 3.0]}}), "tensor a has an invalid shape"),
        (raw_file({"a": {**ENTRY, "shape": [True, 6]}}), "tensor a has an invalid shape"),
        (raw_file({"a": {**ENTRY, "shape": [1] * 40}}), "tensor a has an invalid shape"),
        (raw_file({"a": {**ENTRY, "data_offsets": [0]}}), "tensor a has invalid offsets"),
        (raw_file({"a": {**ENTRY, "data_offsets": [24, 0]}}), "tensor a: F32"),
        (raw_file({"a": {**ENTRY, "shape": [2, 4]}}), "takes 32 bytes"),
        (raw_file({"a": {**ENTRY, "shape": [1 << 40, 1 << 40]}}), "tensor a: F32"),
        (raw_file({"a": ENTRY}, bytes(20)), "incomplete"),
        (raw_file({"a": ENTRY}, bytes(30)), "6 bytes after the last tensor"),
        (raw_file({"a": ENTRY, "b": ENTRY}), "tensor [ab] overlaps"),
        (raw_file({"a": {**ENTRY, "data_offsets": [8, 32]}}, bytes(32)), "leaves a hole"),
    ],
)
def test_a_wrong_file_is_refused_by_text(opened, data, message):
    with pytest.raises(CheckpointError, match=message):
        opened(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damaged_file_gives_anything_but_a_checkpoint_error(tmp_path_factory, data):
    header = {"__metadata__": {"x": "y"}, "a": ENTRY, "b": {"dtype": "U8", "shape": [3], "data_offsets": [24, 27]}}
    raw = bytearray(raw_file(header, ROWS.tobytes() + b"abc"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 4))
        kind = data.draw(st.integers(0, 2))
        if kind == 0:
            raw[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789{}[],":-e.')))
        elif kind == 1:
            del raw[at : at + data.draw(st.integers(1, 3))]
        else:
            raw[at:at] = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"99999999", b"null", b"1e9"])))
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
        for name, span in file.tensors.items():
            assert file.raw(name).nbytes == span.nbytes
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017


def save(folder, name, *tensors):
    write(folder / name, dict.fromkeys(tensors, ROWS))


def index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_single_file_or_unindexed_shards_are_the_model_and_consolidated_files_are_not(tmp_path):
    save(tmp_path, "model-00001-of-00002.safetensors", "a")
    save(tmp_path, "model-00002-of-00002.safetensors", "b")
    save(tmp_path, "consolidated.safetensors", "c")
    assert sorted(open_folder(tmp_path)) == ["a", "b"]


def test_a_whole_file_beside_shards_is_ambiguous(tmp_path):
    save(tmp_path, "model.safetensors", "a")
    save(tmp_path, "model-00001-of-00001.safetensors", "b")
    with pytest.raises(CheckpointError, match="not clear which is the model"):
        open_folder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    save(tmp_path, "model-1.safetensors", "a")
    save(tmp_path, "model-2.safetensors", "a")
    with pytest.raises(CheckpointError, match="tensor a is in both"):
        open_folder(tmp_path)


def test_the_index_decides_and_extra_tensors_are_warned_about(tmp_path, caplog):
    save(tmp_path, "part1.safetensors", "a", "extra")
    save(tmp_path, "model.safetensors", "zzz")
    index(tmp_path, {"a": "part1.safetensors"})
    assert list(open_folder(tmp_path)) == ["a"]
    assert "extra" in caplog.text


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", "a\\b.safetensors"]
)
def test_a_shard_name_with_a_path_is_refused(tmp_path, name):
    index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="not a bare file name"):
        open_folder(tmp_path)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path):
    save(tmp_path, "x.safetensors", "a")
    index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"shard y\.safetensors .* is missing"):
        open_folder(tmp_path)
    index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor b should be in x\.safetensors"):
        open_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"x": 1}'])
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        open_folder(tmp_path)


def test_a_folder_without_tensors_says_what_it_found(tmp_path):
    with pytest.raises(CheckpointError, match="found nothing"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin"):
        open_folder(tmp_path)
    with pytest.raises(CheckpointError, match="expected a folder"):
        open_folder(tmp_path / "absent")

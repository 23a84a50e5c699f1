"""The GGUF reader: what it gives, and that nothing in a file can make it misbehave."""

import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.errors import CheckpointError
from arriero.formats.gguf import GGUFFile, open_shards, shard_paths
from tests.helpers.gguf_files import encode, gguf_bytes, string, tokenizer_metadata

VALUES = np.arange(128, dtype=np.float32).reshape(4, 32)
KEYS = {"general.architecture": "llama", "llama.block_count": 1, "tokenizer.ggml.tokens": ["a", "b", "é"]}


@pytest.fixture
def opened(tmp_path):
    """Write bytes and open them."""

    def open_(data: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return GGUFFile(path)

    return open_


def plain(**more) -> bytes:
    return gguf_bytes(KEYS, {"a": encode("F32", VALUES), "b": encode("Q8_0", VALUES)}, **more)


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


def test_metadata_are_plain_python_values(opened):
    keys = {
        "bool": True,
        "int": 7,
        "negative": -7,
        "float": 0.5,
        "text": "größe 模型",
        "strings": ["x", ""],
        "floats": [0.5, -1.0],
        "empty": [],
        "nested": [[1, 2], [3]],
    }
    file = opened(gguf_bytes(keys, {}))
    assert dict(file.metadata) == keys
    assert file.metadata.array_length("strings") == 2
    assert file.metadata.array_length("int") is None


def test_every_scalar_type_is_read(opened):
    cases = {0: ("<B", 200), 1: ("<b", -3), 2: ("<H", 60000), 3: ("<h", -5), 5: ("<i", -9), 10: ("<Q", 1 << 60)}
    cases |= {11: ("<q", -(1 << 60)), 12: ("<d", 0.1), 6: ("<f", 0.25), 4: ("<I", 1 << 31)}
    keys = {str(kind): struct.pack("<I", kind) + struct.pack(code, number) for kind, (code, number) in cases.items()}
    assert dict(opened(gguf_bytes(keys, {})).metadata) == {str(kind): number for kind, (_, number) in cases.items()}


def test_tensors_are_views_with_row_major_shapes(opened):
    file = opened(plain())
    np.testing.assert_array_equal(file.tensors["a"].dense(), VALUES)
    assert file.tensors["b"].shape == (4, 32)
    assert file.tensors["b"].raw().shape == (4, 34)
    with pytest.raises(ValueError, match="read-only"):
        file.tensors["a"].dense()[0, 0] = 1
    with pytest.raises(ValueError, match="packed as Q8_0"):
        file.tensors["b"].dense()


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_any_power_of_two_is_an_alignment(opened, alignment):
    data = gguf_bytes(
        {"general.alignment": alignment},
        {"a": encode("F32", VALUES[:1]), "b": encode("F32", VALUES)},
        alignment=alignment,
    )
    file = opened(data)
    np.testing.assert_array_equal(file.tensors["b"].dense(), VALUES)


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 21])
def test_other_alignments_are_refused(opened, alignment):
    with pytest.raises(CheckpointError, match=r"general\.alignment"):
        opened(gguf_bytes({"general.alignment": alignment}, {}))


def test_an_alignment_of_another_type_is_refused(opened):
    with pytest.raises(CheckpointError, match=r"general\.alignment"):
        opened(gguf_bytes({"general.alignment": "32"}, {}))


def test_version_2_is_read(opened):
    assert opened(plain(version=2)).version == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (plain(version=1), "version 1 is not supported"),
        (plain(version=4), "version 4 is not supported"),
        (plain(version=0x03000000), "big-endian"),
        (plain(magic=b"GGML"), "starts with b'GGML'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b"GGUF", "too few"),
        (b"", "empty"),
        (plain()[:-60], "incomplete"),
        (plain()[:200], "ends early|passes the end|a string of|incomplete|elements"),
    ],
)
def test_other_files_are_refused_by_text(opened, data, message):
    with pytest.raises(CheckpointError, match=message):
        opened(data)


@pytest.mark.parametrize(("item", "said"), [(1, "values"), ("a", "elements")])
def test_the_elements_of_a_header_are_limited(opened, monkeypatch, item, said):
    monkeypatch.setattr("arriero.formats.gguf.MAX_ELEMENTS", 100)
    assert opened(gguf_bytes({"general.architecture": "x", "many": [item] * 50}, {})).metadata["many"] == [item] * 50
    with pytest.raises(CheckpointError, match=f"many: 101 {said}"):
        opened(gguf_bytes({"general.architecture": "x", "many": [item] * 101}, {}))


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.gguf: the file is missing; pull"):
        GGUFFile(tmp_path / "absent.gguf")


def test_an_unknown_tensor_type_is_refused_by_name_and_id(opened):
    entry = string("b") + struct.pack("<IQQ", 2, 32, 4)
    data = patched(plain(), entry + struct.pack("<I", 8), entry + struct.pack("<I", 250))
    with pytest.raises(CheckpointError, match="tensor b has the unknown type id 250"):
        opened(data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (struct.pack("<IQ", 8, 512), struct.pack("<IQ", 8, 520), "tensor b starts at 520, not aligned"),
        (struct.pack("<IQ", 8, 512), struct.pack("<IQ", 8, 480), "tensors a and b overlap"),
        (struct.pack("<IQ", 8, 512), struct.pack("<IQ", 8, 1 << 40), "tensor b ends at byte"),
        (string("b") + struct.pack("<IQ", 2, 32), string("b") + struct.pack("<IQ", 2, 33), "rows of 33 values"),
        (string("b") + struct.pack("<IQ", 2, 32), string("b") + struct.pack("<IQ", 2, 0), "impossible shape"),
        (string("b") + struct.pack("<IQ", 2, 32), string("b") + struct.pack("<IQ", 2, 1 << 50), "impossible shape"),
        (string("b") + struct.pack("<IQ", 2, 32), string("b") + struct.pack("<IQ", 5, 32), "5 dimensions"),
        (string("b") + struct.pack("<IQ", 2, 32), string("a") + struct.pack("<IQ", 2, 32), "tensor a is listed twice"),
    ],
)
def test_an_impossible_tensor_is_named(opened, old, new, message):
    with pytest.raises(CheckpointError, match=message):
        opened(patched(plain(), old, new))


def test_a_key_that_is_there_twice_is_refused(opened):
    data = patched(gguf_bytes({"one": 1, "two": 2}, {}), string("two"), string("one"))
    with pytest.raises(CheckpointError, match="key one is there twice"):
        opened(data)


@pytest.mark.parametrize(
    "hostile",
    [
        struct.pack("<IQ", 8, 1 << 62),
        struct.pack("<IIQ", 9, 8, 1 << 62),
        struct.pack("<IIQ", 9, 6, 1 << 62),
        struct.pack("<IIQ", 9, 9, 1 << 20) + bytes(64),
        struct.pack("<IIQIQ", 9, 9, 1, 9, 1) + struct.pack("<IQ", 9, 1) * 40 + bytes(64),
        struct.pack("<I", 77) + bytes(64),
    ],
)
def test_a_hostile_length_is_refused_at_once(opened, hostile):
    start = time.process_time()
    with pytest.raises(CheckpointError, match="damaged"):
        opened(gguf_bytes({"k": hostile}, {}))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("offset", [8, 16])
def test_a_hostile_count_is_refused_at_once(opened, offset):
    data = bytearray(plain())
    data[offset : offset + 8] = struct.pack("<Q", 1 << 60)
    with pytest.raises(CheckpointError, match="a count of"):
        opened(bytes(data))


def test_a_large_vocabulary_opens_fast(opened):
    words = [f"token{i}" for i in range(50_000)]
    data = gguf_bytes({"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": words}, {})
    times = []
    for _ in range(3):
        start = time.process_time()
        file = opened(data)
        times.append(time.process_time() - start)
    assert file.metadata["tokenizer.ggml.tokens"] == words
    assert min(times) < 0.15


def test_optional_tokenizer_keys_are_optional(opened):
    keys = tokenizer_metadata()
    keys.pop("tokenizer.ggml.bos_token_id")
    file = opened(gguf_bytes(keys, {}))
    assert file.metadata.get("tokenizer.ggml.unknown_token_id") is None
    assert file.metadata.get("tokenizer.ggml.bos_token_id") is None


def shards(tmp_path, count=3, **replaced):
    paths = []
    for i in range(count):
        path = tmp_path / f"m-{i + 1:05d}-of-{count:05d}.gguf"
        keys = {"split.no": i, "split.count": count, **replaced.get(f"keys{i}", {})}
        path.write_bytes(gguf_bytes(keys, {replaced.get(f"name{i}", f"t{i}"): encode("F32", VALUES)}))
        paths.append(path)
    return paths


def test_shards_are_found_from_any_one_and_opened_in_order(tmp_path):
    paths = shards(tmp_path)
    assert shard_paths(paths[1]) == paths
    assert [list(file.tensors) for file in open_shards(paths)] == [["t0"], ["t1"], ["t2"]]
    assert shard_paths(tmp_path / "whole.gguf") == [tmp_path / "whole.gguf"]


def test_a_missing_shard_is_named(tmp_path):
    paths = shards(tmp_path)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf"):
        shard_paths(paths[0])
    with pytest.raises(CheckpointError, match="split over 3 files, 2 were given"):
        open_shards(paths[:2])


def test_shards_out_of_order_or_with_a_shared_tensor_are_refused(tmp_path):
    paths = shards(tmp_path, name2="t0")
    with pytest.raises(CheckpointError, match="is part 1 of its model, given as part 0"):
        open_shards([paths[1], paths[0], paths[2]])
    with pytest.raises(CheckpointError, match="tensor t0 is in an earlier part"):
        open_shards(paths)


SEED_FILE = gguf_bytes(
    {**KEYS, "n": [[1], [2, 3]], "f": 0.5}, {"a": encode("F32", VALUES), "b": encode("Q4_0", VALUES)}
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_damaged_header_gives_anything_but_a_checkpoint_error(tmp_path_factory, data):
    raw = bytearray(SEED_FILE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 8))
        kind = data.draw(st.integers(0, 4))
        if kind == 0:
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == 1:
            raw[at : at + 8] = struct.pack(
                "<Q", data.draw(st.sampled_from([0, 1, 255, 1 << 31, 1 << 62, (1 << 64) - 1]))
            )
        elif kind == 2:
            raw[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 45)))
        elif kind == 3:
            del raw[at : at + data.draw(st.integers(1, 8))]
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
        dict(file.metadata)
        for tensor in file.tensors.values():
            tensor.raw()
    except CheckpointError:
        pass


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_after_the_magic_are_a_checkpoint_error_or_an_empty_model(tmp_path_factory, tail):
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + tail)
    try:
        assert len(GGUFFile(path).tensors) < 300
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017

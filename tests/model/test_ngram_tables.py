"""Tables of hashed n-grams: which rows, the same bits from the file and from memory, and no memory for the file's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.errors import CheckpointError
from arriero.formats.mapped import map_file, read_here_and_there
from arriero.formats.safetensors import write
from arriero.model.architectures import load_model
from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.architectures.qwen4_exp_hash import NGramHash, NGramsConfig, mix
from arriero.model.checkpoint import Checkpoint
from arriero.model.layers import host_table
from arriero.model.layers.host_table import ShardedTable
from arriero.source import FolderSource
from tests.helpers import flash_next as fn
from tests.helpers.forward import Rows, whole
from tests.helpers.sparse_file import write_sparse

PUBLISHED = NGramsConfig(
    layers=(1,),
    size=3,
    heads=8,
    width=2560,
    base=20_000_000,
    divisor=128,
    shards=128,
    taps=4,
    seed=1234,
    vocab=248320,
    boundary=248044,
)


class TestHash:
    def test_the_generator_is_splitmix(self) -> None:
        assert mix(0) == 0xE220A8397B1DCDAF

    def test_the_published_constants(self) -> None:
        found = NGramHash.of(PUBLISHED, 0)
        assert found.multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]
        past = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]
        assert (found.sizes - 20_000_000).tolist() == past
        assert found.offsets[[0, 1, 2, 15]].tolist() == [0, 20000003, 40000026, 300001275]
        assert found.rows == 320_001_446
        assert -(-found.rows // 128) * 128 == 128 * 2_500_012

    def test_rows_of_published_size(self) -> None:
        found = NGramHash.of(PUBLISHED, 0)
        tokens = np.array([248044, 248044, 9707, 11, 1879, 248044, 9707, 11, 1879, 0])
        rows = found(tokens)
        assert rows[0, :4].tolist() == [16410909, 39682429, 55103279, 60931720]
        assert rows[2, [0, 8, 15]].tolist() == [6380558, 164226950, 312121804]
        assert rows[3, [0, 15]].tolist() == [18827606, 318943450]
        # What follows the boundary begins anew.
        np.testing.assert_array_equal(rows[4:7], rows[:3])

    def test_a_predecessor_behind_the_boundary_counts_as_the_boundary(self) -> None:
        hash_ = NGramHash(np.array([3, 5, 7]), np.array([11, 13, 17, 19]), np.array([0, 11, 24, 41]), 2, 9)
        assert hash_(np.array([7, 8, 1, 9, 2, 3])).tolist() == [
            [10, 15, 33, 48],
            [8, 15, 28, 41],
            [10, 15, 27, 42],
            [3, 14, 33, 44],
        ]

    @given(st.lists(st.sampled_from([0, 1, 5, 248044, 248319]), min_size=1, max_size=12), st.data())
    def test_a_cut_changes_no_row(self, tokens: list[int], data: st.DataObject) -> None:
        hash_ = NGramHash(np.array([3, 5, 7, 11]), np.array([101, 103, 107]), np.array([0, 101, 204]), 1, 248044)
        cut = data.draw(st.integers(0, len(tokens)))
        every = np.array([248044] * 3 + tokens)
        np.testing.assert_array_equal(np.concatenate([hash_(every[: cut + 3]), hash_(every[cut:])]), hash_(every))

    def test_a_second_table_has_primes_of_its_own(self) -> None:
        first, second = (NGramHash.of(PUBLISHED, module) for module in (0, 1))
        assert second.sizes[0] > first.sizes[-1]
        assert not set(first.multipliers.tolist()) & set(second.multipliers.tolist())


def test_views_of_mapped_files_are_read_without_reading_ahead(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 64)
    view = map_file(tmp_path / "bytes")[5000:15000].reshape(100, 100)
    assert read_here_and_there(view)
    assert view[3, 7] == (5000 + 307) % 256
    assert not read_here_and_there(view.copy())


def table(path: Path, tensors: fn.Tensors, *, resident: bool = False, **sizes: int) -> ShardedTable:
    """Of float32 rows, from a folder that holds these shards alone."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    write(path / "model.safetensors", tensors)
    checkpoint = Checkpoint.open(FolderSource(str(path)))
    how: dict[str, Any] = {"shards": 4, "rows": 4 * 74, "width": 16, **sizes}
    return ShardedTable.load(checkpoint, fn.TABLE, mx.float32, resident=resident, **how)


def shards(tensors: fn.Tensors) -> fn.Tensors:
    return {name: value for name, value in tensors.items() if ".ngram_embedding." in name}


def stored_and_meant(kind: str) -> tuple[fn.Tensors, np.ndarray]:
    tensors = shards(fn.published(fn.golden_tensors()))
    stored, meant = fn.TABLES[kind](tensors, tensors)
    return stored, np.concatenate([meant[f"{fn.TABLE}.shard_{i}.weight"] for i in range(4)])


class TestRows:
    ROWS = ([73], [295], [221, 74], [0, 295, 12], [73, 74, 0, 295, 74, 222, 221, 148, 147, 0, 12])
    """Of one shard, of some that leave out others, and of all: repeated, unordered, on both sides of each border."""

    @pytest.mark.parametrize("kind", fn.TABLES)
    @pytest.mark.parametrize("chosen", ROWS)
    def test_host_and_memory_give_the_bits_of_the_decoded_table(
        self, tmp_path: Path, kind: str, chosen: list[int]
    ) -> None:
        stored, meant = stored_and_meant(kind)
        rows = np.array(chosen)
        hosted = np.array(table(tmp_path, stored)(rows))
        resident = np.array(table(tmp_path, stored, resident=True)(rows))
        np.testing.assert_array_equal(hosted, resident)
        np.testing.assert_array_equal(hosted, meant[rows])

    def test_shards_count_by_number_and_not_by_name(self, tmp_path: Path) -> None:
        values = np.arange(24 * 16, dtype=np.float32).reshape(24, 16)
        stored = {f"{fn.TABLE}.shard_{i}.weight": values[2 * i : 2 * i + 2] for i in range(12)}
        found = np.array(table(tmp_path, stored, shards=12, rows=24)(np.arange(24)))
        np.testing.assert_array_equal(found, values)

    @pytest.mark.parametrize("resident", [False, True])
    def test_shards_may_have_different_numbers_of_rows(self, tmp_path: Path, resident: bool) -> None:
        values = np.arange(12 * 16, dtype=np.float32).reshape(12, 16)
        edges = [0, 5, 6, 10, 12]
        stored = {f"{fn.TABLE}.shard_{i}.weight": values[edges[i] : edges[i + 1]] for i in range(4)}
        rows = np.array([11, 0, 5, 6, 4, 9, 10, 5])
        found = np.array(table(tmp_path, stored, rows=12, resident=resident)(rows))
        np.testing.assert_array_equal(found, values[rows])

    def test_each_row_is_copied_once_and_packed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stored, _ = stored_and_meant("nvfp4 per shard")
        hosted = table(tmp_path, stored)
        sent: list[int] = []
        original = host_table._uploaded

        def uploaded(rows: np.ndarray) -> mx.array:
            sent.append(rows.nbytes)
            return original(rows)

        monkeypatch.setattr(host_table, "_uploaded", uploaded)
        hosted(np.repeat(self.ROWS[-1], 50))
        distinct = len(set(self.ROWS[-1]))
        assert sent == [8 * distinct, distinct]

    @pytest.mark.parametrize("rows", [[-1], [0, 296]])
    def test_a_row_outside_is_an_error(self, tmp_path: Path, rows: list[int]) -> None:
        stored, _ = stored_and_meant("float32")
        with pytest.raises(ValueError, match="of a table of 296"):
            table(tmp_path, stored)(np.array(rows))


class TestRefused:
    def test_codes_without_their_factor(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("fp8")
        del stored[f"{fn.TABLE}.weight_scale"]
        with pytest.raises(CheckpointError, match=r"stored as 8-bit codes, but has no .*ngram_embedding\.weight_scale"):
            table(tmp_path, stored)

    def test_a_factor_for_some_shards_only(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("nvfp4 per shard")
        del stored[f"{fn.TABLE}.shard_2.weight_scale_2"]
        with pytest.raises(CheckpointError, match="factors for 3 of its 4 shards"):
            table(tmp_path, stored)

    def test_factors_for_shards_and_for_the_table(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("nvfp4 per shard")
        stored[f"{fn.TABLE}.weight_scale_2"] = np.float32(2).reshape(())
        with pytest.raises(CheckpointError, match=r"4 of its 4 shards, and for all of it .*weight_scale_2"):
            table(tmp_path, stored)

    @pytest.mark.parametrize("value", [[1.0, 2.0], [np.nan]])
    def test_a_factor_that_is_not_one_number(self, tmp_path: Path, value: list[float]) -> None:
        stored, _ = stored_and_meant("fp8")
        stored[f"{fn.TABLE}.weight_scale"] = np.array(value, np.float32)
        with pytest.raises(CheckpointError, match="should be one number"):
            table(tmp_path, stored)

    def test_codes_of_four_bits_without_scales(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("nvfp4 of one scale")
        bare = {n: v for n, v in stored.items() if not n.endswith(".weight_scale")}
        with pytest.raises(CheckpointError, match="stored as U8 without scales that we know"):
            table(tmp_path, bare, width=8)

    def test_shards_of_different_formats(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("bf16")
        other, _ = stored_and_meant("float32")
        stored[f"{fn.TABLE}.shard_3.weight"] = other[f"{fn.TABLE}.shard_3.weight"]
        with pytest.raises(CheckpointError, match=r"shard_3\.weight is F32 .74, 16., but .* its first shard is BF16"):
            table(tmp_path, stored)

    def test_too_few_rows(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("bf16")
        with pytest.raises(CheckpointError, match="hold 296 rows, but 304 are addressed"):
            table(tmp_path, stored, rows=304)

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        stored, _ = stored_and_meant("bf16")
        with pytest.raises(CheckpointError, match=r"1 of 5 shards of a table are missing, .*shard_4\.weight"):
            table(tmp_path, stored, shards=5)


def large(path: Path, base: int) -> int:
    """The golden model with NVFP4 tables of `4 · base` rows and more; returns the bytes of the table's file."""
    settings = fn.config(ngram_vocab_size_base=base)
    ngrams = Config.read(settings).ngrams
    assert ngrams is not None
    hash_ = NGramHash.of(ngrams, 0)
    rows = -(-hash_.rows // ngrams.divisor) * ngrams.divisor // 4
    rest = {n: v for n, v in fn.published(fn.golden_tensors()).items() if ".shard_" not in n}
    prefix = fn.TABLE.removesuffix(".ngram_embedding")
    rest[f"{prefix}.ngram_heads_vocab_sizes"], rest[f"{prefix}.ngram_heads_offsets"] = hash_.sizes, hash_.offsets
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(settings))
    write(path / "model-1.safetensors", rest)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    ones: fn.Tensors = {}
    for i in range(4):
        name = f"{fn.TABLE}.shard_{i}.weight"
        shapes |= {name: ("U8", (rows, 8)), f"{name}_scale": ("F8_E4M3", (rows, 1)), f"{name}_scale_2": ("F32", ())}
        ones[f"{name}_scale_2"] = np.ones((), np.float32)
    size = write_sparse(path / "model-2.safetensors", shapes, ones)
    index = dict.fromkeys(rest, "model-1.safetensors") | dict.fromkeys(shapes, "model-2.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return size


def growth(path: Path) -> tuple[int, int]:
    """Bytes in use, and the most at once, that loading this model and answering with it adds."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    checkpoint = Checkpoint.open(FolderSource(str(path)))
    model = load_model(checkpoint, mx.float32)
    mx.eval(list(model.parameters()))
    for _ in range(2):
        rows = Rows(model)
        assert np.isfinite(rows.logits([fn.golden_ids()])).all()
    return mx.get_active_memory() - before, mx.get_peak_memory() - before


def paged_in(path: Path) -> int:
    """Bytes of a mapped file that this process holds in memory, by its own count."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


class TestMemory:
    def test_a_table_on_the_host_is_never_allocated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        size = large(tmp_path, 2_800_000)
        assert size > 100_000_000
        active, peak = growth(tmp_path)
        assert active < 4_000_000
        assert peak < 8_000_000
        # The counter sees a table that is loaded, so it would have seen this one.
        monkeypatch.setenv("ARRIERO_RESIDENT_TABLES", "1")
        active, _ = growth(tmp_path)
        assert active > size

    @pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell what is paged in")
    def test_neither_loading_nor_a_prompt_pages_the_table_in(self, tmp_path: Path) -> None:
        size = large(tmp_path, 2_800_000)
        path = tmp_path / "model-2.safetensors"
        model = load_model(Checkpoint.open(FolderSource(str(tmp_path))), mx.float32)
        mx.eval(list(model.parameters()))
        assert paged_in(path) < 100_000
        whole(model, fn.golden_ids())
        # A first look at a row may bring 64 KiB along when they are in the page cache.
        assert 0 < paged_in(path) < size // 5

    def test_its_bytes_are_not_counted_as_loaded(self, tmp_path: Path) -> None:
        size = large(tmp_path, 100_000)
        checkpoint = Checkpoint.open(FolderSource(str(tmp_path)))
        whole_size = checkpoint.nbytes
        model = load_model(checkpoint, mx.float32)
        assert whole_size - checkpoint.nbytes >= size
        assert sum(array.nbytes for array in model.parameters()) < 2_000_000

    @pytest.mark.slow
    def test_nor_is_one_of_two_gigabytes(self, tmp_path: Path) -> None:
        assert large(tmp_path, 60_000_000) > 2**31
        active, peak = growth(tmp_path)
        assert active < 4_000_000
        assert peak < 8_000_000


def test_the_setting_counts_as_other_settings_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fn.folder(tmp_path, fn.published(fn.golden_tensors()))
    ids, found = fn.golden_ids(), []
    for text in ("", "0", "false", "1", "yes"):
        monkeypatch.setenv("ARRIERO_RESIDENT_TABLES", text)
        model: Any = load_model(Checkpoint.open(FolderSource(str(tmp_path))), mx.float32)
        found.append(len(model.layers[1].ngrams.table.weights))
        np.testing.assert_array_equal(whole(model, ids[:5]), whole(model, ids)[:5])
    assert found == [0, 0, 0, 4, 4]

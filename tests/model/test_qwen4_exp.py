"""What only Qwen3.8 Flash Next does: published layouts, what is refused, states that rewind, taps, block selection."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import CheckpointError, UnsupportedFeature
from arriero.model.architectures import load_model
from arriero.model.architectures.qwen4_exp_attention import IndexedAttention
from arriero.model.architectures.qwen4_exp_config import Config
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Layout, Model, Span
from arriero.model.layers.rope import Rope
from arriero.runner.caches import KVCache
from arriero.source import FolderSource
from arriero.store.store import Store
from tests.helpers import flash_next as fn
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.forward import Rows, chunked, packed, whole
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.helpers.unchecked import unchecked

pytestmark = pytest.mark.usefixtures("kernels")

IDS = fn.golden_ids()
GOLDENS = Path(__file__).parent / "goldens"


def golden(name: str = "qwen4_exp") -> Model:
    return load_model(Checkpoint.open(FolderSource(str(GOLDENS / name))), mx.float32)


def logits(checkpoint: Checkpoint) -> np.ndarray:
    return whole(load_model(checkpoint, mx.float32), IDS)


class TestLayouts:
    def test_the_published_layout_is_the_golden_model(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tensors = fn.with_other_parts(fn.packed_experts(fn.published(fn.golden_tensors())))
        with caplog.at_level(logging.INFO):
            found = logits(fn.folder(tmp_path, tensors))
        np.testing.assert_array_equal(found, whole(golden(), IDS))
        said = [r.getMessage() for r in caplog.records]
        assert "the vision tower is not loaded, and images are refused (1 tensors)" in said
        assert any("predicts several tokens is left to its draft (2" in m for m in said)
        assert any("stays in its files" in m for m in said)
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]

    @pytest.mark.parametrize("experts", [fn.nvfp4_experts, fn.fp8_experts], ids=["nvfp4", "fp8"])
    @pytest.mark.parametrize("table", fn.TABLES)
    def test_a_packed_layout_is_the_model_of_its_decoded_weights(
        self, tmp_path: Path, experts: Any, table: str
    ) -> None:
        stored, meant = fn.TABLES[table](*experts(fn.published(fn.golden_tensors())))
        model = load_model(fn.folder(tmp_path / "stored", stored), mx.float32)
        found = whole(model, IDS)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, logits(fn.folder(tmp_path / "meant", meant)), rtol=1e-4, atol=5e-4)
        np.testing.assert_array_equal(chunked(model, IDS, (17, 1, 9, 2)), found)
        np.testing.assert_array_equal(packed(model, [IDS[3:9], IDS])[1], found)

    @pytest.mark.parametrize("table", fn.TABLES)
    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
    def test_a_resident_table_gives_the_bits_of_one_on_the_host(
        self, tmp_path: Path, table: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tensors = fn.published(fn.golden_tensors())
        stored, _ = fn.TABLES[table](tensors, tensors)
        fn.folder(tmp_path, stored)
        source = FolderSource(str(tmp_path))
        hosted = load_model(Checkpoint.open(source), dtype)
        monkeypatch.setenv("ARRIERO_RESIDENT_TABLES", "1")
        resident = load_model(Checkpoint.open(source), dtype)
        np.testing.assert_array_equal(whole(hosted, IDS), whole(resident, IDS))
        bytes_of = [sum(a.nbytes for a in m.parameters()) for m in (hosted, resident)]
        rows = 4 * 74
        assert bytes_of[1] - bytes_of[0] >= rows * (9 if table.startswith("nvfp4") else 16)

    @pytest.mark.parametrize("table", fn.TABLES)
    def test_a_stored_model_gives_the_bits_of_its_folder(self, tmp_path: Path, table: str) -> None:
        stored, _ = fn.TABLES[table](*fn.nvfp4_experts(fn.with_other_parts(fn.published(fn.golden_tensors()))))
        path = write_folder(tmp_path / "m", {"model.safetensors": stored})
        (path / "config.json").write_text(json.dumps(fn.config()))
        letters = BPE({chr(33 + i): i for i in range(90)}, [])
        (path / "tokenizer.json").write_text(Tokenizer(letters).to_str())
        store = Store(tmp_path / "store")
        # The other parts are single tensors, of which no head can be built.
        model = create(store, CreateRequest(model="m", files=upload(store, path)), lambda status: None, check=unchecked)
        found = logits(Checkpoint.open(model.source()))
        np.testing.assert_array_equal(found, logits(Checkpoint.open(FolderSource(str(path)))))

    def test_experts_may_trade_places_with_their_scales(self, tmp_path: Path) -> None:
        stored, _ = fn.nvfp4_experts(fn.published(fn.golden_tensors()))
        swapped = dict(stored)
        for layer in range(3):
            prefix = f"{fn.ROOT}layers.{layer}.mlp"
            for name in [n for n in stored if n.startswith(f"{prefix}.experts.0.")]:
                other = name.replace(".experts.0.", ".experts.3.")
                swapped[name], swapped[other] = stored[other], stored[name]
            swapped[f"{prefix}.gate.weight"] = stored[f"{prefix}.gate.weight"][[3, 1, 2, 0]]
        one, two = (logits(fn.folder(tmp_path / n, t)) for n, t in (("one", stored), ("two", swapped)))
        np.testing.assert_allclose(one, two, atol=1e-4)

    def test_a_file_that_mlx_converted_gives_the_same_bits(self, tmp_path: Path) -> None:
        """Gains with their 1 and kernels turned, but for the delta nets' own norms."""
        tensors = fn.golden_tensors()
        converted: dict[str, Any] = {}
        for name, value in tensors.items():
            if "conv1d" in name:
                value = value.swapaxes(1, 2)
            elif name.endswith(("norm.weight", "norm_key.weight", "norm_query.weight", "norm_conv.weight")):
                value = value if ".linear_attn." in name else value + 1
            converted[name] = value
        values = MemoryCheckpoint.golden(fn.GOLDEN).config
        np.testing.assert_array_equal(logits(fn.folder(tmp_path, converted, values)), whole(golden(), IDS))


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hc_count": 1}, "`hc_count` should be a whole number of at least 2"),
            ({"hc_lowrank": None}, "`hc_lowrank` is missing"),
            ({"indexer_kv_heads": 2}, "`indexer_kv_heads` should be 1"),
            ({"indexer_budget": 10}, r"`indexer_budget` should be a multiple of indexer_compress_ratio \(4\)"),
            ({"indexer_head_dim": 4}, "`indexer_head_dim` should be at least the 8 elements that rotate"),
            ({"indexer_budget": None}, "`indexer_budget` is missing"),
            ({"linear_conv_kernel_dim": None}, "`linear_conv_kernel_dim` is missing"),
            ({"layer_types": ["linear_attention"] * 4}, "as long as num_hidden_layers"),
            ({"layer_types": ["sliding_attention"] * 3}, "`layer_types` should be a list of 3 out of linear_attention"),
            ({"layer_types": None}, "`full_attention_interval` is missing"),
            ({"output_gate_type": "tanh"}, "`output_gate_type` should be sigmoid or silu"),
            ({"hidden_act": "gelu"}, "`hidden_act` should be silu"),
            ({"attention_bias": True}, "`attention_bias` should be False"),
            ({"mamba_ssm_dtype": "bfloat16"}, "`mamba_ssm_dtype` should be 'float32'"),
            ({"mlp_only_layers": [0]}, "`mlp_only_layers` should be empty"),
            ({"ple_layer_ids": [3]}, "`ple_layer_ids` should be numbers of linear_attention layers"),
            ({"ple_layer_ids": [0]}, "`ple_layer_ids` should be a list of layer numbers from 1 to 3"),
            ({"ple_layer_ids": [2, 2]}, "`ple_layer_ids` should be a list without repeats"),
            ({"ple_embed_dim": 62}, "`ple_embed_dim` should be a multiple of the 4 rows"),
            ({"split_ngram_parts": None}, "`split_ngram_parts` is missing"),
            ({"eos_token_id": None}, "`eos_token_id` is missing"),
            ({"eos_token_id": "7"}, "`eos_token_id` should be a token id"),
            ({"sliding_window": 128}, "`sliding_window` is 128"),
            (
                {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 2]}},
                "a list that sums to 4",
            ),
            (
                {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
                "mrope_interleaved` should be true",
            ),
        ],
    )
    def test_a_configuration_of_other_semantics(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            Config.read(fn.config(**changes))

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("layers.0.input_layernorm.weight", np.zeros(32, np.float32), "1 tensors that Qwen4Exp.* does not have"),
            ("layers.0.self_attn.q_proj.weight", np.zeros((4, 4), np.float32), "does not have, the first is .*q_proj"),
            ("layers.0.mlp.gate.weight", np.zeros((5, 32), np.float32), "has shape .5, 32., but the configuration"),
            ("layers.0.attn_hyper_connection.hc_norm.weight", np.zeros(64, np.float32), "has shape .64., but"),
            ("layers.1.ple.ple_embedding.layer_multipliers", np.array([3, 5, 7]), "n-grams would be looked up in the"),
            ("layers.1.ple.ple_embedding.ngram_heads_offsets", np.array([0, 1, 2, 3]), "looked up in the wrong rows"),
            ("layers.1.ple.ple_embedding.ngram_heads_vocab_sizes", np.array([1, 2]), "has shape .2., but"),
        ],
    )
    def test_a_tensor_that_contradicts_the_configuration(
        self, tmp_path: Path, name: str, value: np.ndarray, message: str
    ) -> None:
        tensors = fn.published(fn.golden_tensors()) | {fn.ROOT + name: value}
        with pytest.raises(CheckpointError, match=message):
            load_model(fn.folder(tmp_path, tensors), mx.float32)

    @pytest.mark.parametrize(
        "name",
        [
            "layers.2.self_attn.q_proj.weight",
            "layers.2.self_attn.indexer.k_layernorm.weight",
            "layers.0.mlp.shared_expert.up_proj.weight",
            "hyper_connection_mixer.input_mix_weight_up.weight",
            "layers.1.ple.ple_embedding.layer_multipliers",
            "layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight",
        ],
    )
    def test_a_missing_tensor_is_named(self, tmp_path: Path, name: str) -> None:
        tensors = fn.published(fn.golden_tensors())
        del tensors[fn.ROOT + name]
        with pytest.raises(CheckpointError, match=name):
            load_model(fn.folder(tmp_path, tensors), mx.float32)

    def test_images(self) -> None:
        model = golden()
        with pytest.raises(UnsupportedFeature, match="does not take images"):
            model.forward(Rows(model).batch([[3]], features=[mx.zeros((1, 32))]))

    def test_statistics_of_hashes_are_no_reason(self, tmp_path: Path) -> None:
        tensors = fn.published(fn.golden_tensors())
        for name in ("ngram_embedding.hashstats_hits", "token_lookup"):
            tensors[f"{fn.ROOT}layers.1.ple.ple_embedding.{name}"] = np.zeros(3, np.float32)
        np.testing.assert_array_equal(logits(fn.folder(tmp_path, tensors)), whole(golden(), IDS))


class TestGoingBack:
    """Any offset: inside a block of index keys or an n-gram, beside a boundary (11, 20), in a convolution's reach."""

    OFFSETS = tuple(range(1, 40))

    @staticmethod
    def follow(model: Model, caches: Sequence[Any], ids: Sequence[int], position: int) -> np.ndarray:
        batch = Batch(mx.array(ids, mx.int32), [Span(0, len(ids), position, caches)])
        return np.array(model.logits(model.forward(batch).final))

    @pytest.mark.parametrize("name", ["qwen4_exp", "qwen4_exp_two_tables"])
    @pytest.mark.parametrize("sizes", [(40,), (7, 1, 13)])
    def test_a_fresh_row_continues_from_any_capture(self, name: str, sizes: tuple[int, ...]) -> None:
        model = golden(name)
        with np.load(GOLDENS / name / "golden.npz") as file:
            ids = file["ids"].tolist()
        expected = whole(model, ids)
        rows = Rows(model)
        for cache in rows.caches[0]:
            assert cache is not None
            cache.plan(self.OFFSETS)
        start = 0
        for turn in range(len(ids)):
            size = sizes[turn % len(sizes)]
            rows.logits([ids[start : start + size]])
            start += size
            if start >= len(ids):
                break
        captured = [cache.take() for cache in rows.caches[0] if cache is not None]
        for i, offset in enumerate(self.OFFSETS):
            fresh = model.new_caches()
            for cache, snapshots in zip(fresh, captured, strict=True):
                joined = None
                for snapshot in snapshots[: i + 1]:
                    assert snapshot is not None
                    joined = snapshot if joined is None else cache.merge(joined, snapshot)  # type: ignore[union-attr]
                assert cache is not None
                assert joined is not None
                assert cache.restore(joined)
                assert cache.offset == offset
            np.testing.assert_array_equal(self.follow(model, fresh, ids[offset:], offset), expected[offset:])

    @pytest.mark.parametrize("name", ["qwen4_exp", "qwen4_exp_two_tables"])
    def test_a_row_goes_back_to_any_offset_and_takes_another_way(self, name: str) -> None:
        model = golden(name)
        other = IDS[5:14]
        for offset in self.OFFSETS:
            rows = Rows(model)
            for cache in rows.caches[0]:
                assert cache is not None
                cache.plan([offset])
            rows.logits([IDS])
            for cache in rows.caches[0]:
                assert cache is not None
                (snapshot,) = cache.take()
                assert cache.rewind(offset, snapshot)
            found = self.follow(model, rows.caches[0], other, offset)
            np.testing.assert_array_equal(found, whole(model, IDS[:offset] + other)[offset:])

    @pytest.mark.parametrize("name", ["qwen4_exp", "qwen4_exp_two_tables"])
    def test_one_snapshot_of_keys_is_cut_at_any_offset(self, name: str) -> None:
        """What a tree of prefixes does where two prompts part: also between the tokens of one block."""
        model = golden(name)
        rows = Rows(model)
        for cache in rows.caches[0]:
            assert cache is not None
            cache.plan(self.OFFSETS)
        rows.logits([IDS])
        states = [cache.take() for cache in rows.caches[0] if cache is not None]
        ends = [cache.snapshot() for cache in rows.caches[0] if cache is not None]
        for i, offset in enumerate(self.OFFSETS):
            fresh = model.new_caches()
            for cache, captured, whole_row in zip(fresh, states, ends, strict=True):
                assert cache is not None
                assert whole_row is not None
                held, _ = cache.split(whole_row, offset) if isinstance(cache, KVCache) else (captured[i], None)
                assert held is not None
                assert cache.restore(held)
                assert cache.offset == offset
            other = IDS[20:29]
            found = self.follow(model, fresh, other, offset)
            np.testing.assert_array_equal(found, whole(model, IDS[:offset] + other)[offset:])

    def test_a_draft_of_any_length_is_taken_back_again_and_again(self) -> None:
        """Rewinding by 1 to 5 tokens while the row goes on, across the ends of blocks."""
        model = golden()
        rows = Rows(model)
        kept: list[int] = []
        for turn in range(12):
            position, wrong = len(kept), 1 + turn % 5
            for cache in rows.caches[0]:
                assert cache is not None
                cache.plan([position + 1])
            ids = [IDS[position], *IDS[30 : 30 + wrong]]
            logits = self.follow(model, rows.caches[0], ids, position)
            kept.append(IDS[position])
            np.testing.assert_array_equal(logits[0], whole(model, kept)[-1])
            for cache in rows.caches[0]:
                assert cache is not None
                (snapshot,) = cache.take()
                assert cache.rewind(position + 1, snapshot)
        np.testing.assert_array_equal(self.follow(model, rows.caches[0], IDS[12:], 12), whole(model, IDS)[12:])

    def test_every_kind_of_memory_is_counted(self) -> None:
        model = golden()
        rows = Rows(model)
        rows.logits([IDS])
        facts = model.facts
        caches = [cache for cache in rows.caches[0] if cache is not None]
        assert [type(cache).__name__ for cache in caches] == [
            "RecurrentCache",
            "RecurrentCache",
            "KVCache",
            "KVCache",
            "NGramCache",
        ]
        growing = sum(cache.nbytes for cache in caches if isinstance(cache, KVCache))
        assert growing == 256 * facts.cache_bytes_per_token
        assert sum(cache.nbytes for cache in caches) - growing == facts.cache_bytes_fixed


def test_taps_are_what_the_next_layer_reads() -> None:
    model: Any = golden()
    hidden = model.forward(Rows(model).batch([IDS], taps=[1, 2, 0]))
    second, last, first = mx.split(hidden.taps, 3, axis=-1)
    np.testing.assert_array_equal(np.array(last), np.array(hidden.final))
    batch = Rows(model).batch([IDS])
    x = model.embed(batch.tokens)
    streams, _ = model.layers[0](mx.broadcast_to(x[:, None], (len(IDS), 4, 32)), batch)
    assert not np.array_equal(np.array(streams[:, 0]), np.array(streams[:, 1]))
    added = model.layers[1].ngrams(streams, batch, model.layers[1].slots.ngrams)
    assert np.abs(np.array(added - streams)).max() > 1e-3
    np.testing.assert_array_equal(np.array(model.layers[1].before.mixed(added)), np.array(first))
    assert second.shape == (len(IDS), 32)
    np.testing.assert_array_equal(np.array(model.raw_logits(hidden.final)), np.array(model.logits(hidden.final)))


def test_decoding_leaves_no_growing_graph_behind() -> None:
    """Below the position where blocks can be missed, nothing but the next block needs the index keys."""
    model = golden()
    rows = Rows(model)
    sizes = []
    for token in IDS[:10]:
        rows.logits([[token]])
        graph = io.StringIO()
        for cache in rows.caches[0]:
            assert cache is not None
            mx.export_to_dot(graph, *cache.state())
        sizes.append(graph.getvalue().count("label"))
    assert max(sizes[5:]) <= max(sizes[:4])


def test_tokens_may_be_lazy_and_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = golden("qwen4_exp_two_tables")
    rows = Rows(model)
    batch = rows.batch([IDS])
    lazy = Batch(mx.maximum(batch.tokens, 0), batch.spans)
    reads: list[int] = []
    original = Batch.ids.fget
    assert original is not None

    def ids(self: Batch) -> np.ndarray:
        reads.append("ids" not in self.memo)
        found: np.ndarray = original(self)
        return found

    monkeypatch.setattr(Batch, "ids", property(ids))
    found = np.array(model.logits(model.forward(lazy).final))
    np.testing.assert_array_equal(found, whole(golden("qwen4_exp_two_tables"), IDS))
    assert sum(reads[:2]) == 1
    assert len(reads) >= 2


def test_indexed_and_plain_attention_agree_up_to_where_blocks_can_be_missed(tmp_path: Path) -> None:
    tensors = fn.published(fn.golden_tensors())
    sparse, dense = (
        logits(fn.folder(tmp_path / str(budget), tensors, fn.config(indexer_budget=budget))) for budget in (8, 4096)
    )
    np.testing.assert_array_equal(sparse[:11], dense[:11])
    assert np.abs(sparse[11:] - dense[11:]).max() > 1e-3


class TestPlacesOfImages:
    """Positions on three axes, which images give; a block of keys has that of its first token."""

    @staticmethod
    def logits(model: Model, layout: Layout | None, sizes: Sequence[int]) -> np.ndarray:
        caches, parts, start = model.new_caches(), [], 0
        for turn in range(len(IDS)):
            ids = IDS[start : start + sizes[turn % len(sizes)]]
            if not ids:
                break
            batch = Batch(mx.array(ids, mx.int32), [Span(0, len(ids), start, caches, layout)])
            parts.append(np.array(model.logits(model.forward(batch).final)))
            start += len(ids)
        return np.concatenate(parts)

    def test_axes_that_agree_give_the_bits_of_text(self) -> None:
        model = golden()
        layout = Layout(np.tile(np.arange(25, dtype=np.int32), (3, 1)), 0)
        np.testing.assert_array_equal(self.logits(model, layout, (40,)), whole(model, IDS))

    @pytest.mark.parametrize("sizes", [(1,), (7, 1, 13), (17, 1, 9, 2)])
    def test_a_block_may_begin_in_an_image_that_came_in_an_earlier_chunk(self, sizes: tuple[int, ...]) -> None:
        model = golden()
        # Three tokens of text, an image of 3 × 6 places, text again.
        rows, columns = np.divmod(np.arange(18, dtype=np.int32), 6)
        image = np.stack([np.full(18, 3), 3 + rows, 3 + columns]).astype(np.int32)
        prompt = np.concatenate([np.tile(np.arange(3), (3, 1)), image, np.tile(np.arange(9, 13), (3, 1))], axis=1)
        layout = Layout(prompt.astype(np.int32), 13 - 25)
        expected = self.logits(model, layout, (40,))
        np.testing.assert_array_equal(self.logits(model, layout, sizes), expected)
        other = prompt.copy()
        other[1, 8] += 4
        assert np.abs(self.logits(model, Layout(other.astype(np.int32), 13 - 25), (40,)) - expected).max() > 1e-4


class TestLongPrompts:
    def attention(self) -> tuple[IndexedAttention, Config]:
        checkpoint = Checkpoint.open(FolderSource(str(fn.GOLDEN)))
        config = Config.read(checkpoint.config)
        rope = Rope(config.rope, config.shape.head_dim)
        layer = IndexedAttention.load(
            checkpoint,
            "model.layers.2.self_attn",
            mx.float32,
            config.attention,
            config.index,
            rope,
            eps=config.shape.eps,
            baked=False,
        )
        return layer, config

    def peak(self, layer: IndexedAttention, history: int, queries: int) -> int:
        """Bytes at most in use for a chunk of `queries` behind `history` tokens, beyond what was there before."""
        caches = [layer.main.new_cache(), layer.indexer.new_cache()]
        x = mx.random.normal((history + queries, 32), key=mx.random.key(0))
        position = 0
        for length in [512] * (history // 512) + [queries]:
            span = Span(0, length, position, caches)
            batch = Batch(mx.zeros(length, mx.int32), [span])
            part = mx.contiguous(x[position : position + length])
            mx.eval(part, *(a for c in caches for a in c.state()))
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            y = layer(part, batch, 0, 1)
            mx.eval(y, *(a for c in caches for a in c.state()))
            position += length
        assert bool(mx.isfinite(y).all())
        return mx.get_peak_memory() - before

    def test_memory_grows_with_queries_and_not_with_queries_times_keys(self, kernels: str) -> None:
        layer, _ = self.attention()
        few, many = self.peak(layer, 0, 2048), self.peak(layer, 0, 8192)
        # Scores of [8192, 8192] for four heads are 1 GiB, and those of index queries and blocks 384 MiB. Plain MLX
        # holds some tiles of at most 64 MiB, the extension what comes in and goes out.
        assert many < 320 * 2**20
        if kernels == "native":
            # Four times the queries; with keys it would be sixteen. What is freed a moment later counts, too.
            assert many < 8 * few

    def test_memory_of_a_chunk_hardly_grows_with_its_history(self) -> None:
        layer, _ = self.attention()
        near, far = self.peak(layer, 512, 512), self.peak(layer, 7680, 512)
        # The caches are moved to larger buffers: keys, values and index keys, old and new.
        moved = 2 * 8192 * (2 * 2 * 16 + 16) * 4
        scores = 512 * (8192 // 4) * 4 * (6 + 4)
        assert far < near + moved + scores

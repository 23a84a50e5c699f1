"""Which draft a runner gets."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.errors import CheckpointError, LoadError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Model
from arriero.runner.engine import Engine
from arriero.runner.load import load
from arriero.runner.main import _load
from arriero.runner.messages import RunnerConfig
from arriero.runner.sampling import Sampler
from arriero.runner.speculation.controller import DepthController, WholeBlocks
from arriero.runner.speculation.opening import make_speculator, open_draft
from arriero.source import FolderSource, ModelSource
from tests.helpers.drafts import GOLDENS, TARGETS, with_head


def folder(path: Path) -> FolderSource:
    return FolderSource(str(path))


def config(source: ModelSource, **fields: object) -> RunnerConfig:
    return RunnerConfig(source=source, endpoint="", **fields)  # type: ignore[arg-type]


def opened(source: FolderSource, **fields: object):
    checkpoint = Checkpoint.open(source)
    target = load_model(checkpoint, mx.float32)
    return open_draft(config(source, **fields), checkpoint, target, mx.float32)


@pytest.fixture
def headed(tmp_path: Path) -> FolderSource:
    """A folder whose checkpoint holds a head for several tokens."""
    both = with_head("mtp_qwen3_5")
    (tmp_path / "config.json").write_text(json.dumps(both.config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), both.tensors)
    return folder(tmp_path)


@pytest.mark.parametrize("kind", ["", "auto", "draft"])
def test_the_head_in_a_models_own_checkpoint_drafts(headed: FolderSource, kind: str) -> None:
    """R-76."""
    draft = opened(headed, speculation=kind)
    assert draft is not None
    assert draft.facts.architecture == "mtp"


@pytest.mark.parametrize("kind", ["off", "lookup"])
def test_no_draft_is_loaded_where_none_is_wanted(headed: FolderSource, kind: str) -> None:
    assert opened(headed, speculation=kind) is None


def test_a_draft_that_is_given_goes_before_the_head(headed: FolderSource) -> None:
    found = opened(headed, draft=folder(GOLDENS / "dflash_mixed"))
    assert found is not None
    assert found.facts.architecture == "DFlashDraftModel"


def test_a_draft_for_another_model_fails_the_load_with_both_numbers() -> None:
    """R-74."""
    with pytest.raises(CheckpointError, match=r"does not belong to this model: .* is \d+ .* and \d+ in"):
        opened(folder(TARGETS / "llama"), draft=folder(GOLDENS / "dflash2"))


def test_a_draft_that_is_asked_for_and_not_there_fails_the_load() -> None:
    with pytest.raises(LoadError, match="'draft', but there is no draft for this LlamaForCausalLM"):
        opened(folder(TARGETS / "llama"), speculation="draft")


def test_an_unknown_kind_fails_the_load_with_the_known_ones() -> None:
    with pytest.raises(LoadError, match="'fast' is not known; ARRIERO_SPECULATION can be auto, off, lookup, draft"):
        opened(folder(TARGETS / "llama"), speculation="fast")


def test_a_drafts_bytes_count_with_the_models(headed: FolderSource) -> None:
    sizes = {}
    for kind in ("off", "auto"):
        chosen = config(headed, speculation=kind)
        loaded = load(
            headed,
            "float32",
            lambda progress: None,
            find_draft=lambda *three, chosen=chosen: open_draft(chosen, *three),
        )
        sizes[kind] = loaded.weight_bytes
    draft = opened(headed)
    assert draft is not None
    assert sizes["auto"] - sizes["off"] == sum(array.nbytes for array in draft.parameters())


class Silent:
    """A channel that nobody listens on."""

    closed = False

    def send(self, messages: object) -> None: ...


@pytest.mark.parametrize("given", ["head", "dflash2"])
def test_what_a_draft_takes_of_each_row_is_told_with_what_the_model_takes(headed: FolderSource, given: str) -> None:
    """The scheduler promises memory by these figures."""
    source, draft = headed, None
    if given == "dflash2":
        source, draft = folder(TARGETS / "qwen3_5_moe"), folder(GOLDENS / given)
    ready = {}
    for kind in ("off", "draft"):
        chosen = config(source, draft=draft, speculation=kind, dtype="float32")
        engine, ready[kind] = _load(chosen, Silent(), 0.0)  # type: ignore[arg-type]
        assert isinstance(engine, Engine)
    found = opened(source, draft=draft)
    assert found is not None
    facts, off, on = found.facts, ready["off"], ready["draft"]
    assert on.cache_bytes_per_token - off.cache_bytes_per_token == facts.cache_bytes_per_token
    assert (facts.cache_bytes_per_token > 0) is (given == "head")
    assert on.cache_bytes_fixed - off.cache_bytes_fixed == facts.cache_bytes_fixed + engine.row_bytes
    assert engine.row_bytes > 0
    assert (off.round_bytes, on.round_bytes) == (0, engine.round_bytes)
    assert on.weight_bytes - off.weight_bytes == sum(array.nbytes for array in found.parameters())


def target(name: str) -> Model:
    return load_model(Checkpoint.open(folder(TARGETS / name)), mx.float32)


def test_a_model_without_a_draft_copies_from_its_text() -> None:
    model = target("llama")
    found = make_speculator(config(folder(TARGETS / "llama")), model, Sampler(10, 10), None)
    assert found is not None
    assert found.kind == "lookup"
    assert isinstance(found.depths, DepthController)


@pytest.mark.parametrize("kind", ["off", "draft"])
def test_nothing_is_copied_where_that_is_not_wanted(kind: str) -> None:
    model = target("llama")
    assert make_speculator(config(folder(TARGETS / "llama"), speculation=kind), model, Sampler(10, 10), None) is None


def test_blocks_that_must_be_whole_follow_no_depths() -> None:
    source = folder(TARGETS / "qwen3_5_moe")
    checkpoint = Checkpoint.open(source)
    model = load_model(checkpoint, mx.float32)
    chosen = config(source, draft=folder(GOLDENS / "dflash2"), draft_tokens=5)
    draft = open_draft(chosen, checkpoint, model, mx.float32)
    found = make_speculator(chosen, model, Sampler(10, 10), draft)
    assert found is not None
    assert isinstance(found.depths, WholeBlocks)
    for _ in range(WholeBlocks.PLAIN):
        found.depths.observe(0, 0, 0, 1, 1.0)
    assert found.depths.next(100) == 5

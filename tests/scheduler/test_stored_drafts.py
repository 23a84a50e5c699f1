"""A stored model with a draft beside it drafts in a real runner, and a draft of another model fails the load."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.create.accept import Verdict
from arriero.create.check import check_plan
from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.errors import CheckpointError
from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.runner.messages import RunnerConfig, SamplingOptions, SpeculationUsed, Submit
from arriero.runner.prefix.fingerprint import fingerprint
from arriero.runner.speculation.opening import open_draft
from arriero.scheduler import LoadRequest
from arriero.scheduler.runner import Drafting
from arriero.source import GGUFSource, LayersSource
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import upload
from tests.helpers.drafts import GOLDENS, TARGETS, draft_checkpoint, target_of
from tests.helpers.engine_runs import plain_loop
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.golden_store import small_tokenizer
from tests.scheduler.conftest import answer

REAL = [sys.executable, "-m", "arriero.runner"]


def folder(path: Path, golden: Path) -> Path:
    """A golden's files as they are published."""
    path.mkdir()
    (path / "config.json").write_bytes((golden / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes((golden / "model.safetensors").read_bytes())
    (path / "tokenizer.json").write_text(small_tokenizer())
    return path


async def test_a_stored_draft_drafts_in_a_real_runner_for_its_model(make, tmp_path):
    store = Store(tmp_path / "store")
    target = TARGETS / draft_checkpoint("dflash2").config["target"]
    request = CreateRequest(
        model="m",
        files=upload(store, folder(tmp_path / "target", target)),
        draft_files=upload(store, folder(tmp_path / "draft", GOLDENS / "dflash2")),
    )
    stored = create(store, request, lambda status: None, check=partial(check_plan, ask=lambda source: Verdict()))
    source = stored.source()
    scheduler = make(command=REAL, dtype="float32")
    async with await scheduler.lease(LoadRequest("m", "m", source, 100_000)) as lease:
        submit = Submit(
            id="1", tokens=[5, 6, 7, 8], max_tokens=40, stop_tokens=[], sampling=SamplingOptions(temperature=0.0)
        )
        tokens, end = await answer(lease, submit)
        assert tokens == plain_loop(target_of("dflash2"), [5, 6, 7, 8], 40)
        assert end.speculation.kind == "DFlash2DraftModel"
        assert end.speculation.rounds > 3
        (loaded,) = scheduler.loaded()
        assert loaded.drafting.kind == "DFlash2DraftModel"
        used = end.speculation
        assert loaded.drafting.rounds == used.rounds
        assert loaded.drafting.accepted_by_position == tuple(used.accepted_by_position)
        assert (loaded.drafting.plain_steps, loaded.drafting.parked_ns) == (used.plain_steps, used.parked_ns)
        assert used.plain_steps > 0


def beside(path: Path, name: str) -> LayersSource:
    """A golden draft's layers as they lie beside a model."""
    tensors = {}
    for number, (tensor, value) in enumerate(draft_checkpoint(name).tensors.items()):
        tensors[f"draft.{tensor}"] = str(path / f"{number}.safetensors")
        mx.save_safetensors(tensors[f"draft.{tensor}"], {f"draft.{tensor}": value})
    return LayersSource(tensors, {"draft/config.json": str(GOLDENS / name / "config.json")})


@pytest.mark.parametrize("name", ["dflash2", "assistant_e2b"])
def test_a_draft_beside_a_gguf_file_that_it_was_not_made_for_fails_the_load_with_both_numbers(tmp_path, name):
    write_tiny_llama_gguf(tmp_path / "m.gguf")
    source = GGUFSource((str(tmp_path / "m.gguf"),), beside(tmp_path, name))
    checkpoint = Checkpoint.open(source)
    target = load_model(checkpoint, mx.float32)
    with pytest.raises(CheckpointError, match=r"is 128 in the draft's configuration and 268 in the model"):
        open_draft(RunnerConfig(source=source, endpoint=""), checkpoint, target, mx.float32)


def test_stored_prefixes_of_a_gguf_file_are_another_drafts_own(tmp_path):
    write_tiny_llama_gguf(tmp_path / "m.gguf")
    paths = (str(tmp_path / "m.gguf"),)
    with_draft = GGUFSource(paths, beside(tmp_path, "dflash2"))
    names = {fingerprint(source, "float32", "cpu", "exact", "d") for source in (GGUFSource(paths), with_draft)}
    assert len(names) == 2


def test_what_drafting_did_adds_up_over_replies_and_runners():
    def used(reached: list[int], accepted: list[int]) -> SpeculationUsed:
        return SpeculationUsed(
            kind="lookup",
            rounds=reached[0],
            drafted=sum(reached),
            accepted=sum(accepted),
            reached_by_position=reached,
            accepted_by_position=accepted,
            plain_steps=2,
            parked_ns=10,
        )

    one = Drafting("lookup").after(used([3, 2], [2, 1]))
    two = one.after(used([4, 1, 1], [1, 1, 0]))
    assert two.plus(one) == Drafting("lookup", 10, 16, 8, (10, 5, 1), (5, 3, 0), 6, 30)

"""Drafts of rows with images: the plain loop's tokens, and a draft that saw the images where they stand."""

from __future__ import annotations

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Draft, Model
from arriero.model.drafts import load_head
from arriero.runner.messages import SamplingOptions
from arriero.runner.sampling import Sampler
from arriero.source import FolderSource
from tests.helpers.drafts import cache_bits, draft_checkpoint
from tests.helpers.engine_runs import run, submit
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from tests.helpers.pictures import GOLDENS, PROMPTS, Golden, SeeingRows
from tests.helpers.speculation import PATTERNS, speculating

NAME, COUNT = "qwen3_5", 24
DRAWN = SamplingOptions(temperature=2.0, top_k=60, top_p=1.0, seed=11)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(Checkpoint.open(FolderSource(str(GOLDENS / NAME))), mx.float32)


@pytest.fixture(scope="module")
def head(model: Model) -> Draft:
    """The golden head of the text model, which has the same shape."""
    target = MemoryCheckpoint.golden(GOLDENS / NAME)
    both = MemoryCheckpoint(target.config, target.tensors | draft_checkpoint("mtp_qwen3_5").tensors)
    found = load_head(both.typed(), model, mx.float32)
    assert found is not None
    return found


def alone(model: Model, golden: Golden) -> list[int]:
    rows = SeeingRows(model, [(golden.ids, golden.images)])
    sampler = Sampler(model.facts.vocab_size, model.facts.context_length)
    sampler.add("row", DRAWN, golden.ids)
    out: list[int] = []
    last = rows.logits([len(golden.ids)])[-1:]
    for _ in range(COUNT):
        out += sampler.sample(["row"], mx.array(last)).read_tokens()
        last = rows.logits([1], out)
    return out


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_behind_an_image_change_no_token(model: Model, head: Draft, prompt: str, chunk: int) -> None:
    """S11."""
    golden = Golden.load(NAME, prompt)
    wanted = alone(model, golden)
    for draft in (None, head):
        replies = {tuple(golden.ids): wanted} if draft is None else None
        engine = speculating(
            model, draft=draft, replies=replies, pattern=PATTERNS["random"], widths=(3, 0, 6), prefill_chunk=chunk
        )
        engine.submit(msgspec.structs.replace(submit("a", golden.ids, COUNT, sampling=DRAWN), images=golden.images))
        reply = run(engine)["a"]
        assert reply.tokens == wanted
        assert reply.end.speculation.rounds > 3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_head_sees_the_images_of_a_prompt_whatever_its_chunks(model: Model, head: Draft, prompt: str) -> None:
    golden = Golden.load(NAME, prompt)
    found = []
    for chunk, images in ((1, True), (5, True), (512, True), (512, False)):
        engine = speculating(model, draft=head, widths=(0,), prefill_chunk=chunk)
        request = submit("a", golden.ids, COUNT, sampling=DRAWN)
        engine.submit(msgspec.structs.replace(request, images=golden.images) if images else request)
        for _ in range(len(golden.ids) + 5):
            if engine._rows and engine._rows[0].session.offset == len(golden.ids) - 1:
                break
            engine.step()
        found.append(cache_bits(engine._rows[0].session.caches))
    for other in found[1:3]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert not np.allclose(found[2][0], found[3][0], atol=1e-3)

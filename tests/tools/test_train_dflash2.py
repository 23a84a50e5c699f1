"""A draft that is trained for a tiny model, with PyTorch where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Span
from arriero.model.drafts import load_draft
from arriero.runner.load import load
from arriero.source import FolderSource, GGUFSource
from tests.helpers.drafts import target_states
from tests.helpers.forward import whole
from tests.helpers.gguf_files import write_tiny_llama_gguf

torch = pytest.importorskip("torch")

from tools import train_dflash2  # noqa: E402
from tools.train_dflash2_loop import Plan, anchors_of, tokens_a_round, train  # noqa: E402
from tools.train_dflash2_network import Draft, embed, visible  # noqa: E402
from tools.train_dflash2_shape import Shape  # noqa: E402
from tools.train_dflash2_talks import Manner, Marks, Talks, pick, talk  # noqa: E402
from tools.train_dflash2_target import Memory, Metadata, Target, open_file  # noqa: E402

LAYERS = 4
SHAPE = Shape(
    hidden=64, heads=4, kv_heads=2, head_dim=16, inner=48, vocab=268, target_layers=LAYERS, taps=(1, 2), mask=0,
    layers=2, block=5, window=12, conv_group=8, rank=6, top_k=7,
)  # fmt: skip
MARKS = Marks([1, 5, 6], [2, 7, 8], [2, 9])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("target") / "tiny.gguf"
    write_tiny_llama_gguf(found, layers=LAYERS)
    return found


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    return Target.load(open_file(path), "cpu", torch.float32, 64)


@pytest.fixture(scope="module")
def ours(path: Path) -> Any:
    return load(GGUFSource((str(path),)), "float32", lambda _: None).model


def test_the_target_gives_the_logits_and_taps_that_the_engine_gives(target: Target, ours: Any) -> None:
    ids = list(range(3, 43))
    states, taps = target.forward(torch.tensor([ids]), taps=(1, 2))
    np.testing.assert_allclose(target.logits(states)[0].numpy(), whole(ours, ids), atol=1e-4)
    expected = target_states(ours, ids, (1, 2))[0].taps
    np.testing.assert_allclose(taps[0].numpy(), np.array(expected), atol=1e-4)


def test_the_target_step_by_step_gives_what_it_gives_at_once(target: Target) -> None:
    tokens = torch.arange(20).reshape(2, 10)
    at_once, _ = target.forward(tokens)
    memory = Memory(target, 2, 10)
    parts = [target.forward(tokens[:, :4], memory)[0]]
    parts += [target.forward(tokens[:, i : i + 1], memory)[0] for i in range(4, 10)]
    torch.testing.assert_close(torch.cat(parts, 1), at_once, atol=1e-5, rtol=1e-5)


def test_a_target_that_is_no_llama_is_refused(tmp_path: Path) -> None:
    write_tiny_llama_gguf(tmp_path / "other.gguf", metadata={"general.architecture": "qwen3"})
    with pytest.raises(ValueError, match="'qwen3'; only 'llama'"):
        Target.load(open_file(tmp_path / "other.gguf"), "cpu", torch.float32, 64)


def test_marks_are_what_the_template_puts_around_turns(path: Path) -> None:
    template = Metadata(open_file(path))("tokenizer.chat_template")
    marks = Marks.of(template, lambda text: [*text.encode()])
    assert bytes(marks.before) == b"<|im_start|>user\n"
    assert bytes(marks.to_answer) == b"<|im_end|>\n<|im_start|>assistant"
    assert bytes(marks.to_question) == b"<|im_end|>\n<|im_start|>user\n"


def test_a_conversation_takes_turns_and_only_answers_are_the_models_own(target: Target) -> None:
    said = talk(target, MARKS, 6, 60, Manner(longest_question=5, longest_answer=9))
    for tokens, own in zip(said.tokens.tolist(), said.own.tolist(), strict=True):
        assert tokens[:3] == MARKS.before
        at, answering = 3, False
        while at < 60:
            most = 9 if answering else 5
            end = next((i for i in range(at, 60) if tokens[i] == 2), 60)
            assert end - at <= most
            # An end that had to come is nobody's choice.
            chosen = [answering] * (end - at) + [answering and end - at < most]
            assert own[at : end + 1] == chosen[: 60 - at]
            put_in = (MARKS.to_question if answering else MARKS.to_answer)[1:]
            assert tokens[end + 1 : end + 1 + len(put_in)] == put_in[: max(59 - end, 0)]
            at, answering = end + 1 + len(put_in), not answering


def test_first_questions_are_what_was_asked_before_the_first_end() -> None:
    rows = [
        [1, 5, 6, 20, 21, 2, 7, 8, 30, 2, 9],
        [1, 5, 6, 22, 23, 24, 25, 26, 27, 28, 29],
        [1, 5, 6, 2, 7, 8, 31, 2, 9, 9, 9],
    ]
    said = Talks(torch.tensor(rows).int(), torch.zeros(3, 11, dtype=torch.bool))
    assert said.questions(MARKS, 5) == [[20, 21], []]
    assert said.questions(MARKS, 1) == [[20, 21]]


def test_even_rows_answer_greedily(target: Target) -> None:
    said = talk(target, MARKS, 2, 60, Manner(longest_question=4))
    states, _ = target.forward(said.tokens.long())
    best = target.logits(states).argmax(-1)[:, :-1]
    agree = (best == said.tokens[:, 1:]) | ~said.own[:, 1:]
    assert said.own.sum(1).min() > 10
    assert agree[0].all()
    assert not agree[1].all()


def test_tokens_are_drawn_by_the_softmax_of_what_is_likely_enough() -> None:
    torch.manual_seed(1)
    law = torch.tensor([0.5, 0.3, 0.19, 0.01])
    scores = law.log().expand(20000, 4)
    drawn = pick(scores, torch.ones(20000), torch.full((20000,), 0.1)).bincount(minlength=4) / 20000
    expected = law * torch.tensor([1, 1, 1, 0]) / 0.99
    torch.testing.assert_close(drawn, expected, atol=0.015, rtol=0)


def test_a_row_sees_the_context_before_its_block_within_the_window_and_its_block() -> None:
    shape = SHAPE.__class__(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "window": 4})
    seen = visible(shape, torch.tensor([2, 6]), 3, 8)
    for row, (start, r) in enumerate([(2, 0), (2, 1), (2, 2), (6, 0), (6, 1), (6, 2)]):
        context = [start + r - 4 < j < start for j in range(8)]
        own = [start == s and i <= r for s, i in [(2, 0), (2, 1), (2, 2), (6, 0), (6, 1), (6, 2)]]
        assert seen[row].tolist() == context + own


def trained(target: Target, steps: int = 20) -> tuple[Draft, Talks, list[float]]:
    """A draft after some steps on talk whose answers repeat one sequence, which can be learned."""
    torch.manual_seed(0)
    tokens = (torch.arange(60)[None] + torch.arange(8)[:, None]) % 20 + 10
    said = Talks(tokens.int(), torch.ones_like(tokens, dtype=torch.bool))
    draft = Draft(SHAPE)
    plan = Plan(steps, float("inf"), rows=4, anchors=12, rate=5e-3, codebook_rate=5e-3)
    return draft, said, train(draft, target, said, plan, seed=0)


def test_training_lowers_the_loss_and_more_guesses_stay(target: Target) -> None:
    draft, said, losses = trained(target)
    assert losses[-1] < 0.5 * losses[0]
    torch.manual_seed(0)
    anchors = torch.arange(1, 50)
    assert tokens_a_round(draft, target, said, anchors)[0] > tokens_a_round(Draft(SHAPE), target, said, anchors)[0] + 1


def test_what_is_stored_gives_the_engine_the_trainers_states_and_guesses(
    target: Target, ours: Any, tmp_path: Path
) -> None:
    draft, said, _ = trained(target, 8)
    with torch.no_grad():
        for value in draft.parameters():
            value.add_(0.05 * torch.randn_like(value))
    draft.to(torch.bfloat16).float()
    train_dflash2.write(draft, tmp_path)
    loaded: Any = load_draft(Checkpoint.open(FolderSource(str(tmp_path))), ours, mx.float32)
    assert loaded.facts.limit == SHAPE.block - 1
    tokens = said.tokens[:1].long()
    anchors = anchors_of(draft, said, 6, torch.Generator().manual_seed(3))
    with torch.no_grad():
        _, taps = target.forward(tokens, taps=SHAPE.taps)
        states = draft(taps, anchors, embed(SHAPE, target.table, tokens, anchors))[0]
        walked = draft.walk(states, tokens[0, anchors], target.head)
    ids = tokens[0].tolist()
    for place, expected, path in zip(anchors.tolist(), states, walked, strict=True):
        hidden, _ = target_states(ours, ids[:place], SHAPE.taps)
        caches = loaded.new_caches()
        loaded.commit(Batch.of(np.array(ids[:place], np.int32), [Span(0, place, 0, caches)]), hidden.taps)
        anchor = mx.array([ids[place]])
        found = loaded.block(anchor, SHAPE.block - 1, Span(0, 0, place, caches))
        np.testing.assert_allclose(np.array(found), expected[1:].numpy(), atol=1e-4)
        prepared = loaded.prepared(found, anchor)
        guesses = loaded.guess(prepared, lambda scores, candidates: candidates[:, mx.argmax(scores[0])])
        assert np.array(guesses).tolist() == path.tolist()


def test_the_command_writes_talks_and_a_draft_and_goes_on_with_both(path: Path, tmp_path: Path) -> None:
    sizes = "--conversations 6 --length 90 --batch 4 --longest-question 3 --longest-answer 9 --held-out 2 --steps 2"
    sizes += " --rows 2 --anchors 4 --taps 1 --rank 4 --inner 32"
    kept = tmp_path / "talks.npz"
    report = train_dflash2.main([str(path), str(tmp_path / "draft"), "--talks", str(kept), *sizes.split()])
    assert report["steps"] == 2
    assert report["weights_bytes"] > 0
    assert {file.name for file in (tmp_path / "draft").iterdir()} == {
        "config.json",
        "questions.json",
        "model.safetensors",
        "training.json",
    }
    said = Talks.read(kept, "cpu")
    assert said.tokens.shape == (6, 90)
    stored, again = str(tmp_path / "draft"), [str(path), str(tmp_path / "again"), "--talks", str(kept)]
    untouched = train_dflash2.main([*again, "--from", stored, *sizes.replace("--steps 2", "--steps 0").split()])
    assert untouched["rounds"] == report["rounds"]
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "draft" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(ValueError, match=r"can't be trained on: dflash_config is .*'selector_rank': 4"):
        train_dflash2.main([*again, "--from", stored, *sizes.replace("--rank 4", "--rank 5").split()])

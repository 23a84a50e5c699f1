"""Prompts in forwards of their own beside rows that decode, as on NVIDIA GPUs: whatever comes, goes, or goes wrong."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from arriero.runner import engine as engine_module
from arriero.runner.messages import Failed
from tests.helpers.draft_cases import drafting
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import TinyModel


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arriero.runner.decode.cuda", object)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_and_go_in_any_order_write_what_they_write_alone(seed: int) -> None:
    chance = random.Random(seed)
    model = TinyModel()
    engine = make_engine(model, ahead=True, prefill_chunk=6, max_rows=4, prefix_bytes=(seed % 2) << 20)
    prompts = {str(i): [chance.randrange(90) for _ in range(chance.choice([1, 2, 5, 17, 40]))] for i in range(9)}
    waiting, cancelled, replies = list(prompts), set[str](), {}
    while waiting or engine.busy:
        if waiting and chance.random() < 0.4:
            row = waiting.pop()
            engine.submit(submit(row, prompts[row], chance.choice([1, 2, 12])))
        if chance.random() < 0.08:
            row = chance.choice(list(prompts))
            engine.cancel(row)
            cancelled.add(row)
        engine.step()
        collect(engine, replies)
    for row, reply in replies.items():
        if row not in cancelled:
            assert reply.reason == "length"
        assert reply.tokens == plain_loop(model, prompts[row], len(reply.tokens))


@pytest.mark.parametrize("name", ["mtp_qwen3_5", "assistant_e2b"])
def test_drafts_are_told_of_rows_and_of_the_prompts_beside_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"a": [3, 1, 4], "b": list(range(20)), "c": [7] * 9}

    def replies() -> dict[str, list[int]]:
        engine = drafting(name, {}, prefill_chunk=8)
        found = {}
        for row, prompt in prompts.items():
            engine.submit(submit(row, prompt, 14 if row == "b" else 9))
            engine.step()
            collect(engine, found)
        return {row: reply.tokens for row, reply in run(engine, found).items()}

    ours = replies()
    monkeypatch.setattr("arriero.runner.decode.cuda", lambda: None)
    assert ours == replies()


def test_a_prompt_whose_forward_fails_beside_rows_ends_each_row_once_and_the_next_one_runs() -> None:
    class Failing(TinyModel):
        broken = True

        def forward(self, batch):  # type: ignore[no-untyped-def]
            if self.broken and len(batch.tokens) == 3 and self.forwards > 2:
                raise RuntimeError("no")
            return super().forward(batch)

    model = Failing()
    engine = make_engine(model, ahead=True)
    engine.submit(submit("a", [5], 9))
    for _ in range(3):
        engine.step()
    engine.submit(submit("b", range(4), 3))
    found = run(engine)
    assert [isinstance(found[row].end, Failed) for row in "ab"] == [True, True]
    model.broken = False
    engine.submit(submit("c", range(4), 3))
    assert run(engine)["c"].tokens == plain_loop(model, range(4), 3)


def test_a_forward_is_built_only_behind_one_that_was_launched() -> None:
    engine = make_engine(TinyModel(), ahead=True)
    engine.submit(submit("a", [5], 9))
    engine._admit()
    engine._build()
    with pytest.raises(AssertionError):
        engine._build()


class Hoarding(TinyModel):
    """Writes a third memory that no step reads."""

    def new_caches(self):  # type: ignore[no-untyped-def]
        return [*super().new_caches(), *TinyModel("f").new_caches()]

    def forward(self, batch):  # type: ignore[no-untyped-def]
        made = super().forward(batch)
        for span in batch.spans:
            part = made.final[span.start : span.start + span.length, :16].reshape(1, 1, -1, 16)
            part = mx.broadcast_to(part, (1, 2, span.length, 16))
            span.caches[2].append(part, part)
        return made


@pytest.mark.parametrize("ahead", [False, True])
def test_what_no_step_reads_is_computed_every_so_many_tokens(
    ahead: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(engine_module, "CLEAR_EVERY", 8)
    engine = make_engine(Hoarding(), ahead=ahead)
    engine.submit(submit("a", [5, 6, 7], 60))

    def waiting() -> int:
        file = tmp_path / "graph"
        mx.export_to_dot(str(file), *engine._rows[0].caches[2].state())
        text = file.read_text()
        return text.count("ArrieroAppend") + text.count("SliceUpdate")

    found = []
    for _ in range(50):
        engine.step()
        found.append(waiting())
    assert max(found) <= 2 * (8 + 2)

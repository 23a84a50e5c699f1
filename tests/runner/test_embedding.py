"""Vectors of texts in a runner: pooling, packing by length, errors, and beside rows that generate."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from arriero.model.architectures import load_model
from arriero.model.checkpoint import Checkpoint
from arriero.model.contract import Batch, Encoder, Span
from arriero.runner.embedding import Embeddings, EncoderStates, ModelStates
from arriero.runner.encoder_engine import EncoderEngine
from arriero.runner.limits import Limits
from arriero.runner.messages import Embed, Embedded, Failed, Pooling
from arriero.source import FolderSource
from tests.helpers.engine_runs import make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import TinyModel

BERT = Path(__file__).parents[1] / "model" / "encoders" / "bert"
TEXTS = [[5, 6, 7, 8], [9], [10, 11], [12, 13, 14, 15, 16, 17, 18], [5]]
POOLINGS: list[Pooling] = ["mean", "cls", "last"]


@pytest.fixture(scope="module")
def bert() -> Encoder:
    model = load_model(Checkpoint.open(FolderSource(str(BERT))), mx.float32)
    assert isinstance(model, Encoder)
    return model


def rows(message: object) -> np.ndarray:
    assert isinstance(message, Embedded), message
    return np.frombuffer(message.vectors, "<f4").reshape(-1, message.width)


def finished(embeddings: Embeddings) -> list[np.ndarray]:
    said = []
    while embeddings.busy:
        said += embeddings.step()
    return [rows(message) for message in said]


def pooled(states: np.ndarray, pooling: Pooling) -> np.ndarray:
    return {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]


@pytest.mark.parametrize("budget", [1, 5, 8, 100])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_come_in_the_order_of_the_texts_whatever_shares_a_forward(
    bert: Encoder, pooling: Pooling, budget: int
) -> None:
    made = Embeddings(EncoderStates(bert), 40, budget)
    assert made.submit(Embed(id="a", texts=TEXTS, pooling=pooling)) is None
    wanted = [pooled(np.array(bert.encode(mx.array(text), [len(text)])), pooling) for text in TEXTS]
    np.testing.assert_allclose(finished(made)[0], np.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 4, 100])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_model_that_generates_pools_its_final_states(pooling: Pooling, chunk: int) -> None:
    model = TinyModel("fs", window=4)
    made = Embeddings(ModelStates(model, chunk), 64, chunk)
    made.submit(Embed(id="a", texts=TEXTS, pooling=pooling))
    wanted = []
    for text in TEXTS:
        span = Span(0, len(text), 0, model.new_caches())
        wanted.append(pooled(np.array(model.forward(Batch.of(np.array(text, np.int32), [span])).final), pooling))
    np.testing.assert_allclose(finished(made)[0], np.stack(wanted), atol=1e-4)


def test_requests_are_answered_in_their_order(bert: Encoder) -> None:
    made = Embeddings(EncoderStates(bert), 40, 4)
    for name in ("a", "b"):
        made.submit(Embed(id=name, texts=TEXTS, pooling="mean"))
    said = []
    while made.busy:
        said += made.step()
    assert [message.id for message in said] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [([], "InvalidRequest", "empty"), ([5] * 41, "PromptTooLong", "41 tokens"), ([60], "InvalidRequest", "0 to 59")],
)
def test_a_text_that_can_not_be_read_is_refused(bert: Encoder, text: list[int], error: str, named: str) -> None:
    engine = EncoderEngine(bert, Limits(context_length=40))
    engine.embed(Embed(id="a", texts=[[5], text], pooling="mean"))
    assert not engine.busy
    (message,) = engine.drain()
    assert isinstance(message, Failed)
    assert (message.error, named in message.message) == (error, True)


def test_an_encoder_says_that_it_writes_no_text(bert: Encoder) -> None:
    engine = EncoderEngine(bert, Limits(context_length=40))
    engine.submit(submit("a", [1, 2]))
    (message,) = engine.drain()
    assert isinstance(message, Failed)
    assert "writes no text" in message.message


def test_a_cancelled_request_is_ended_and_the_next_goes_on(bert: Encoder) -> None:
    engine = EncoderEngine(bert, Limits(context_length=40, prefill_chunk=4))
    for name in ("a", "b"):
        engine.embed(Embed(id=name, texts=TEXTS, pooling="mean"))
    engine.step()
    engine.cancel("a")
    while engine.busy:
        engine.step()
    assert [(message.id, type(message)) for message in engine.drain()] == [("a", Failed), ("b", Embedded)]


def test_an_encoder_that_fails_ends_its_requests_and_lives_on(bert: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EncoderEngine(bert, Limits(context_length=40))
    engine.embed(Embed(id="a", texts=TEXTS, pooling="mean"))

    def broken(*_: object) -> mx.array:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(bert, "encode", broken)
        engine.step()
    (message,) = engine.drain()
    assert isinstance(message, Failed)
    engine.embed(Embed(id="b", texts=TEXTS, pooling="mean"))
    engine.step()
    assert rows(engine.drain()[0]).shape == (5, 32)


def test_rows_say_the_same_while_texts_are_embedded_beside_them() -> None:
    model = TinyModel()
    wanted = plain_loop(model, [3, 4, 5], 12)
    engine = make_engine(model, prefill_chunk=4)
    engine.submit(submit("row", [3, 4, 5], 12))
    engine.embed(Embed(id="texts", texts=TEXTS, pooling="last"))
    engine.step()
    first = [message for message in engine.drain() if isinstance(message, Embedded)]
    assert first == []
    said = []
    tokens: list[int] = []
    while engine.busy:
        engine.step()
        for message in engine.drain():
            if isinstance(message, Embedded):
                said.append(message)
            elif hasattr(message, "tokens"):
                tokens += message.tokens
    assert tokens == wanted
    assert rows(said[0]).shape == (5, 32)


def test_texts_are_not_kept_waiting_for_what_a_row_cannot_begin_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(TinyModel())
    pauses = []
    monkeypatch.setattr(engine._hindered, "may_begin", lambda row, running: False)
    monkeypatch.setattr(engine._hindered, "pause", lambda waiting: pauses.append(engine._embeddings.busy))
    engine.submit(submit("a", [1, 2, 3], 2))
    for name in "bcd":
        engine.embed(Embed(id=name, texts=[[4, 5, 6]], pooling="mean"))
    while engine._embeddings.busy:
        engine.step()
    engine.step()
    assert pauses
    assert not any(pauses)


def test_a_closed_engine_has_answered_everything() -> None:
    engine = make_engine(TinyModel())
    engine.embed(Embed(id="texts", texts=TEXTS, pooling="last"))
    engine.close()
    assert [message.id for message in engine.drain()] == ["texts"]
    assert run(engine) == {}

"""One engine over a tiny model: admission, ends of rows, faults, what it promises about waiting and memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from arriero.runner import engine as engine_module
from arriero.runner.decode import Flight
from arriero.runner.messages import Failed, SamplingOptions
from arriero.runner.row import reserved_bytes
from tests.helpers.engine_runs import collect, make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import VOCAB, TinyModel


class RecordingModel(TinyModel):
    """Remembers the spans of each forward, and fails when told to."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.spans: list[list[tuple[int, int]]] = []
        self.failure: Exception | None = None

    def forward(self, batch):
        self.spans.append([(span.position, span.length) for span in batch.spans])
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().forward(batch)


@pytest.fixture
def model() -> RecordingModel:
    return RecordingModel()


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(model):
    engine = make_engine(model, context_length=8)
    engine.submit(submit("a", range(8)))
    end = run(engine)["a"].end
    assert isinstance(end, Failed)
    assert end.error == "PromptTooLong"
    assert "8 tokens" in end.message
    assert not model.spans


def test_the_refusal_of_a_long_prompt_names_prompt_and_context(model):
    engine = make_engine(model, context_length=16)
    engine.submit(submit("a", [1] * 40))
    assert "40 tokens" in collect(engine)["a"].end.message
    engine.submit(submit("b", [1] * 40))
    assert "16 tokens" in collect(engine)["b"].end.message


def test_an_empty_prompt_is_an_invalid_request(model):
    engine = make_engine(model)
    engine.submit(submit("a", []))
    assert collect(engine)["a"].end.error == "InvalidRequest"


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_an_invalid_request_that_names_it(model, token):
    engine = make_engine(model)
    engine.submit(submit("a", [1, token, 2]))
    end = collect(engine)["a"].end
    assert end.error == "InvalidRequest"
    assert str(token) in end.message


def test_a_second_row_of_the_same_id_is_refused_and_the_first_lives(model):
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2, 3], 4))
    engine.submit(submit("a", [1, 2, 3], 4))
    failed = [message for message in engine.drain() if isinstance(message, Failed)]
    assert [message.error for message in failed] == ["InvalidRequest"]
    assert len(run(engine)["a"].tokens) == 4


def test_a_stop_token_ends_the_row_and_is_not_emitted(model):
    tokens = plain_loop(model, [1, 2, 3], 20)
    stop = tokens[11]
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2, 3], 20, [stop]))
    reply = run(engine)["a"]
    assert reply.tokens == tokens[: tokens.index(stop)]
    assert reply.reason == "stop"
    assert reply.end.generated_tokens == len(reply.tokens)


def test_the_same_stop_ids_hold_alone_and_among_others(model):
    tokens = plain_loop(model, [1, 2, 3], 20)
    stops = [tokens[15], tokens[11]]
    engine = make_engine(model)
    for row in "abcd":
        engine.submit(submit(row, [1, 2, 3], 20, stops))
    replies = run(engine)
    alone = make_engine(model)
    alone.submit(submit("a", [1, 2, 3], 20, stops))
    expected = run(alone)["a"]
    assert all(replies[row].tokens == expected.tokens and replies[row].reason == "stop" for row in "abcd")


def test_the_budget_ends_a_row_with_length_and_no_forward_for_nothing(model):
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2, 3], 5))
    reply = run(engine)["a"]
    assert reply.reason == "length"
    assert len(reply.tokens) == 5
    assert model.spans == [[(0, 2)], *([(position, 1)] for position in range(2, 7))]


def test_the_context_end_ends_a_row_without_a_budget(model):
    engine = make_engine(model, context_length=20)
    engine.submit(submit("a", [1, 2, 3], 0))
    reply = run(engine)["a"]
    assert reply.reason == "length"
    assert len(reply.tokens) == 17


def test_one_prompt_token_needs_no_prefill(model):
    engine = make_engine(model)
    engine.submit(submit("a", [7], 6))
    tokens = run(engine)["a"].tokens
    assert model.spans == [[(i, 1)] for i in range(6)]
    assert tokens == plain_loop(model, [7], 6)


def test_prefill_chunks_leave_one_token_and_report_progress(model):
    engine = make_engine(model, prefill_chunk=4)
    engine.submit(submit("a", range(11), 1))
    reply = run(engine)["a"]
    assert model.spans == [[(0, 4)], [(4, 4)], [(8, 2)], [(10, 1)]]
    assert reply.progress == [(4, 11), (8, 11), (10, 11)]


def test_short_prompts_share_a_forward_with_each_other_and_with_decoding_rows(model):
    engine = make_engine(model, prefill_chunk=40)
    engine.submit(submit("a", [1], 9))
    engine.step()
    engine.submit(submit("b", range(5), 2))
    engine.submit(submit("c", range(9), 2))
    engine.step()
    assert model.spans[-1] == [(1, 1), (0, 4), (0, 6)], "a quarter of a chunk while a row decodes"
    run(engine)


def test_on_a_gpu_prompts_have_forwards_of_their_own_beside_rows_that_decode(model, monkeypatch):
    monkeypatch.setattr("arriero.runner.decode.cuda", object)
    engine = make_engine(model, prefill_chunk=40)
    engine.submit(submit("a", [1, 2], 9))
    engine.step()
    engine.submit(submit("b", range(5), 3))
    engine.step()
    assert model.spans[-2:] == [[(1, 1)], [(0, 4)]]
    replies = run(engine)
    assert replies["a"].tokens == plain_loop(model, [1, 2], 9)
    assert replies["b"].tokens == plain_loop(model, list(range(5)), 3)


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(model):
    engine = make_engine(model, prefill_chunk=8)
    engine.submit(submit("long", [5] * 200, 1))
    engine.step()
    engine.submit(submit("short", [1, 2, 3], 1))
    engine.step()
    assert model.spans == [[(0, 8)], [(8, 6), (0, 2)]]
    replies = run(engine)
    assert replies["short"].tokens == plain_loop(model, [1, 2, 3], 1)
    assert replies["long"].tokens == plain_loop(model, [5] * 200, 1)


def test_the_next_forward_is_launched_before_a_token_is_read_that_is_not_the_first(model, monkeypatch):
    order = order_of_work(model, monkeypatch, ahead=True)
    assert " ".join(order) == "build launch read build launch build launch read read"


def test_where_launching_blocks_the_last_token_is_read_first(model, monkeypatch):
    order = order_of_work(model, monkeypatch, ahead=False)
    assert " ".join(order) == "build launch build read launch build read launch read"


def test_where_launching_blocks_nothing_is_computed_after_a_stop(model, monkeypatch):
    tokens = plain_loop(model, [7], 2)
    order = order_of_work(model, monkeypatch, ahead=False, stop=tokens[1:])
    assert " ".join(order) == "build launch build read launch build read"


def test_rows_that_stop_in_one_step_keep_no_memory_of_each_other(model):
    """Where a launch blocks, the forward behind their last is built, and whoever keeps its graph keeps all buffers."""
    prompts, replies, seed = [], [], 0
    while len(prompts) < 3:
        seed += 1
        prompt = np.random.default_rng(seed).integers(0, 40, 30).tolist()
        reply = plain_loop(model, prompt, 3)
        if reply[2] not in reply[:2]:
            prompts.append(prompt)
            replies.append(reply)
    engine = make_engine(model, ahead=False, prefix_bytes=1 << 30)
    before = mx.get_active_memory()
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        engine.submit(submit(str(row), prompt, 30, [reply[2]]))
    assert [reply.tokens for reply in run(engine).values()] == [reply[:2] for reply in replies]
    engine.prefixes.shrink(engine.prefixes.nbytes // 2)
    assert engine.prefixes.nbytes > 0
    assert mx.get_active_memory() - before < engine.prefixes.nbytes + 4096


def order_of_work(model, monkeypatch, ahead, stop=()):
    """What an engine does for three tokens."""
    order = []
    forward, wait, launch = model.forward, engine_module.Flight.wait, engine_module.Flight.launch
    monkeypatch.setattr(model, "forward", lambda batch: (order.append("build"), forward(batch))[1])
    monkeypatch.setattr(engine_module.Flight, "launch", lambda flight: (order.append("launch"), launch(flight))[1])
    monkeypatch.setattr(engine_module.Flight, "wait", lambda flight: (order.append("read"), wait(flight))[1])
    engine = make_engine(model, ahead=ahead)
    engine.submit(submit("a", [7], 3, stop))
    run(engine)
    return order


def test_rows_wait_in_order_while_their_memory_is_reserved(model):
    one = reserved_bytes(30, model.facts)
    engine = make_engine(model, cache_bytes=2 * one)
    for row in "abc":
        engine.submit(submit(row, range(10), 20))
    engine.step()
    counts = engine.counts()
    assert (counts.rows_running, counts.rows_waiting, counts.reserved_bytes) == (2, 1, 2 * one)
    engine.cancel("a")
    engine.step()
    assert engine.counts().rows_waiting == 0
    replies = run(engine)
    assert replies["b"].tokens == replies["c"].tokens


def test_a_request_that_never_fits_is_refused_with_both_figures_and_the_next_one_runs(model):
    engine = make_engine(model, cache_bytes=reserved_bytes(256, model.facts))
    for attempt in range(20):
        engine.submit(submit(f"big{attempt}", range(10), 1000))
        end = collect(engine)[f"big{attempt}"].end
        assert end.error == "OutOfMemory"
        assert "512.0 KiB" in end.message
        assert "128.0 KiB" in end.message
        engine.submit(submit(f"small{attempt}", range(10), 2))
        assert run(engine)[f"small{attempt}"].reason == "length"


def test_a_raised_limit_counts_for_rows_that_wait(model):
    one = reserved_bytes(30, model.facts)
    engine = make_engine(model, cache_bytes=one)
    for row in "ab":
        engine.submit(submit(row, range(10), 20))
    engine.step()
    assert engine.counts().rows_waiting == 1
    engine.limit(0, 2 * one)
    engine.step()
    assert engine.counts().rows_waiting == 0


def test_a_lowered_context_refuses_rows_that_wait_and_spares_those_that_run(model):
    engine = make_engine(model, max_rows=1)
    engine.submit(submit("a", range(10), 20))
    engine.submit(submit("b", range(10), 20))
    engine.step()
    engine.limit(10, 0)
    replies = run(engine)
    assert replies["b"].end.error == "PromptTooLong"
    assert len(replies["a"].tokens) == 20


def test_a_cancelled_row_says_so_at_once_and_is_gone(model):
    engine = make_engine(model)
    engine.submit(submit("a", range(10), 100))
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    reply = collect(engine)["a"]
    assert reply.reason == "cancelled"
    assert reply.end.generated_tokens == len(reply.tokens)
    assert engine.counts().cache_bytes == 0
    engine.step()
    assert not engine.busy


def test_a_row_can_be_cancelled_between_prefill_chunks(model):
    engine = make_engine(model, prefill_chunk=4)
    engine.submit(submit("a", range(50), 5))
    engine.step()
    engine.step()
    engine.cancel("a")
    assert run(engine)["a"].reason == "cancelled"
    assert len(model.spans) == 2


def test_a_waiting_row_can_be_cancelled_and_never_runs(model):
    engine = make_engine(model, max_rows=1)
    engine.submit(submit("a", range(3), 5))
    engine.submit(submit("b", range(40), 5))
    engine.step()
    engine.cancel("b")
    replies = run(engine)
    assert replies["b"].reason == "cancelled"
    assert replies["b"].end.generated_tokens == 0
    assert all(length < 5 for spans in model.spans for _, length in spans)


def test_cancelling_an_unknown_row_changes_nothing(model):
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2], 3))
    engine.cancel("b")
    assert len(run(engine)["a"].tokens) == 3


def test_a_failing_forward_fails_each_row_in_flight_once_and_spares_those_that_wait(model):
    engine = make_engine(model, max_rows=2)
    for row in "abc":
        engine.submit(submit(row, [1, 2, 3], 6))
    for _ in range(3):
        engine.step()
    model.failure = ValueError("no kernel")
    replies = run(engine)
    for row in "ab":
        assert replies[row].end.error == "ArrieroError"
        assert "no kernel" in replies[row].end.message
    assert replies["c"].tokens == plain_loop(model, [1, 2, 3], 6)
    counts = engine.counts()
    assert (counts.rows_running, counts.reserved_bytes, counts.cache_bytes) == (0, 0, 0)


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("[metal::malloc] Unable to allocate 99 bytes")])
def test_running_out_of_memory_is_named_as_such(model, failure):
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2, 3]))
    model.failure = failure
    assert run(engine)["a"].end.error == "OutOfMemory"


def test_a_device_that_no_longer_works_is_told_to_the_owner_after_the_rows(model, monkeypatch):
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2, 3]))

    def broken(*arrays):
        raise RuntimeError("sticky error")

    model.failure = ValueError("first sign")
    monkeypatch.setattr(mx, "eval", broken)
    with pytest.raises(RuntimeError, match="sticky error"):
        engine.step()
    assert collect(engine)["a"].end.error == "ArrieroError"


@pytest.mark.parametrize("ahead", [True, False])
def test_a_failure_of_the_device_is_told_once_and_not_to_the_rows_that_come_after(model, monkeypatch, ahead):
    """The forward that was built upon the failed one must not be waited for."""
    waits = Flight.wait

    def wait(flight):
        if any(row.id == "a" for row in flight.rows):
            raise RuntimeError("failed while computing")
        waits(flight)

    monkeypatch.setattr(Flight, "wait", wait)
    engine = make_engine(model, ahead)
    engine.submit(submit("a", [1, 2, 3], 20))
    replies = {}
    while "a" not in replies or replies["a"].end is None:
        engine.step()
        collect(engine, replies)
    engine.submit(submit("b", [1, 2, 3], 4))
    run(engine, replies)
    assert "failed while computing" in replies["a"].end.message
    assert replies["b"].tokens == plain_loop(model, [1, 2, 3], 4)


def test_bad_sampling_options_fail_their_own_row_only(model):
    engine = make_engine(model)
    engine.submit(submit("a", [1, 2, 3], 4))
    engine.submit(submit("b", [1, 2, 3], 4, sampling=SamplingOptions(temperature=float("nan"))))
    replies = run(engine)
    assert replies["b"].end.error == "InvalidRequest"
    assert len(replies["a"].tokens) == 4


@pytest.mark.parametrize("place", ["sampler", "caches"])
def test_a_row_that_cannot_be_admitted_is_told_and_the_rows_behind_it_run(model, monkeypatch, place):
    engine = make_engine(model, max_rows=1)
    owner, name = (engine.sampler, "add") if place == "sampler" else (model, "new_caches")
    works, calls = getattr(owner, name), []

    def fails_once(*arguments):
        calls.append(name)
        if len(calls) == 1:
            raise RuntimeError("no place")
        return works(*arguments)

    monkeypatch.setattr(owner, name, fails_once)
    engine.submit(submit("a", [1, 2, 3], 4))
    engine.submit(submit("b", [1, 2, 3], 4))
    replies = run(engine)
    assert "no place" in replies["a"].end.message
    assert len(replies["b"].tokens) == 4
    assert engine.counts().reserved_bytes == 0


def test_logprobs_come_with_the_tokens_of_the_rows_that_asked(model):
    engine = make_engine(model)
    asking = SamplingOptions(temperature=0.0, logprobs=True, top_logprobs=3)
    engine.submit(submit("a", [1, 2, 3], 8, sampling=asking))
    engine.submit(submit("b", [1, 2, 3], 8))
    replies = run(engine)
    assert replies["a"].tokens == replies["b"].tokens
    assert len(replies["a"].logprobs) == 8
    assert not replies["b"].logprobs
    for token, logprob in zip(replies["a"].tokens, replies["a"].logprobs, strict=True):
        assert logprob.top[0] == (token, pytest.approx(logprob.logprob))
        assert len(logprob.top) == 3


def test_counts_and_times_of_a_finished_row(model):
    engine = make_engine(model, prefill_chunk=4)
    engine.submit(submit("a", range(11), 5))
    end = run(engine)["a"].end
    assert (end.prompt_tokens, end.cached_tokens, end.generated_tokens) == (11, 0, 5)
    assert end.prefill_ns > 0
    assert end.decode_ns > 0
    counts = engine.counts()
    assert (counts.tokens_prefilled, counts.tokens_generated) == (10, 5)


def test_the_buffer_cache_is_cleared_whenever_256_tokens_have_been_generated(model, monkeypatch):
    cleared = []
    engine = make_engine(model)
    for row in "abc":
        engine.submit(submit(row, [5], 300))
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(engine.counts().tokens_generated))
    run(engine)
    *during, at_the_end = cleared
    assert at_the_end == 900
    assert len(during) == 3
    assert all(abs(tokens - 256 * (i + 1)) <= 6 for i, tokens in enumerate(during))


def test_another_thread_may_not_use_the_engine(model):
    engine = make_engine(model)
    with ThreadPoolExecutor(1) as pool:
        for call in (engine.step, engine.close, lambda: engine.cancel("a")):
            with pytest.raises(RuntimeError, match="another thread"):
                pool.submit(call).result()


def test_closing_ends_every_row(model):
    engine = make_engine(model, max_rows=1)
    for row in "ab":
        engine.submit(submit(row, [1, 2, 3], 50))
    engine.step()
    engine.close()
    replies = collect(engine)
    assert [replies[row].reason for row in "ab"] == ["cancelled", "cancelled"]


def memory_beside_caches(layers: str, steps: int) -> list[int]:
    """Bytes in use beside the caches, every hundred steps of one long row."""
    engine = make_engine(TinyModel(layers=layers, context=steps + 400))
    engine.submit(submit("a", [1] * 300, steps))
    readings = []
    for step in range(steps):
        engine.step()
        engine.drain()
        if step % 100 == 0:
            readings.append(mx.get_active_memory() - engine.counts().cache_bytes)
    return readings


@pytest.mark.parametrize("layers", ["ff", "ss"])
def test_1500_steps_leave_memory_flat(layers):
    """R10: nothing grows with the tokens of a row but its caches."""
    readings = memory_beside_caches(layers, 1500)[4:]
    assert max(readings) - min(readings) < 200_000


def test_5000_steps_leave_memory_flat():
    readings = memory_beside_caches("s", 5000)[10:]
    assert max(readings) - min(readings) < 20_000


def test_500_short_requests_leave_memory_and_the_engine_as_they_were(model):
    engine = make_engine(model)
    readings = []
    for request in range(500):
        engine.submit(submit(str(request), [1 + request % 90, 2, 3], 2))
        run(engine)
        readings.append(mx.get_active_memory())
    assert max(readings[50:]) - readings[49] < 10_000
    assert not engine.sampler._rows

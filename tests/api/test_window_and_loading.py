"""The context window, loading and unloading, and faults: what docs/api.md promises."""

import time

import pytest

from tests.helpers.ask import chat, error, generate, lines
from tests.helpers.echo_runner import say

# --- the window


def turns(count: int) -> list[dict]:
    return [
        {"role": role, "content": f"{role} {index} " + "x" * 20}
        for index in range(count)
        for role in ("user", "assistant")
    ]


def test_a_long_chat_loses_its_oldest_exchanges_and_says_so(http):
    messages = [{"role": "system", "content": "CODEWORD heron"}, *turns(40), {"role": "user", "content": say("ok")}]
    reply = chat(http, messages=messages, options={"num_ctx": 256}).json()
    dropped = reply["truncated"]["dropped_messages"]
    assert reply["message"]["content"] == "ok"
    assert dropped % 2 == 0
    assert 0 < dropped <= 80
    assert reply["prompt_eval_count"] <= 192
    streamed = lines(chat(http, messages=messages, options={"num_ctx": 256}, stream=True))
    assert streamed[-1]["truncated"] == {"dropped_messages": dropped}
    assert all("truncated" not in item for item in streamed[:-1])


def test_truncate_false_is_refused_with_tokens_and_window(http):
    messages = [*turns(40), {"role": "user", "content": say("ok")}]
    message = error(chat(http, messages=messages, options={"num_ctx": 256}, truncate=False))
    assert "window holds 256" in message
    assert "prompt has" in message
    assert "4096" in message


def test_a_chat_whose_last_exchange_does_not_fit_is_refused(http):
    assert "window holds 64" in error(chat(http, "y" * 100, options={"num_ctx": 64}))


def test_a_generate_prompt_that_does_not_fit_is_refused(http):
    message = error(generate(http, "y" * 300, options={"num_ctx": 256}))
    assert "window holds 256" in message
    assert "window holds 256" in error(generate(http, "y" * 300, raw=True, options={"num_ctx": 256}))


def test_a_context_that_is_too_long_loses_its_front_and_says_so(http):
    context = list(b"y" * 390 + b"z" * 10)
    reply = generate(http, say("ok"), context=context, options={"num_ctx": 256}).json()
    assert reply["response"] == "ok"
    dropped = reply["truncated"]["dropped_tokens"]
    assert 200 < dropped < 390
    assert reply["context"][: 400 - dropped] == context[dropped:]
    assert reply["prompt_eval_count"] <= 192
    refused = generate(http, say("ok"), context=list(b"z" * 400), options={"num_ctx": 256}, truncate=False)
    assert "window holds 256" in error(refused)


@pytest.mark.parametrize("options", [{}, {"num_predict": 99}, {"num_predict": 10_000}])
def test_num_ctx_bounds_prompt_and_reply_together(http, options):
    reply = chat(http, say("ab", endless=True), options={"num_ctx": 100} | options).json()
    assert reply["done_reason"] == "length"
    assert reply["prompt_eval_count"] + reply["eval_count"] == 100


def test_the_models_own_limit_bounds_a_larger_num_ctx(http):
    reply = chat(http, say("ab", endless=True, piece=500), options={"num_ctx": 100_000}).json()
    assert reply["prompt_eval_count"] + reply["eval_count"] == 4096


# --- loading, keeping, unloading


def test_an_empty_prompt_loads_and_answers_with_one_object(http):
    for reply in (generate(http, "", stream=True), http.post("/api/chat", json={"model": "tiny"})):
        assert reply.headers["content-type"] == "application/json; charset=utf-8"
        assert (reply.json()["done"], reply.json()["done_reason"]) == (True, "load")
    assert "tiny:latest" in [model["name"] for model in http.get("/api/ps").json()["models"]]


def test_keep_alive_zero_unloads(http):
    generate(http, "")
    assert generate(http, "", keep_alive=0).json()["done_reason"] == "unload"
    assert "tiny:latest" not in [model["name"] for model in http.get("/api/ps").json()["models"]]
    reply = http.post("/api/chat", json={"model": "tiny", "keep_alive": "0"}).json()
    assert reply["done_reason"] == "unload"
    assert reply["message"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("value", [30, "30s", "1h30m", -1, "-1m", 1.5, "300ms"])
def test_keep_alive_takes_every_form(http, value):
    assert chat(http, say("x"), keep_alive=value).json()["message"]["content"] == "x"


@pytest.mark.parametrize("value", ["banana", "300", "-1", True, {}])
def test_a_keep_alive_that_means_nothing_is_refused(http, value):
    error(chat(http, say("x"), keep_alive=value))


def test_keep_alive_shows_as_expiry(http):
    generate(http, "", keep_alive=-1)
    model = next(model for model in http.get("/api/ps").json()["models"] if model["name"] == "tiny:latest")
    assert model["expires_at"] > "2300"
    assert model["context_length"] == 4096
    generate(http, "", keep_alive="5m")


def test_the_first_reply_counts_the_load_and_the_next_does_not(http):
    """R09"""
    generate(http, "", keep_alive=0)
    first, second = (chat(http, say("x")).json() for _ in range(2))
    assert second["load_duration"] < 50_000_000 < first["load_duration"] < first["total_duration"]


@pytest.mark.parametrize("value", [1e30, 10**400, "9999999999h"])
def test_a_keep_alive_of_centuries_does_not_break_the_list_of_running_models(http, value):
    """A11: dates have an end."""
    generate(http, "", keep_alive=value)
    reply = http.get("/api/ps")
    assert reply.status_code == 200
    model = next(model for model in reply.json()["models"] if model["name"] == "tiny:latest")
    assert "2300" < model["expires_at"] < "2400"
    generate(http, "", keep_alive="5m")


# --- faults


def test_a_failed_row_is_an_error_with_its_status(http):
    asked = say("", fail_after=0, error="OutOfMemory", message="needs 2 GiB, has 1 GiB")
    assert error(chat(http, asked), 500) == "needs 2 GiB, has 1 GiB"


def test_a_failure_in_a_stream_is_its_last_line(http):
    objects = lines(chat(http, say("abc", fail_after=2, message="broke"), stream=True))
    assert [item.get("error") for item in objects] == [None, None, "broke"]
    assert not any(item.get("done") for item in objects)


def test_a_crashed_runner_is_an_error_line_and_the_next_request_works(http):
    objects = lines(chat(http, say("abc", crash_after=2), stream=True))
    assert [item["message"]["content"] for item in objects[:-1]] == ["a", "b"]
    assert "scripted crash" in objects[-1]["error"]
    assert chat(http, say("again")).json()["message"]["content"] == "again"


def test_a_template_error_is_a_400_and_loads_nothing(http):
    generate(http, "", keep_alive=0)
    error(generate(http, "x", template="{{ raise_exception('no') }}"))
    assert "tiny:latest" not in [model["name"] for model in http.get("/api/ps").json()["models"]]


def test_keep_alive_zero_with_a_prompt_unloads_after_the_reply(http):
    assert chat(http, say("bye"), keep_alive=0).json()["message"]["content"] == "bye"
    deadline = time.monotonic() + 5
    while "tiny:latest" in [model["name"] for model in http.get("/api/ps").json()["models"]]:
        assert time.monotonic() < deadline
        time.sleep(0.02)

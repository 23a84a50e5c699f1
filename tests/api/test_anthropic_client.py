"""Anthropic's own client against the server: messages, streams, counts and models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.v1 import SCHEMA, TWO_CALLS, anthropic_client, anthropic_options, put_agent

TOOL = {"name": "save_note", "description": "Saves.", "input_schema": SCHEMA}
THINK = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(server) as made:
        yield made


def user(text: str, **manner: object) -> list:
    return [{"role": "user", "content": say(text, **manner)}]


def create(client: anthropic.Anthropic, text: str = "Hello.", **fields: Any) -> Any:
    return client.messages.create(**{"model": "tiny", "max_tokens": 500, "messages": user(text)} | fields)


def test_a_whole_reply(client: anthropic.Anthropic) -> None:
    reply = create(client)
    assert reply.id.startswith("msg_")
    assert [block.text for block in reply.content] == ["Hello."]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.output_tokens == 6
    assert reply._request_id.startswith("req_")


def test_tokens_agree_with_the_count_and_with_the_native_route(client: anthropic.Anthropic, http: httpx.Client) -> None:
    body = {"model": "tiny", "messages": user("Hello.")}
    counted = client.messages.count_tokens(**body).input_tokens
    usage = create(client).usage
    native = http.post("/api/chat", json={**body, "stream": False}).json()["prompt_eval_count"]
    assert counted == usage.input_tokens + usage.cache_read_input_tokens == native


def test_counting_takes_tools_and_system_into_account(server: LiveServer, client: anthropic.Anthropic) -> None:
    body = {"model": put_agent(server), "messages": user("Hello.")}
    plain = client.messages.count_tokens(**body).input_tokens
    assert client.messages.count_tokens(**body, tools=[TOOL]).input_tokens > plain
    assert client.messages.count_tokens(**body, system="Be brief.").input_tokens > plain


def test_the_clients_own_accumulator_rebuilds_the_whole_reply(server: LiveServer, client: anthropic.Anthropic) -> None:
    fields = {"model": put_agent(server), "tools": [TOOL], "thinking": THINK}
    whole = create(client, TWO_CALLS, **fields)
    with client.messages.stream(max_tokens=500, messages=user(TWO_CALLS), **fields) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert streamed.content[0].thinking == whole.content[0].thinking == "Two notes."
    assert streamed.content[0].signature == whole.content[0].signature != ""
    assert streamed.content[1].text == whole.content[1].text == "Saving."
    assert [block.input for block in streamed.content[2:]] == [{"name": "a"}, {"name": "b"}]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert len({block.id for block in streamed.content[2:]}) == 2


async def test_the_asynchronous_client(server: LiveServer) -> None:
    async with anthropic.AsyncAnthropic(**anthropic_options(server)) as client:
        reply = await client.messages.create(model="tiny", max_tokens=50, messages=user("Hello."))
        async with client.messages.stream(model="tiny", max_tokens=50, messages=user("Hello.")) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert reply.content[0].text == text == "Hello."


def test_a_stream_is_named_events_in_order(http: httpx.Client) -> None:
    body = {"model": "tiny", "max_tokens": 50, "messages": user("ab"), "stream": True}
    reply = http.post("/v1/messages", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_thoughts_come_only_when_asked_for(server: LiveServer, client: anthropic.Anthropic) -> None:
    model = put_agent(server)
    assert [block.type for block in create(client, "Plain.", model=model).content] == ["text"]
    reply = create(client, "Hm.</think>Plain.", model=model, thinking={"type": "adaptive"})
    assert [block.type for block in reply.content] == ["thinking", "text"]
    hidden = create(client, "Hm.</think>Plain.", model=model, thinking={"type": "adaptive", "display": "omitted"})
    assert [hidden.content[0].thinking, hidden.content[1].text] == ["", "Plain."]
    assert hidden.content[0].signature


def test_a_model_that_can_not_think_answers_all_the_same(client: anthropic.Anthropic) -> None:
    assert create(client, thinking=THINK, output_config={"effort": "high"}).content[0].text == "Hello."


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    reply = create(client, "alpha beta gamma delta", stop_sequences=["zzz", "beta gamma"])
    assert reply.content[0].text == "alpha "
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "beta gamma")


def test_the_limit_and_the_full_window_are_told_apart(client: anthropic.Anthropic) -> None:
    assert create(client, "abcdef", max_tokens=3).stop_reason == "max_tokens"
    full = create(client, "abcdef" * 20, extra_body={"num_ctx": 200})
    assert full.stop_reason == "model_context_window_exceeded"


def test_calls_and_results_are_accepted_as_history(server: LiveServer, client: anthropic.Anthropic) -> None:
    model = put_agent(server)
    first = create(client, TWO_CALLS, model=model, tools=[TOOL], thinking=THINK)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "saved"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages = [
        *user(TWO_CALLS),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [*results, {"type": "text", "text": say("Done.")}]},
    ]
    assert create(client, model=model, tools=[TOOL], messages=messages).content[0].text == "Done."


def test_only_one_call_is_made_when_they_may_not_be_parallel(server: LiveServer, client: anthropic.Anthropic) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = create(client, TWO_CALLS, model=put_agent(server), tools=[TOOL], thinking=THINK, tool_choice=choice)
    assert [block.input for block in reply.content if block.type == "tool_use"] == [{"name": "a"}]


def test_a_choice_that_names_no_tool_is_refused(server: LiveServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="no function 'other'"):
        create(client, model=put_agent(server), tools=[TOOL], tool_choice={"type": "tool", "name": "other"})


@pytest.mark.parametrize("beginning", ["The answer is (", "<|im_end|>", [{"type": "text", "text": "The answer"}]])
def test_a_reply_may_be_begun(client: anthropic.Anthropic, beginning: Any) -> None:
    text = beginning if isinstance(beginning, str) else beginning[0]["text"]
    body = {"messages": [*user("B)"), {"role": "assistant", "content": beginning}]}
    reply = create(client, **body)
    assert reply.content[0].text == "B)"
    assert reply.usage.input_tokens == create(client, "B)").usage.input_tokens + len(text)
    assert client.messages.count_tokens(model="tiny", **body).input_tokens == reply.usage.input_tokens


def test_a_reply_can_not_be_begun_before_thoughts(server: LiveServer, client: anthropic.Anthropic) -> None:
    body = {"model": put_agent(server), "messages": [*user("B)"), {"role": "assistant", "content": "A"}]}
    assert create(client, **body).content[0].text == "B)"
    with pytest.raises(anthropic.BadRequestError, match="thinks before it answers"):
        create(client, thinking=THINK, **body)


def test_a_begun_reply_holds_text_only_and_forces_no_call(server: LiveServer, client: anthropic.Anthropic) -> None:
    model, call = put_agent(server), {"type": "tool_use", "id": "t", "name": "n", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        create(client, model=model, messages=[*user("x"), {"role": "assistant", "content": [call]}])
    with pytest.raises(anthropic.BadRequestError, match="forced"):
        create(
            client,
            model=model,
            tools=[TOOL],
            tool_choice={"type": "any"},
            messages=[*user("x"), {"role": "assistant", "content": "A"}],
        )


def test_a_begun_reply_is_shortened_and_refused_as_others(client: anthropic.Anthropic) -> None:
    turns = [{"role": role, "content": "x" * 40} for _ in range(9) for role in ("user", "assistant")]
    messages = [*turns, *user("Yes."), {"role": "assistant", "content": "b" * 20}]
    reply = create(client, messages=messages, extra_body={"num_ctx": 300, "truncate": True})
    assert reply.content[0].text == "Yes."
    assert reply.usage.truncated["dropped_messages"] >= 2
    for window, truncate in ((300, False), (16, True)):
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            create(client, messages=messages, extra_body={"num_ctx": window, "truncate": truncate})


def test_a_system_message_may_stand_among_the_messages(client: anthropic.Anthropic) -> None:
    messages = [
        {"role": "user", "content": "Salve."},
        {"role": "assistant", "content": "Salve."},
        {"role": "system", "content": "Reminder: 3 files changed."},
        *user("Done."),
    ]
    assert create(client, system="Be brief.", messages=messages).content[0].text == "Done."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is required and must be positive"),
        ({"messages": []}, "messages is required"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages is required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0..role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "'smell'"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [TOOL]}, "does not support tools"),
        ({"extra_body": {"container": "c"}}, "container is not supported"),
    ],
)
def test_a_request_that_can_not_be_honoured_says_why(client: anthropic.Anthropic, fields: dict, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message):
        create(client, **fields)


def test_errors_have_the_apis_own_shape(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'nothing' not found") as caught:
        create(client, model="nothing")
    body = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == caught.value.request_id
    assert body["request_id"].startswith("req_")


def test_a_prompt_that_does_not_fit_is_told_in_the_words_that_agents_look_for(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        create(client, "x" * 300, extra_body={"num_ctx": 128})


@pytest.mark.parametrize("manner", [{"fail_after": 2}, {"crash_after": 2}])
def test_a_stream_that_breaks_ends_with_an_error(client: anthropic.Anthropic, manner: dict) -> None:
    with (
        pytest.raises(anthropic.APIStatusError, match=r"scripted|ended|crash"),
        client.messages.stream(model="tiny", max_tokens=50, messages=user("abcdef", **manner)) as stream,
    ):
        stream.get_final_message()


def test_models_are_listed_in_its_own_form(client: anthropic.Anthropic) -> None:
    assert "tiny:latest" in [model.id for model in client.models.list()]
    assert client.models.retrieve("tiny").display_name == "tiny"
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert caught.value.body["type"] == "error"

"""OpenAI's own client against `/v1/responses`: whole, streamed and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.v1 import SCHEMA, TWO_CALLS, openai_client, openai_options, put_agent

TOOL = {"type": "function", "name": "save_note", "parameters": SCHEMA, "strict": False}


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def create(client: openai.OpenAI, text: str = "Hello.", **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": say(text)} | fields)


def test_a_whole_response(client: openai.OpenAI) -> None:
    reply = create(client, metadata={"a": "b"}, temperature=0.5, max_output_tokens=99)
    assert reply.id.startswith("resp_")
    assert (reply.status, reply.output_text) == ("completed", "Hello.")
    assert reply.usage.output_tokens == 6
    assert reply.usage.total_tokens == reply.usage.input_tokens + 6
    assert (reply.metadata, reply.temperature, reply.max_output_tokens) == ({"a": "b"}, 0.5, 99)
    assert reply.completed_at is not None


def test_a_response_at_its_limit_is_incomplete(client: openai.OpenAI) -> None:
    reply = create(client, "abcdef", max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    assert reply.output_text == "abc"
    last = list(create(client, "abcdef", max_output_tokens=3, stream=True))[-1]
    assert last.type == "response.incomplete"


def test_thoughts_text_and_calls_are_items_of_their_own(server: LiveServer, client: openai.OpenAI) -> None:
    reply = create(client, TWO_CALLS, model=put_agent(server), tools=[TOOL])
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reply.output[0].summary[0].text == "Two notes."
    assert reply.output_text == "Saving."
    assert [item.arguments for item in reply.output[2:]] == ['{"name": "a"}', '{"name": "b"}']
    assert len({item.call_id for item in reply.output[2:]}) == 2
    assert reply.usage.output_tokens_details.reasoning_tokens > 0


def test_the_stream_has_every_event_and_ends_in_the_whole_response(server: LiveServer, client: openai.OpenAI) -> None:
    events = list(create(client, TWO_CALLS, model=put_agent(server), tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    squeezed = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert squeezed == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output


def test_the_clients_own_accumulator_takes_the_stream(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    with client.responses.stream(model=model, input=say(TWO_CALLS), tools=[TOOL]) as stream:
        for _ in stream:
            continue
        final = stream.get_final_response()
    assert final.output_text == "Saving."


async def test_the_asynchronous_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(**openai_options(server)) as client:
        reply = await create(client)
        events = [event async for event in await create(client, stream=True)]
    assert reply.output_text == events[-1].response.output_text == "Hello."


def test_a_kept_response_is_continued(client: openai.OpenAI) -> None:
    first = create(client, "one")
    again = client.responses.create(model="tiny", input=say("two"), previous_response_id=first.id)
    assert again.output_text == "two"
    assert again.previous_response_id == first.id
    alone = create(client, "two")
    assert again.usage.input_tokens > alone.usage.input_tokens
    third = client.responses.create(model="tiny", input=say("three"), previous_response_id=again.id)
    assert third.usage.input_tokens > again.usage.input_tokens
    items = list(client.responses.input_items.list(third.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant"] * 2 + ["user"]
    assert [item.content[0].text for item in items] == [say("one"), "one", say("two"), "two", say("three")]


@pytest.mark.parametrize("name", [{"a": 1}, [1], 7])
def test_a_response_whose_input_had_an_odd_id_is_continued(client: openai.OpenAI, name: object) -> None:
    first = create(client, input=[{"role": "user", "content": say("one"), "id": name}])
    assert create(client, input=say("two"), previous_response_id=first.id).output_text == "two"


def test_a_stream_is_kept_before_its_last_event(client: openai.OpenAI) -> None:
    for event in create(client, stream=True):
        if event.type == "response.completed":
            assert client.responses.retrieve(event.response.id).output_text == "Hello."
            return
    raise AssertionError("the response was not completed")


def test_kept_responses_are_read_and_forgotten(client: openai.OpenAI) -> None:
    made = create(client)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        create(client, previous_response_id=made.id)


def test_nothing_is_kept_when_it_shall_not_be(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(create(client, store=False).id)


def test_nothing_can_be_cancelled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(create(client).id)


def test_output_items_are_accepted_as_input(server: LiveServer, client: openai.OpenAI) -> None:
    fields = {"model": put_agent(server), "tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
    first = create(client, TWO_CALLS, **fields)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "saved"}
        for item in first.output
        if item.type == "function_call"
    ]
    items = [
        {"role": "user", "content": say(TWO_CALLS)},
        *(item.model_dump() for item in first.output),
        *outputs,
        {"role": "user", "content": [{"type": "input_text", "text": say("</think>Done.")}]},
    ]
    assert client.responses.create(input=items, **fields).output_text == "Done."


def test_a_namespace_is_expanded_and_named_in_the_call(server: LiveServer, client: openai.OpenAI) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "image_generation"},
        {"type": "namespace", "name": "files", "description": "Files.", "tools": [{**TOOL, "name": "read"}]},
        TOOL,
    ]
    text = '</think><tool_call>{"name": "files.read", "arguments": {"name": "a"}}</tool_call>'
    reply = create(client, text, model=put_agent(server), tools=tools)
    call = next(item for item in reply.output if item.type == "function_call")
    assert (call.namespace, call.name) == ("files", "read")


def test_log_probabilities_come_with_the_text(client: openai.OpenAI) -> None:
    reply = create(client, "ab", include=["message.output_text.logprobs"], top_logprobs=1)
    assert [item.token for item in reply.output[0].content[0].logprobs] == ["a", "b"]
    events = create(client, "ab", include=["message.output_text.logprobs"], stream=True)
    streamed = [item.token for event in events if event.type.endswith("text.delta") for item in event.logprobs]
    assert streamed == ["a", "b"]


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input=say("Hello."))
    assert counted.input_tokens == create(client).usage.input_tokens


def test_a_response_that_breaks_has_failed(client: openai.OpenAI) -> None:
    body = {"model": "tiny", "input": say("abcdef", fail_after=2)}
    events = list(client.responses.create(**body, stream=True))
    assert events[-1].type == "response.failed"
    assert "scripted failure" in events[-1].response.error.message
    with pytest.raises(openai.InternalServerError, match="scripted failure"):
        client.responses.create(**body)


def test_a_long_conversation_is_cut_only_on_demand(client: openai.OpenAI) -> None:
    turns = [{"role": role, "content": "x" * 40} for _ in range(9) for role in ("user", "assistant")]
    items = [*turns, {"role": "user", "content": say("Yes.")}]
    body = {"model": "tiny", "input": items, "extra_body": {"num_ctx": 300}}
    with pytest.raises(openai.BadRequestError, match="300"):
        client.responses.create(**body)
    reply = client.responses.create(**body, truncation="auto")
    assert reply.output_text == "Yes."
    assert reply.usage.truncated["dropped_messages"] >= 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "dance"}]}, "unknown input item type: 'dance'"),
        ({"input": [{"content": "x"}]}, "missing required 'type'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "no item has the id 'msg_1'"),
        ({"input": [{"type": "item_reference", "id": {"of": [1]}}]}, "no item has the id"),
        ({"include": ["everything"]}, "include"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"tools": [TOOL]}, "does not support tools"),
        ({"reasoning": {"effort": "banana"}}, r"reasoning\.effort"),
    ],
)
def test_a_request_that_can_not_be_honoured_says_why(client: openai.OpenAI, fields: dict, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        create(client, **fields)

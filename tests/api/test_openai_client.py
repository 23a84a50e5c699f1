"""OpenAI's own client against the server: chat completions, completions, models and embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.v1 import NOTE, TWO_CALLS, openai_client, openai_options, put_agent


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def user(text: str, **manner: object) -> list:
    return [{"role": "user", "content": say(text, **manner)}]


def test_a_whole_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=user("Hello."))
    assert reply.id.startswith("chatcmpl-")
    assert reply.choices[0].message.content == "Hello."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == 6
    assert reply.usage.prompt_tokens + 6 == reply.usage.total_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply._request_id.startswith("req_")


def test_ids_are_never_the_same(client: openai.OpenAI) -> None:
    replies = [client.chat.completions.create(model="tiny", messages=user("x")) for _ in range(3)]
    assert len({reply.id for reply in replies}) == 3


def test_a_stream_adds_up_and_ends_once(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=user("Hello."), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello."
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_when_asked_for(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model="tiny", messages=user("Hi"), stream=True, stream_options=options)
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_empty_reply_is_a_reply(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="tiny", messages=user("")).choices[0].message.content == ""
    chunks = list(client.chat.completions.create(model="tiny", messages=user(""), stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"


async def test_the_asynchronous_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(**openai_options(server)) as client:
        reply = await client.chat.completions.create(model="tiny", messages=user("Hello."))
        stream = await client.chat.completions.create(model="tiny", messages=user("Hello."), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert reply.choices[0].message.content == text == "Hello."


def test_calls_have_indices_and_ids_of_their_own(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    chunks = list(client.chat.completions.create(model=model, messages=user(TWO_CALLS), tools=[NOTE], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [call.function.arguments for call in calls] == ['{"name": "a"}', '{"name": "b"}']
    assert len({call.id for call in calls}) == 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]


def test_thoughts_content_and_calls_are_apart(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    reply = client.chat.completions.create(model=model, messages=user(TWO_CALLS), tools=[NOTE])
    message = reply.choices[0].message
    assert message.content == "Saving."
    assert message.reasoning == message.reasoning_content == "Two notes."
    assert [call.function.name for call in message.tool_calls] == ["save_note", "save_note"]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens


def test_the_clients_own_accumulator_rebuilds_the_whole_reply(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    with client.chat.completions.stream(model=model, messages=user(TWO_CALLS), tools=[NOTE]) as stream:
        for _ in stream:
            continue
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Saving."
    assert [call.function.arguments for call in message.tool_calls] == ['{"name": "a"}', '{"name": "b"}']


def test_a_reply_with_calls_is_accepted_as_history(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    first = client.chat.completions.create(model=model, messages=user(TWO_CALLS), tools=[NOTE]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": say("Done.")} for call in first.tool_calls]
    history = [*user(TWO_CALLS), first.model_dump(), *results]
    reply = client.chat.completions.create(model=model, messages=history, tools=[NOTE], reasoning_effort="none")
    assert reply.choices[0].message.content == "Done."


def test_only_one_call_is_made_when_they_may_not_be_parallel(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    reply = client.chat.completions.create(
        model=model, messages=user(TWO_CALLS), tools=[NOTE], parallel_tool_calls=False
    )
    assert [call.function.arguments for call in reply.choices[0].message.tool_calls] == ['{"name": "a"}']


def test_no_tools_are_offered_when_none_may_be_chosen(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    with_tools = client.chat.completions.create(model=model, messages=user("x"), tools=[NOTE])
    reply = client.chat.completions.create(model=model, messages=user("x"), tools=[NOTE], tool_choice="none")
    assert reply.usage.prompt_tokens < with_tools.usage.prompt_tokens


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("maybe", "tool_choice must be"),
        ({"type": "function", "function": {"name": "other"}}, "no function 'other'"),
        ({"type": "custom", "custom": {"name": "save_note"}}, "'custom' is not supported"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [NOTE]}}, "mode must be"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "a call needs tools"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(
    server: LiveServer, client: openai.OpenAI, choice: object, words: str
) -> None:
    model = put_agent(server)
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model=model, messages=user("x"), tools=[NOTE], tool_choice=choice)


def test_allowed_tools_narrow_the_offer(server: LiveServer, client: openai.OpenAI) -> None:
    model = put_agent(server)
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOTE]}}
    both = client.chat.completions.create(model=model, messages=user("x"), tools=[NOTE, other])
    one = client.chat.completions.create(model=model, messages=user("x"), tools=[NOTE, other], tool_choice=choice)
    alone = client.chat.completions.create(model=model, messages=user("x"), tools=[NOTE])
    assert one.usage.prompt_tokens == alone.usage.prompt_tokens < both.usage.prompt_tokens


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_hold(client: openai.OpenAI, field: str) -> None:
    reply = client.chat.completions.create(model="tiny", messages=user("abcdef"), **{field: 3})
    assert reply.choices[0].message.content == "abc"
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stop", ["beta gamma", ["", "beta gamma", "zzz"]])
def test_a_stop_string_cuts_the_reply(client: openai.OpenAI, stop: object) -> None:
    reply = client.chat.completions.create(model="tiny", messages=user("alpha beta gamma delta"), stop=stop)
    assert reply.choices[0].message.content == "alpha "
    assert reply.choices[0].finish_reason == "stop"


def test_log_probabilities_have_a_token_each(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=user("aé"), logprobs=True)
    items = reply.choices[0].logprobs.content
    assert [item.logprob for item in items] == [-0.5] * 3
    assert bytes(byte for item in items for byte in item.bytes).decode() == "aé"
    chunks = client.chat.completions.create(model="tiny", messages=user("aé"), logprobs=True, stream=True)
    streamed = [item for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content]
    assert streamed == items


def test_alternatives_need_log_probabilities(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(model="tiny", messages=user("x"), top_logprobs=2)


@pytest.mark.parametrize("effort", ["none", "minimal", "LOW", "medium", "high", "xhigh", "max"])
def test_every_effort_is_taken_by_every_model(server: LiveServer, client: openai.OpenAI, effort: str) -> None:
    model = put_agent(server)
    for name in (model, "tiny"):
        reply = client.chat.completions.create(model=name, messages=user("x"), reasoning_effort=effort)
        assert reply.choices[0].finish_reason == "stop"


def test_an_effort_that_means_nothing_is_refused_with_the_words_there_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match='"minimal", "low", "medium", "high"'):
        client.chat.completions.create(model="tiny", messages=user("x"), reasoning_effort="banana")


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"extra_body": {"reasoning": {"effort": "none"}}}])
def test_thinking_can_be_switched_off(server: LiveServer, client: openai.OpenAI, fields: dict) -> None:
    reply = client.chat.completions.create(model=put_agent(server), messages=user("Plain."), **fields)
    assert reply.choices[0].message.content == "Plain."


@pytest.mark.parametrize("kind", ["yaml_please", 5])
def test_a_made_up_format_is_refused_with_those_there_are(client: openai.OpenAI, kind: object) -> None:
    with pytest.raises(openai.BadRequestError, match=r"response_format.type must be .*json_schema"):
        client.chat.completions.create(model="tiny", messages=user("x"), response_format={"type": kind})


def test_text_is_a_format(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=user("x"), response_format={"type": "text"})
    assert reply.choices[0].message.content == "x"


def test_extension_fields_hold(server: LiveServer, client: openai.OpenAI, http: httpx.Client) -> None:
    extra = {"keep_alive": "1h30m", "options": {"num_ctx": 1024, "top_k": 3}}
    client.chat.completions.create(model="tiny", messages=user("x"), extra_body=extra)
    shown = next(model for model in http.get("/api/ps").json()["models"] if model["name"] == "tiny:latest")
    assert shown["context_length"] >= 1024
    with pytest.raises(openai.BadRequestError, match="num_ctx"):
        client.chat.completions.create(model="tiny", messages=user("x"), extra_body={"num_ctx": 0})
    with pytest.raises(openai.BadRequestError, match="banana"):
        client.chat.completions.create(model="tiny", messages=user("x"), extra_body={"keep_alive": "banana"})
    with pytest.raises(openai.BadRequestError, match="unknown option"):
        client.chat.completions.create(model="tiny", messages=user("x"), extra_body={"options": {"banana": 1}})


def test_a_window_that_is_asked_for_is_enforced(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="num_ctx") as caught:
        client.chat.completions.create(model="tiny", messages=user("x" * 400), extra_body={"num_ctx": 128})
    assert caught.value.code == "context_length_exceeded"


def test_a_long_conversation_is_shortened_only_on_demand_and_says_so(client: openai.OpenAI) -> None:
    turns = [turn for number in range(9) for turn in (*user(f"{number}" * 40), {"role": "assistant", "content": "k"})]
    messages = [*turns, *user("Yes.")]
    extra = {"num_ctx": 300, "truncate": True}
    reply = client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
    assert reply.choices[0].message.content == "Yes."
    assert reply.usage.truncated["dropped_messages"] >= 2
    with pytest.raises(openai.BadRequestError, match="300"):
        client.chat.completions.create(model="tiny", messages=messages, extra_body={"num_ctx": 300})


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'nothing' not found") as caught:
        client.chat.completions.create(model="nothing", messages=user("x"))
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError, match="model 'nothing' not found"):
        client.chat.completions.create(model="nothing", messages=user("x"), stream=True)
    with pytest.raises(openai.BadRequestError, match="messages is empty"):
        client.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(openai.NotFoundError, match="/v1/audio/speech is not served"):
        client.post("/audio/speech", cast_to=object)


@pytest.mark.parametrize("manner", [{"fail_after": 2}, {"crash_after": 2}])
def test_a_stream_that_breaks_ends_with_an_error(client: openai.OpenAI, manner: dict) -> None:
    with pytest.raises(openai.APIError, match=r"scripted|ended|crash"):
        list(client.chat.completions.create(model="tiny", messages=user("abcdef", **manner), stream=True))


def test_a_whole_reply_that_breaks_is_a_500(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="scripted failure"):
        client.chat.completions.create(model="tiny", messages=user("abcdef", fail_after=2))


# --- completions


def test_a_completion_whole_and_streamed(server: LiveServer, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=say("Salve."))
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("Salve.", "stop")
    assert reply.usage.completion_tokens == 6
    options = {"include_usage": True}
    # The client's type of a piece knows no null as its reason, which the API itself sends.
    with openai.OpenAI(**openai_options(server) | {"_strict_response_validation": False}) as lenient:
        made = lenient.completions.create(model="tiny", prompt=say("Salve."), stream=True, stream_options=options)
        chunks = list(made)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Salve."
    assert chunks[-1].usage.completion_tokens == 6


def test_a_completion_of_tokens_or_raw_text_knows_no_template(client: openai.OpenAI) -> None:
    text = say("Salve.")
    raw = client.completions.create(model="tiny", prompt=text, extra_body={"raw": True})
    tokens = client.completions.create(model="tiny", prompt=list(text.encode()))
    assert raw.choices[0].text == tokens.choices[0].text == "Salve."
    assert raw.usage.prompt_tokens == tokens.usage.prompt_tokens == len(text)


def test_tokens_that_the_model_does_not_have_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="9999999"):
        client.completions.create(model="tiny", prompt=[9999999])


def test_several_prompts_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2 prompts"):
        client.completions.create(model="tiny", prompt=["a", "b"])


def test_a_gap_is_filled_by_models_that_can(client: openai.OpenAI) -> None:
    text = say("middle")
    assert client.completions.create(model="coder", prompt="a", suffix=text).choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="does not support insert"):
        client.completions.create(model="tiny", prompt="a", suffix="b")


def test_the_older_log_probabilities(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=say("abc"), logprobs=0)
    found = reply.choices[0].logprobs
    assert found.tokens == ["a", "b", "c"]
    assert found.text_offset == [0, 1, 2]
    assert found.token_logprobs == [-0.5] * 3


# --- models and embeddings


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed["tiny:latest"].owned_by == "library"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.models.retrieve("nothing/such")

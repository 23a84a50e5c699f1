"""The asynchronous clients, whole and streamed, over every kind of reply: text, thoughts, calls, figures, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import ollama
import openai
import pydantic
import pytest

from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.v1 import NOTE, SCHEMA, TWO_CALLS, anthropic_options, openai_options, put_agent

CLAUDES: Any = {"name": "save_note", "description": "Saves.", "input_schema": SCHEMA}
FLAT: Any = {"type": "function", "name": "save_note", "parameters": SCHEMA, "strict": False}
ARGUMENTS = ['{"name": "a"}', '{"name": "b"}']


@pytest.fixture
def agent(server: LiveServer) -> str:
    return put_agent(server)


@pytest.fixture
async def chat(server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(**openai_options(server)) as client:
        yield client


@pytest.fixture
async def claude(server: LiveServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(**anthropic_options(server)) as client:
        yield client


@pytest.fixture
async def native(server: LiveServer) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=server.url, verify=False) as client:
        yield client


def user(text: str, **manner: object) -> Any:
    return [{"role": "user", "content": say(text, **manner)}]


async def broken(stream: Any, kind: type[Exception]) -> tuple[list[Any], Exception]:
    """What came of a stream before its error, and that."""
    found, pieces = [], aiter(stream)
    while True:
        try:
            found.append(await anext(pieces))
        except kind as error:
            return found, error


# --- OpenAI's


async def test_chat_with_thoughts_and_calls(chat: openai.AsyncOpenAI, agent: str) -> None:
    fields: Any = {"model": agent, "messages": user(TWO_CALLS), "tools": [NOTE]}
    whole = (await chat.chat.completions.create(**fields)).choices[0]
    async with chat.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            continue
        streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert choice.message.content == "Saving."
        assert choice.message.reasoning == "Two notes."  # type: ignore[union-attr]
        assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS  # type: ignore[union-attr]
        assert choice.finish_reason == "tool_calls"


async def test_figures_and_log_probabilities(chat: openai.AsyncOpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": user("aé", cached_tokens=5), "logprobs": True}
    whole = await chat.chat.completions.create(**fields)
    stream = await chat.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 5
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [item for choice in choices if choice.logprobs for item in choice.logprobs.content] == (
        whole.choices[0].logprobs.content
    )


async def test_responses_with_thoughts_and_calls(chat: openai.AsyncOpenAI, agent: str) -> None:
    fields: Any = {"model": agent, "input": say(TWO_CALLS), "tools": [FLAT]}
    whole = await chat.responses.create(**fields)
    async with chat.responses.stream(**fields) as stream:
        async for _ in stream:
            continue
        streamed = await stream.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output_text == "Saving."
        assert [item.arguments for item in response.output[2:]] == ARGUMENTS
    assert whole.usage == streamed.usage
    kept = await chat.responses.retrieve(whole.id)
    assert kept.output == whole.output
    await chat.responses.delete(whole.id)


async def test_openais_errors(chat: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'nobody' not found"):
        await chat.chat.completions.create(model="nobody", messages=user("x"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await chat.responses.create(model="tiny", input="x", temperature="hot")  # type: ignore[call-overload]
    with pytest.raises(openai.InternalServerError, match="scripted failure"):
        await chat.completions.create(model="tiny", prompt=say("abc", fail_after=1))
    stream = await chat.chat.completions.create(model="tiny", messages=user("abc", fail_after=1), stream=True)
    chunks, error = await broken(stream, openai.APIError)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a"
    assert "scripted failure" in str(error)


async def test_models_and_completions(chat: openai.AsyncOpenAI) -> None:
    assert "tiny:latest" in [model.id async for model in chat.models.list()]
    assert (await chat.completions.create(model="tiny", prompt=say("Salve."))).choices[0].text == "Salve."


class Point(pydantic.BaseModel):
    x: int
    label: str


async def test_replies_become_objects_of_the_clients_types(chat: openai.AsyncOpenAI) -> None:
    written = '{"x": 4, "label": "é"}'
    parsed = await chat.chat.completions.parse(model="tiny", messages=user(written), response_format=Point)
    assert parsed.choices[0].message.parsed == Point(x=4, label="é")
    response = await chat.responses.parse(model="tiny", input=say(written), text_format=Point)
    assert response.output_parsed == Point(x=4, label="é")


async def test_headers_and_bodies_can_be_read_raw(chat: openai.AsyncOpenAI) -> None:
    raw = await chat.chat.completions.with_raw_response.create(model="tiny", messages=user("x"))
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.parse().choices[0].message.content == "x"
    async with chat.chat.completions.with_streaming_response.create(model="tiny", messages=user("x")) as reply:
        assert (await reply.json())["choices"][0]["message"]["content"] == "x"


async def test_many_at_once_get_their_own_words(chat: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    async def one(number: int) -> str:
        if number % 2:
            reply = await chat.chat.completions.create(model="tiny", messages=user(f"number {number}"))
            return reply.choices[0].message.content or ""
        message = await claude.messages.create(model="tiny", max_tokens=50, messages=user(f"number {number}"))
        return message.content[0].text  # type: ignore[union-attr]

    assert await asyncio.gather(*map(one, range(12))) == [f"number {number}" for number in range(12)]


# --- Anthropic's


async def test_messages_with_thoughts_and_calls(claude: anthropic.AsyncAnthropic, agent: str) -> None:
    fields: Any = {
        "model": agent,
        "max_tokens": 500,
        "messages": user(TWO_CALLS),
        "tools": [CLAUDES],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    whole = await claude.messages.create(**fields)
    async with claude.messages.stream(**fields) as stream:
        events = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[1].text == "Saving."
        assert [block.input for block in message.content[2:]] == [{"name": "a"}, {"name": "b"}]
        assert message.stop_reason == "tool_use"
    assert events.count("content_block_stop") == 4
    assert whole.usage.output_tokens == streamed.usage.output_tokens


async def test_the_beta_surface_and_the_counts(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.beta.messages.create(model="tiny", max_tokens=50, messages=user("Hello."))
    assert message.content[0].text == "Hello."  # type: ignore[union-attr]
    counted = await claude.beta.messages.count_tokens(model="tiny", messages=user("Hello."))
    assert counted.input_tokens == message.usage.input_tokens
    assert "tiny:latest" in [model.id async for model in claude.models.list()]
    assert (await claude.models.retrieve("tiny")).id == "tiny"


async def test_anthropics_errors(claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'nobody' not found") as caught:
        await claude.messages.create(model="nobody", max_tokens=5, messages=user("x"))
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await claude.messages.create(model="tiny", max_tokens=0, messages=user("x"))
    with pytest.raises(anthropic.InternalServerError, match="scripted failure"):
        await claude.messages.create(model="tiny", max_tokens=5, messages=user("abc", fail_after=1))
    async with claude.messages.stream(model="tiny", max_tokens=5, messages=user("abc", fail_after=1)) as stream:
        pieces, error = await broken(stream.text_stream, anthropic.APIStatusError)
    assert "".join(pieces) == "a"
    assert "scripted failure" in str(error)


# --- Ollama's


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: another
    """
    return a + b


async def test_native_chat_with_thoughts_and_calls(native: ollama.AsyncClient, agent: str) -> None:
    whole = (await native.chat(agent, user(TWO_CALLS), tools=[NOTE, add])).message
    parts = [part async for part in await native.chat(agent, user(TWO_CALLS), tools=[NOTE, add], stream=True)]
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert [call.function.arguments for call in calls] == [{"name": "a"}, {"name": "b"}]
    assert whole.tool_calls == calls
    assert whole.thinking == "".join(part.message.thinking or "" for part in parts) == "Two notes."
    assert whole.content == "".join(part.message.content or "" for part in parts) == "Saving."


async def test_native_log_probabilities(native: ollama.AsyncClient) -> None:
    whole = await native.generate("tiny", say("ab"), logprobs=True)
    parts = [part async for part in await native.generate("tiny", say("ab"), logprobs=True, stream=True)]
    assert [item.token for item in whole.logprobs] == ["a", "b"]
    assert [item for part in parts for item in part.logprobs or []] == whole.logprobs


async def test_a_native_reply_fits_a_schema_of_the_client(native: ollama.AsyncClient) -> None:
    reply = await native.chat("tiny", user('{"x": 1, "label": "a"}'), format=Point.model_json_schema())
    assert Point.model_validate_json(reply.message.content) == Point(x=1, label="a")


async def test_native_errors(native: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError, match="model 'nobody' not found") as caught:
        await native.chat("nobody", user("x"))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="unknown option"):
        await native.generate("tiny", "x", options={"banana": 1})
    parts, error = await broken(await native.chat("tiny", user("abc", fail_after=1), stream=True), ollama.ResponseError)
    assert [part.message.content for part in parts] == ["a"]
    assert "scripted failure" in str(error)


async def test_native_models_are_made_from_uploads(native: ollama.AsyncClient, tmp_path: Any) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"x" * 100_000)
    assert (await native.create_blob(path)).startswith("sha256:")
    assert (await native.create(model="async-made", from_="tiny", system="Sing.")).status == "success"
    statuses = [part.status async for part in await native.create(model="async-made", from_="tiny", stream=True)]
    assert statuses[-1] == "success"
    await native.delete("async-made")


# --- embeddings


async def test_every_client_gets_the_same_vectors(embedder: LiveServer) -> None:
    texts = ["hello world", "near"]
    async with ollama.AsyncClient(host=embedder.url, verify=False) as client:
        found = await client.embed("mean", texts)
        older = await client.embeddings("mean", "near")
    # The client asks for base64 and decodes it behind its strict check, which knows numbers only.
    async with openai.AsyncOpenAI(**openai_options(embedder) | {"_strict_response_validation": False}) as other:
        vectors = await other.embeddings.create(model="mean", input=texts)
        narrow = await other.embeddings.create(model="mean", input=texts, dimensions=8, encoding_format="float")
    assert [item.embedding for item in vectors.data] == [pytest.approx(list(row), abs=1e-6) for row in found.embeddings]
    assert vectors.usage.prompt_tokens == found.prompt_eval_count
    assert {len(item.embedding) for item in narrow.data} == {8}
    assert len(older.embedding) == len(found.embeddings[0])

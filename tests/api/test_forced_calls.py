"""Calls that must be made: a real runner with a small random model, at a high temperature, makes them all the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import jsonschema
import numpy as np
import openai
import pytest

from arriero.create.create import create
from arriero.create.request import CreateRequest
from tests.helpers.checkpoint_folder import tensors, upload, write_folder
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.stored_model import SPECIAL, byte_tokenizer
from tests.helpers.v1 import AGENT, anthropic_client, openai_client

PARAMETERS = {
    "type": "object",
    "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["°C", '"F"']}},
    "required": ["level", "unit"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [
    {"type": "function", "function": {"name": "set_level", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "parameters": EMPTY}},
]
LLAMA = AGENT.replace(" in <tool_call> tags", ' as {"name": …, "parameters": …} after <|python_tag|>').replace(
    "<tool_call>", "<|python_tag|>"
)
TAGS = dict.fromkeys(("tagged", "bare", "odd"), ("<think>", "</think>"))
TAGS["gemma"] = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
ASKED: Any = [{"role": "user", "content": "Hi"}]
HOT: dict[str, Any] = {"temperature": 1.5, "max_tokens": 3000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`tagged` writes calls in tags, `bare` as bare objects, `odd` in a way that has no grammar."""
    folder = tmp_path_factory.mktemp("forced")
    held = tensors()
    table = held["model.embed_tokens.weight"]
    held["model.embed_tokens.weight"] = np.concatenate([table, table[:5]])
    odd = AGENT.replace("<tool_call>", "<|tool_call_start|>")
    gemma = (
        AGENT.replace("<tool_call>", "<|tool_call>").replace("<think>", "<|channel>").replace("</think>", "<channel|>")
    )
    with live_server(folder, [sys.executable, "-m", "arriero.runner"], max_loaded_models=16) as running:
        for name, template in (("tagged", AGENT), ("bare", LLAMA), ("gemma", gemma), ("odd", odd)):
            made = write_folder(
                folder / name,
                {"model.safetensors": held},
                config={"vocab_size": 264, "max_position_embeddings": 8192},
            )
            (made / "tokenizer.json").write_text(byte_tokenizer((*SPECIAL, *TAGS[name])).to_str())
            (made / "chat_template.jinja").write_text(template)
            create(running.store, CreateRequest(model=name, files=upload(running.store, made)), lambda status: None)
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made.with_options(timeout=60)


def checked(name: str, arguments: Any) -> str:
    """The name of a call whose arguments fit."""
    jsonschema.validate(arguments, {"set_level": PARAMETERS, "stop": EMPTY}[name])
    return name


@pytest.mark.parametrize("model", ["tagged", "bare", "gemma"])
@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_call_is_made_when_it_must_be(client: openai.OpenAI, model: str, effort: str) -> None:
    def reply(seed: int) -> Any:
        return client.chat.completions.create(
            model=model,
            messages=ASKED,
            tools=FUNCTIONS,
            tool_choice="required",
            seed=seed,
            reasoning_effort=effort,
            **HOT,
        ).choices[0]

    names = set()
    with ThreadPoolExecutor(4) as pool:  # rows of one batch
        choices = list(pool.map(reply, range(4)))
    for choice in choices:
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert bool(getattr(choice.message, "reasoning", "")) == (effort == "high")
        names |= {
            checked(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls
        }
    assert names <= {"set_level", "stop"}


@pytest.mark.parametrize("model", ["tagged", "bare"])
def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI, model: str) -> None:
    named = {"type": "function", "function": {"name": "set_level"}}
    chunks = client.chat.completions.create(
        model=model, messages=ASKED, tools=FUNCTIONS, tool_choice=named, stream=True, parallel_tool_calls=False, **HOT
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [checked(call.function.name, json.loads(call.function.arguments)) for call in calls] == ["set_level"]


def test_a_response_must_call_too(client: openai.OpenAI) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
    reply = client.responses.create(
        model="tagged",
        input="Hi",
        tools=flat,
        tool_choice={"type": "function", "name": "set_level"},
        reasoning={"effort": "none"},
        temperature=1.5,
    )
    calls = [item for item in reply.output if item.type == "function_call"]
    assert calls
    assert {checked(call.name, json.loads(call.arguments)) for call in calls} == {"set_level"}
    assert len(calls) == len(reply.output)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_level"}])
def test_a_message_must_call_too(server: LiveServer, choice: Any) -> None:
    tools: Any = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in FUNCTIONS]
    with anthropic_client(server) as client:
        reply = client.messages.create(
            model="tagged",
            messages=ASKED,
            tools=tools,
            tool_choice=choice,
            thinking={"type": "disabled"},
            max_tokens=3000,
            extra_body={"temperature": 1.5},
        )
    assert reply.stop_reason == "tool_use"
    assert {block.type for block in reply.content} == {"tool_use"}
    assert {checked(block.name, block.input) for block in reply.content} <= {"set_level", "stop"}


def test_a_schema_that_can_not_be_enforced_is_any_object_unless_it_is_strict(client: openai.OpenAI) -> None:
    odd: dict[str, Any] = {"name": "odd", "parameters": {"type": "object", "not": {}}}
    fields: Any = {"model": "tagged", "messages": ASKED, "tool_choice": "required", "reasoning_effort": "none"}
    body = {**fields, "tools": [{"type": "function", "function": odd}], "max_tokens": 20}
    assert client.chat.completions.create(**body).choices[0].finish_reason in ("length", "tool_calls")
    body["tools"] = [{"type": "function", "function": odd | {"strict": True}}]
    with pytest.raises(openai.BadRequestError, match=r"'odd': .*'not'"):
        client.chat.completions.create(**body)


@pytest.mark.parametrize("route", ["/api/chat", "/v1/chat/completions"])
def test_a_strict_schema_that_can_not_be_enforced_is_refused_where_calls_are_free(
    server: LiveServer, route: str
) -> None:
    odd = {"name": "odd", "strict": True, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    body = {"model": "gemma", "messages": ASKED, "tools": [{"type": "function", "function": odd}], "stream": True}
    with httpx.Client(base_url=server.url, trust_env=False, verify=False) as http:
        reply = http.post(route, json=body)
    assert reply.status_code == 400
    assert "'odd'" in reply.text
    assert "'not' is not supported" in reply.text


def test_what_can_not_be_enforced_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="a call can't be enforced"):
        client.chat.completions.create(model="odd", messages=ASKED, tools=FUNCTIONS, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="a call needs tools"):
        client.chat.completions.create(model="tagged", messages=ASKED, tool_choice="required")


def test_a_forced_call_counts_as_any_prompt_does(server: LiveServer) -> None:
    body = {"model": "tagged", "messages": ASKED, "tools": [{"name": "stop", "input_schema": EMPTY}]}
    with httpx.Client(base_url=server.url, trust_env=False, verify=False) as http:
        free = http.post("/v1/messages/count_tokens", json=body).json()
        forced = http.post("/v1/messages/count_tokens", json=body | {"tool_choice": {"type": "any"}}).json()
    assert free == forced
    assert free["input_tokens"] > 20
    assert isinstance(anthropic.types.MessageTokensCount(**free), anthropic.types.MessageTokensCount)

"""Bodies: what is forgiven and what is a 400 that names the field."""

import msgspec
import pytest
from starlette.requests import Request

from arriero.errors import InvalidRequest
from arriero.server.errors import BodyTooLarge
from arriero.server.schemas.ollama import ChatRequest, CreateRequest, GenerateRequest, local_timestamp, timestamp
from arriero.server.schemas.wire import parse, read_body


def chat(text: str) -> ChatRequest:
    return parse(text.encode(), ChatRequest)


def test_keys_match_whatever_their_case_at_every_level_of_the_protocol():
    request = chat('{"Model":"m","MESSAGES":[{"Role":"user","Content":"hi","Tool_Calls":[{"Function":{"NAME":"f"}}]}]}')
    assert (request.model, request.messages[0].content) == ("m", "hi")
    assert request.messages[0].tool_calls[0].function.name == "f"


def test_keys_inside_free_form_objects_are_left_alone():
    request = chat(
        '{"tools":[{"type":"function","function":{"Name":"X"}}],'
        '"messages":[{"tool_calls":[{"function":{"name":"f","arguments":{"B":null,"a":1}}}]}]}'
    )
    assert request.tools == [{"type": "function", "function": {"Name": "X"}}]
    assert list(request.messages[0].tool_calls[0].function.arguments.items()) == [("B", None), ("a", 1)]


def test_unknown_fields_are_ignored():
    assert chat('{"model":"m","new_field":{"deep":[1]}}').model == "m"


@pytest.mark.parametrize("kind", [ChatRequest, GenerateRequest, CreateRequest])
def test_a_null_is_the_same_as_an_absent_field(kind):
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    absent = parse(b'{"extra":1}', kind)
    for name in fields:
        assert parse(msgspec.json.encode({name: None}), kind) == absent
    assert parse(msgspec.json.encode(dict.fromkeys(fields)), kind) == absent


def test_a_null_inside_a_message_is_the_same_as_an_absent_field():
    request = chat('{"messages":[{"role":"assistant","content":null,"tool_calls":null,"images":null}]}')
    assert request.messages[0].content == ""


def test_an_empty_body_is_said_to_be_missing():
    with pytest.raises(InvalidRequest, match=r"^missing request body$"):
        chat("")


@pytest.mark.parametrize(
    "body", ["{", "x", '{"model":"m"', "[1]", '"text"', "null", "7", '{"model":"\\ud800', '{"a":1e999}']
)
def test_what_is_not_a_json_object_is_a_400(body):
    with pytest.raises(InvalidRequest):
        chat(body)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"model":5}', "model"),
        ('{"messages":{}}', "messages"),
        ('{"messages":[{"content":["x"]}]}', r"content"),
        ('{"top_logprobs":"3"}', "top_logprobs"),
        ('{"stream":"no"}', "stream"),
        ('{"options":[]}', "options"),
    ],
)
def test_a_wrong_type_is_a_400_that_names_the_field(body, place):
    with pytest.raises(InvalidRequest, match=place):
        chat(body)


def test_deeply_nested_json_is_a_400_not_a_crash():
    with pytest.raises(InvalidRequest):
        chat('{"tools":' + "[" * 100_000 + "]" * 100_000 + "}")


@pytest.mark.parametrize("text", ["\\ud83d", "a\\udc00b", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair_becomes_a_replacement_character(text):
    content = chat('{"messages":[{"content":"TEXT"}]}'.replace("TEXT", text)).messages[0].content
    assert "\ufffd" in content
    content.encode()


def test_a_whole_surrogate_pair_is_its_character():
    assert chat('{"model":"\\ud83d\\ude00 \\\\ud83d"}').model == "😀 \\ud83d"


def test_a_license_may_be_a_text_or_a_list():
    assert parse(b'{"license":["a","b"]}', CreateRequest).license == ["a", "b"]
    assert parse(b'{"license":"a","from":"base"}', CreateRequest).from_ == "base"


def test_created_at_has_nine_digits_and_z():
    assert timestamp(1_787_306_400_123_456_789) == "2026-08-21T10:00:00.123456789Z"


def test_local_times_carry_an_offset():
    assert local_timestamp(1_787_306_400.5)[19:29] == ".500000000"


async def test_a_body_that_is_announced_too_large_is_refused_before_any_of_it_is_read():
    async def never():
        raise AssertionError("the body was read")

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"11")]}
    with pytest.raises(BodyTooLarge, match="has 11 bytes; at most 10 are taken"):
        await read_body(Request(scope, never), limit=10)


async def test_a_body_that_grows_too_large_is_refused_where_it_does():
    async def receive():
        return {"type": "http.request", "body": b"x" * 6, "more_body": True}

    with pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), limit=10)

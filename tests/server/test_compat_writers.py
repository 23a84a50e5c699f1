"""No order of pieces makes an illegal stream, and every stream adds up to its whole reply (A01, A02)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from arriero.chat.messages import ToolCall
from arriero.server.compat.anthropic_writer import MessageEvents
from arriero.server.compat.openai_writer import ChatChunks, TextChunks, whole_chat, whole_text
from arriero.server.compat.responses_writer import ResponseEvents
from arriero.server.completion import Final, Prompt
from arriero.server.transcript import Delta

TEXT = st.text(max_size=4)
CALLS = st.builds(
    ToolCall,
    name=st.sampled_from(["a", "ns.b"]),
    arguments=st.sampled_from([{}, {"x": 1}, '{"y": "é"}', "no JSON", ""]),
)
DELTAS = st.lists(
    st.one_of(
        st.builds(Delta, content=TEXT),
        st.builds(Delta, thinking=TEXT),
        st.builds(Delta, tool_calls=st.lists(CALLS, max_size=3)),
        st.builds(Delta, content=TEXT, thinking=TEXT, tool_calls=st.lists(CALLS, max_size=2)),
    ),
    max_size=12,
)
MESSAGE_EVENT: Any = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: Any = TypeAdapter(ResponseStreamEvent)
REASONS = st.sampled_from(["stop", "length"])


def final(reason: Any = "stop", **fields: Any) -> Final:
    return Final(
        **{
            "reason": reason,
            "cached_tokens": 3,
            "generated_tokens": 7,
            "thinking_tokens": 2,
            "total_ns": 1,
            "load_ns": 1,
            "prefill_ns": 1,
            "decode_ns": 1,
            "prompt": Prompt(tokens=[1] * 10),
            "tokens": [],
        }
        | fields
    )


def joined(deltas: list[Delta], field: str) -> str:
    return "".join(getattr(delta, field) for delta in deltas)


def calls_of(deltas: list[Delta], parallel: bool) -> list[ToolCall]:
    calls = [call for delta in deltas for call in delta.tool_calls]
    return calls if parallel else calls[:1]


def plain(value: Any) -> Any:
    """A value after the way over the wire."""
    return msgspec.json.decode(msgspec.json.encode(value))


# --- Anthropic


def check_message(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The grammar of the stream; the blocks that it builds."""
    for event in events:
        MESSAGE_EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    fields = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("thinking", "signature"),
        "input_json_delta": ("tool_use", "partial_json"),
    }
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            is_open = True
            blocks.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            kind, field = fields[event["delta"]["type"]]
            assert blocks[-1]["type"] == kind
            blocks[-1][field] += event["delta"][field]
        else:
            assert event["type"] == "content_block_stop"
            assert is_open
            assert event["index"] == len(blocks) - 1
            is_open = False
    assert not is_open
    for block in blocks:
        text = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = msgspec.json.decode(text) if text else {}
    return blocks


@given(DELTAS, REASONS, st.booleans())
def test_any_pieces_make_a_legal_message(deltas: list[Delta], reason: str, parallel: bool) -> None:
    writer = MessageEvents("m", parallel=parallel)
    events = writer.start(10)
    for delta in deltas:
        events += writer.start(10) + writer.feed(delta)
    events = plain(events + writer.end(final(reason), 7))
    blocks = check_message(events)
    assert blocks == plain(writer.message["content"])
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == joined(deltas, "content")
    assert "".join(block["thinking"] for block in blocks if block["type"] == "thinking") == joined(deltas, "thinking")
    uses = [block for block in blocks if block["type"] == "tool_use"]
    assert [block["name"] for block in uses] == [call.name for call in calls_of(deltas, parallel)]
    assert all(block["signature"] for block in blocks if block["type"] == "thinking")
    assert len({block["id"] for block in uses}) == len(uses)
    expected = "max_tokens" if reason == "length" else ("tool_use" if uses else "end_turn")
    assert writer.message["stop_reason"] == events[-2]["delta"]["stop_reason"] == expected
    assert events[-2]["usage"]["input_tokens"] + events[-2]["usage"]["cache_read_input_tokens"] == 10


def test_text_thoughts_text_call_text_are_five_blocks() -> None:
    writer = MessageEvents("m")
    events = writer.start(1)
    for delta in (
        Delta(content="---\n"),
        Delta(thinking="Hm."),
        Delta(content="So"),
        Delta(content="."),
        Delta(tool_calls=[ToolCall(name="a")]),
        Delta(content="Done."),
    ):
        events += writer.feed(delta)
    blocks = check_message(plain(events + writer.end(final(), 7)))
    assert [block["type"] for block in blocks] == ["text", "thinking", "text", "tool_use", "text"]


@pytest.mark.parametrize(
    ("limit", "looped", "reason"),
    [(7, False, "max_tokens"), (8, False, "model_context_window_exceeded"), (8, True, "max_tokens")],
)
def test_a_cut_reply_says_what_cut_it(limit: int, looped: bool, reason: str) -> None:
    writer = MessageEvents("m")
    writer.start(1)
    # Agents shorten their history when they hear of a full window: a reply that went round in circles filled none.
    writer.end(final("length", looped=looped), limit)
    assert writer.message["stop_reason"] == reason


def test_a_message_can_not_go_on_after_its_end() -> None:
    writer = MessageEvents("m")
    with pytest.raises(RuntimeError):
        writer.feed(Delta(content="x"))
    writer.start(1)
    writer.end(final(), 7)
    with pytest.raises(RuntimeError):
        writer.feed(Delta(content="x"))
    with pytest.raises(RuntimeError):
        writer.end(final(), 7)
    assert writer.start(1) == []


# --- Responses


def check_response(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The grammar of the stream; the items that it builds."""
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete", "response.failed")
    items: list[dict[str, Any]] = []
    is_open, text, part_open = False, "", False
    for event in events[2:-1]:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(items)
            items.append(event["item"])
            is_open, text = True, ""
            continue
        assert is_open
        assert event["output_index"] == len(items) - 1
        if name == "output_item.done":
            assert not part_open
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
            is_open = False
            continue
        assert event["item_id"] == items[-1]["id"]
        kind = {"output_text": "message", "content_part": "message", "function_call_arguments": "function_call"}
        assert items[-1]["type"] == kind.get(name.partition(".")[0], "reasoning")
        if name.endswith("part.added"):
            part_open = True
        elif name.endswith("part.done"):
            assert event["part"]["text"] == text
            part_open = False
        elif name.endswith(".delta"):
            assert part_open or name.startswith("function")
            text += event["delta"]
        else:
            assert event.get("text", event.get("arguments")) == text
    assert not is_open
    return items


@given(DELTAS, REASONS, st.booleans(), st.booleans())
def test_any_pieces_make_a_legal_response(deltas: list[Delta], reason: str, parallel: bool, seal: bool) -> None:
    echoed = {"model": "m", "tools": [], "tool_choice": "auto", "parallel_tool_calls": parallel}
    writer = ResponseEvents(echoed, parallel=parallel, seal_thoughts=seal, namespaces=frozenset({"ns"}))
    events = writer.start()
    for delta in deltas:
        events += writer.start() + writer.feed(delta)
    events = plain(events + writer.end(final(reason)))
    items = check_response(events)
    assert items == events[-1]["response"]["output"] == plain(writer.response["output"])
    texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    thoughts = [item["summary"][0]["text"] for item in items if item["type"] == "reasoning"]
    assert "".join(texts) == joined(deltas, "content")
    assert "".join(thoughts) == joined(deltas, "thinking")
    made = [item for item in items if item["type"] == "function_call"]
    assert [item["arguments"] for item in made] == [call.text() for call in calls_of(deltas, parallel)]
    assert len({item["call_id"] for item in made}) == len(made)
    assert len({item["id"] for item in items}) == len(items)
    assert events[-1]["response"]["status"] == {"stop": "completed", "length": "incomplete"}[reason]


@given(DELTAS)
def test_a_response_that_breaks_is_legal_too(deltas: list[Delta]) -> None:
    echoed = {"model": "m", "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    writer = ResponseEvents(echoed)
    events = writer.start()
    for delta in deltas:
        events += writer.feed(delta)
    events = plain(events + writer.fail("broken"))
    check_response(events)
    assert events[-1]["type"] == "response.failed"
    assert writer.fail("again") == []


# --- chat completions


@given(DELTAS, REASONS, st.booleans(), st.booleans())
def test_any_pieces_make_a_legal_chat_completion(deltas: list[Delta], reason: str, parallel: bool, usage: bool) -> None:
    writer = ChatChunks("m", usage=usage, parallel=parallel)
    chunks = [chunk for delta in deltas for chunk in writer.feed(delta)] + writer.end(final(reason))
    wire = plain(chunks)
    for chunk in wire:
        ChatCompletionChunk.model_validate(chunk)
    choices = [choice for chunk in wire for choice in chunk["choices"]]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert [bool(chunk["choices"]) for chunk in wire] == [True] * (len(wire) - usage) + [False] * usage
    assert all(("usage" in chunk) == usage for chunk in wire)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert [call["function"]["arguments"] for call in calls] == [call.text() for call in calls_of(deltas, parallel)]
    message = plain(whole_chat(chunks))["choices"][0]["message"]
    assert (message["content"] or "") == joined(deltas, "content")
    assert message.get("reasoning", "") == joined(deltas, "thinking")
    assert message.get("tool_calls", []) == calls
    expected = "length" if reason == "length" else ("tool_calls" if calls else "stop")
    assert choices[-1]["finish_reason"] == expected


def test_a_chat_completion_can_not_go_on_after_its_end() -> None:
    writer = ChatChunks("m")
    writer.end(final())
    with pytest.raises(RuntimeError):
        writer.feed(Delta(content="x"))
    with pytest.raises(RuntimeError):
        writer.end(final())


@given(DELTAS, REASONS)
def test_a_completion_holds_the_text_without_thoughts(deltas: list[Delta], reason: str) -> None:
    writer = TextChunks("m", usage=True)
    chunks = [chunk for delta in deltas for chunk in writer.feed(delta)] + writer.end(final(reason))
    whole = plain(whole_text(chunks))
    text = "".join(delta.content + "".join(call.text() for call in delta.tool_calls) for delta in deltas)
    assert whole["choices"][0] == {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
    assert whole["usage"]["total_tokens"] == 17

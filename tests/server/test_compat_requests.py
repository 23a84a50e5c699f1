"""Messages, blocks and items of the /v1 routes → the neutral conversation."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from arriero.chat.messages import Message, ToolCall
from arriero.errors import InvalidRequest, NotFound, UnsupportedFeature
from arriero.server.compat import anthropic_request, openai_request, responses_request
from arriero.server.compat.prepare import stops_of, think_of_effort, token_limit
from arriero.server.compat.responses_store import ResponsesStore
from arriero.server.schemas.anthropic import CountRequest, Turn
from arriero.server.schemas.openai import ChatMessage
from arriero.server.schemas.wire import parse
from tests.helpers.v1 import NOTE

PICTURE = base64.b64encode(b"picture").decode()
OTHER = base64.b64encode(b"other").decode()
DATA_URL = f"data:image/png;base64,{PICTURE}"


class Seeing:
    """A model that takes everything."""

    asked = "m"

    def can(self, _capability: str) -> bool:
        return True


MODEL: Any = Seeing()


def chat(*messages: dict[str, Any]) -> list[Message]:
    return openai_request.messages_of(MODEL, [msgspec.convert(message, ChatMessage) for message in messages])


def blocks(*turns: dict[str, Any]) -> list[Message]:
    return anthropic_request.messages_of(MODEL, [msgspec.convert(turn, Turn) for turn in turns])


def items(*found: dict[str, Any]) -> list[Message]:
    return responses_request.messages_of(MODEL, found)


# --- contents


def test_parts_are_one_message_with_images_at_their_places() -> None:
    text = {"type": "text", "text": "ab"}
    image = {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}
    [message] = chat({"role": "user", "content": [image, text, text, image, {"type": "text", "text": "c"}]})
    assert message == Message(role="user", content="ab\nabc", images=[b"picture"] * 2, places=[0, 5])
    [block] = blocks(
        {"role": "user", "content": [text, {"type": "image", "source": {"type": "base64", "data": OTHER}}]}
    )
    assert (block.content, block.images, block.places) == ("ab", [b"other"], [2])
    [item] = items({"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL}]})
    assert (item.images, item.places) == ([b"picture"], [0])


@pytest.mark.parametrize("url", ["http://example.org/a.png", "https://example.org/a.png"])
def test_nothing_is_fetched(url: str) -> None:
    with pytest.raises(UnsupportedFeature, match="not fetched"):
        chat({"role": "user", "content": [{"type": "image_url", "image_url": url}]})
    with pytest.raises(UnsupportedFeature, match="not fetched"):
        blocks({"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]})
    with pytest.raises(UnsupportedFeature, match="not fetched"):
        items({"role": "user", "content": [{"type": "input_image", "image_url": url}]})


def test_the_models_own_text_stays_what_it_was() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert chat({"role": "assistant", "content": parts})[0].content == "abc"
    assert blocks({"role": "assistant", "content": parts}, {"role": "user", "content": "x"})[0].content == "abc"


# --- chat completions


def test_a_result_is_named_after_its_call_and_keeps_its_id() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"dir": "/"}'}}
    messages = chat(
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Look."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a b"}]},
    )
    assert messages == [
        Message(
            role="assistant",
            thinking="Look.",
            tool_calls=[ToolCall(name="ls", arguments='{"dir": "/"}', id="c1")],
        ),
        Message(role="tool", content="a b", tool_name="ls", tool_call_id="c1"),
    ]


def test_the_older_form_of_calls_is_read() -> None:
    messages = chat(
        {"role": "assistant", "function_call": {"name": "ls", "arguments": "{}"}},
        {"role": "function", "name": "ls", "content": "a"},
    )
    assert messages[0].tool_calls == [ToolCall(name="ls", arguments="{}")]
    assert messages[1] == Message(role="tool", content="a", tool_name="ls")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_are_read_by_every_name(field: str) -> None:
    assert chat({"role": "assistant", "content": "x", field: "Hm."})[0].thinking == "Hm."


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "file", "file": {}}, "'file'"),
        ({"type": "smell"}, "smell"),
        ({"type": "text", "text": 5}, r"messages\[0\]\.content\[0\]\.text must be a string"),
        ({"type": "image_url", "image_url": {}}, "image_url"),
        ({"type": "image_url", "image_url": "data:image/png,xx"}, "base64"),
        (7, "must be an object"),
    ],
)
def test_a_part_that_can_not_be_taken_is_named(part: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        chat({"role": "user", "content": [part]})


def test_formats_are_told_apart() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert openai_request.format_of(given, "f") == schema
    assert openai_request.format_of({"type": "json_schema", "name": "n", "schema": schema}, "f") == schema
    assert openai_request.format_of({"type": "json_object"}, "f") == "json"
    assert openai_request.format_of({"type": "text"}, "f") is None
    for broken in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 1}}, {}, "xml"):
        with pytest.raises(InvalidRequest, match=r"^f"):
            openai_request.format_of(broken, "f")


# --- Anthropic


def test_results_come_before_the_text_of_their_turn() -> None:
    messages = blocks(
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"dir": "/"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "So?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a b"}]},
            ],
        },
    )
    assert messages == [
        Message(
            role="assistant",
            content="Looking.",
            thinking="Look.",
            tool_calls=[ToolCall(name="ls", arguments={"dir": "/"}, id="t1")],
        ),
        Message(role="tool", content="a b", tool_name="ls", tool_call_id="t1"),
        Message(role="user", content="So?"),
    ]


def test_a_failed_tool_without_a_word_is_told() -> None:
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    assert [message.content for message in blocks({"role": "user", "content": [failed]})] == ["The tool failed."]


def test_documents_of_text_and_search_results_are_text() -> None:
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
    }
    found = {"type": "search_result", "title": "U", "source": "s", "content": [{"type": "text", "text": "hit"}]}
    assert blocks({"role": "user", "content": [document, found]})[0].content == "T\nbody\nU\nhit"
    with pytest.raises(UnsupportedFeature, match="plain text"):
        blocks({"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]})


def test_a_system_message_stays_where_it_is() -> None:
    roles = [
        message.role for message in blocks(*({"role": role, "content": "x"} for role in ("user", "system", "user")))
    ]
    assert roles == ["user", "system", "user"]


def test_a_line_that_changes_with_every_request_is_no_prompt() -> None:
    texts = ["x-anthropic-billing-header: a=1; b=2;", "You are an agent.", "Be brief."]
    given = [{"type": "text", "text": text} for text in texts]
    assert anthropic_request.system_of(given) == "You are an agent.\n\nBe brief."
    assert anthropic_request.system_of("Be brief.") == "Be brief."
    assert anthropic_request.system_of(None) is anthropic_request.system_of([]) is None


@pytest.mark.parametrize(
    ("body", "think"),
    [
        (b'{"x":1}', False),
        (b'{"thinking":{"type":"disabled"},"output_config":{"effort":"high"}}', False),
        (b'{"thinking":{"type":"enabled","budget_tokens":9}}', True),
        (b'{"thinking":{"type":"adaptive"}}', True),
        (b'{"thinking":{"type":"adaptive"},"output_config":{"effort":"xhigh"}}', "max"),
        (b'{"output_config":{"effort":"low"}}', "low"),
    ],
)
def test_how_hard_to_think(body: bytes, think: Any) -> None:
    assert anthropic_request.think_of(parse(body, CountRequest)) == think


# --- responses


def test_items_of_one_turn_are_one_message() -> None:
    messages = items(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "And more."},
        {"type": "function_call", "call_id": "c2", "name": "cat", "namespace": "fs", "arguments": '{"f": 1}'},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"role": "user", "content": "So?"},
    )
    calls = [ToolCall(name="ls", arguments="{}", id="c1"), ToolCall(name="fs.cat", arguments='{"f": 1}', id="c2")]
    assert messages == [
        Message(role="assistant", content="Looking.\nAnd more.", thinking="Look.", tool_calls=calls),
        Message(role="tool", content="two", tool_name="fs.cat", tool_call_id="c2"),
        Message(role="tool", content="one", tool_name="ls", tool_call_id="c1"),
        Message(role="user", content="So?"),
    ]


def test_two_texts_in_a_row_are_two_messages() -> None:
    said = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert [message.content for message in items(*said)] == ["a", "b"]


def test_thoughts_at_the_end_are_a_message_of_their_own() -> None:
    assert items({"role": "user", "content": "x"}, {"type": "reasoning", "content": [{"text": "Hm."}]})[1] == Message(
        role="assistant", thinking="Hm."
    )


@pytest.mark.parametrize(("sealed", "thought"), [("arriero:Hm.", "Hm."), ("gAAAAB", ""), (None, "")])
def test_only_our_own_sealed_thoughts_are_opened(sealed: Any, thought: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    assert items(item, {"role": "assistant", "content": "x"})[0].thinking == thought


def test_tools_are_brought_to_one_form() -> None:
    flat = {"type": "function", "name": "ls", "description": "d", "parameters": {"type": "object"}, "strict": True}
    nested = {"type": "namespace", "name": "fs", "tools": [flat]}
    function = {"name": "ls", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert responses_request.definitions_of([flat, nested, NOTE, {"type": "web_search"}]) == [
        {"type": "function", "function": function},
        {"type": "function", "function": function | {"name": "fs.ls"}},
        NOTE,
        {"type": "web_search"},
    ]


def test_a_listing_shows_parts_and_ids() -> None:
    shown = responses_request.listed({"role": "user", "content": "x"}, 3)
    assert shown["id"] == "item_3"
    assert shown["content"] == [{"type": "input_text", "text": "x"}]
    assert responses_request.listed({"id": "own", "type": "reasoning"}, 0)["id"] == "own"


# --- fields of all routes


@pytest.mark.parametrize(
    ("word", "think"),
    [("none", False), ("Minimal", "low"), ("medium", "medium"), ("ULTRA", "max"), (True, True), (None, None)],
)
def test_words_of_effort(word: Any, think: Any) -> None:
    assert think_of_effort(word, "f") == think


def test_limits_and_stops_are_checked() -> None:
    assert [token_limit(value, "f") for value in (None, -1, 5)] == [None, -1, 5]
    for value in (0, -2):
        with pytest.raises(InvalidRequest, match=r"^f must be at least 1"):
            token_limit(value, "f")
    assert stops_of("a", "f") == ["a"]
    for broken in (5, [5], {}):
        with pytest.raises(InvalidRequest, match=r"^f must be"):
            stops_of(broken, "f")


# --- what is kept


def test_the_store_forgets_the_least_recently_used() -> None:
    store = ResponsesStore(max_responses=2)
    for name in "ab":
        store.put({"id": name}, [])
    assert store.get("a").response == {"id": "a"}
    store.put({"id": "c"}, [{"x": 1}])
    assert store.get("c").input == [{"x": 1}]
    with pytest.raises(NotFound, match="'b' not found"):
        store.get("b")
    store.delete("a")
    with pytest.raises(NotFound):
        store.delete("a")


def test_the_store_holds_so_many_bytes() -> None:
    store = ResponsesStore(max_bytes=300)
    for name in "abc":
        store.put({"id": name}, [{"text": "x" * 80}])
    with pytest.raises(NotFound):
        store.get("a")
    assert store.get("c").response == {"id": "c"}
    store.put({"id": "large"}, [{"text": "x" * 400}])
    with pytest.raises(NotFound):
        store.get("large")
    assert store.get("c").response == {"id": "c"}

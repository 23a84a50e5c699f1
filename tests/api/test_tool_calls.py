"""Tool calls through the server: streamed and whole, and back as history (A01, A13, C06)."""

from __future__ import annotations

import httpx

from tests.helpers.ask import chat, lines
from tests.helpers.echo_runner import say
from tests.helpers.live_server import LiveServer
from tests.helpers.stored_model import CHATML, put_model

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }} in <tool_call> tags<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    "{# </think> #}"
)
NOTE = {
    "type": "function",
    "function": {"name": "save_note", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
TWO = (
    'Two notes.</think>\nSaving.\n<tool_call>{"name": "save_note", "arguments": {"name": "a"}}</tool_call>\n'
    '<tool_call>{"name": "save_note", "arguments": {"name": "b"}}</tool_call>'
)


def ask(server: LiveServer, http: httpx.Client, text: str = TWO, **fields: object) -> httpx.Response:
    put_model(server.store, "caller", template=TEMPLATE)
    return chat(http, say(text), model="caller", tools=[NOTE], **fields)


def test_parallel_calls_have_indices_and_ids_of_their_own(server: LiveServer, http: httpx.Client) -> None:
    calls = [call for line in lines(ask(server, http, stream=True)) for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert [call["function"]["arguments"] for call in calls] == [{"name": "a"}, {"name": "b"}]
    assert len({call["id"] for call in calls}) == 2


def test_a_stream_with_calls_adds_up_to_the_whole_reply(server: LiveServer, http: httpx.Client) -> None:
    whole = ask(server, http).json()
    streamed = lines(ask(server, http, stream=True))
    for field, nothing in (("content", ""), ("thinking", ""), ("tool_calls", [])):
        joined = nothing
        for line in streamed:
            joined = joined + line["message"].get(field, nothing)
        for call in [*whole["message"]["tool_calls"], *(joined if field == "tool_calls" else [])]:
            call.pop("id", None)
        assert joined == whole["message"][field]
    assert streamed[-1]["done_reason"] == whole["done_reason"] == "stop"
    assert [whole["message"][field] for field in ("thinking", "content")] == ["Two notes.", "Saving."]


def test_a_call_that_can_not_be_read_is_content(server: LiveServer, http: httpx.Client) -> None:
    broken = '</think><tool_call>{"name": oops}</tool_call>'
    message = ask(server, http, broken).json()["message"]
    assert message["content"] == broken.removeprefix("</think>")
    assert "tool_calls" not in message


def test_a_reply_with_calls_is_accepted_as_history(server: LiveServer, http: httpx.Client) -> None:
    message = ask(server, http).json()["message"]
    results = [
        {"role": "tool", "tool_name": "save_note", "tool_call_id": call["id"], "content": "saved"}
        for call in message["tool_calls"]
    ]
    history = [{"role": "user", "content": "q"}, message, *results]
    body = {"model": "caller", "messages": history, "tools": [NOTE], "_debug_render_only": True, "stream": False}
    rendered = http.post("/api/chat", json=body).json()["_debug_info"]["rendered_template"]
    assert '<tool_call>{"name": "save_note", "arguments": {"name": "a"}}</tool_call>' in rendered


def test_a_template_without_calls_is_told_by_its_capabilities(server: LiveServer, http: httpx.Client) -> None:
    put_model(server.store, "silent", template=CHATML)
    assert chat(http, "x", model="silent", tools=[NOTE]).status_code == 400

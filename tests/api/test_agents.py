"""Bodies in the shapes that coding agents send: each is answered, and the model reads what was meant, word for word."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.test_images import FIRST
from tests.helpers.echo_runner import echo_command, say
from tests.helpers.live_server import LiveServer, live_server
from tests.helpers.scripted_runner import Script, received
from tests.helpers.seeing_server import OPTIONS, Seeing
from tests.helpers.stored_model import SPECIAL, byte_tokenizer, put_model
from tests.helpers.v1 import SCHEMA

TEMPLATE = (
    "{% if tools %}<|im_start|>tools{% for t in tools %} {{ t.function.name }}{% endfor %} in <tool_call> tags"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|im_end|>")
DONE = say("</think>Done.")


class Read:
    """A server whose runner notes what it is given."""

    def __init__(self, server: LiveServer, log: Path) -> None:
        self.log = log
        self.http = httpx.Client(base_url=server.url, timeout=20, trust_env=False, verify=False)

    def post(
        self, path: str, body: dict[str, Any], special: tuple[str, ...] = SPECIAL, **headers: str
    ) -> httpx.Response:
        """The reply to a body; `prompt` and `submitted` are then what the model got."""
        reply = self.http.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        self.submitted = [message for message in received(self.log) if message["type"] == "submit"][-1]
        self.prompt: str = byte_tokenizer(special).decode(self.submitted["tokens"], skip_special_tokens=False)
        return reply


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    folder = tmp_path_factory.mktemp("agents")
    with live_server(folder, echo_command(folder, Script(log=str(folder / "log")))) as running:
        put_model(running.store, "agent", template=TEMPLATE)
        put_model(running.store, "coder", special=FIM)
        made = Read(running, folder / "log")
        yield made
        made.http.close()


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream of events."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def turns(*parts: tuple[str, str]) -> str:
    """What the template makes of turns, up to where the model thinks."""
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in parts) + "<|im_start|>assistant\n<think>\n"
    )


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def offered(*names: str) -> str:
    return f"<|im_start|>tools {' '.join(names)} in <tool_call> tags<|im_end|>\n"


# --- Claude Code


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "agent",
    "max_tokens": 300,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1_session_2"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: v=1; n=31;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "Work in /src.", **CACHED},
    ],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": SCHEMA, "eager_input_streaming": True},
        {"name": "Bash", "description": "Runs.", "input_schema": SCHEMA, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "tool_choice": None,
    "stop_sequences": None,
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<reminder>…</reminder>"}, {"type": "text", "text": "Go."}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Read first.", "signature": "abc"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"name": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1: pass", "is_error": False},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": None, "is_error": True, **CACHED},
            ],
        },
        {"role": "system", "content": "3 files changed."},
        {"role": "user", "content": [{"type": "text", "text": DONE, **CACHED}]},
    ],
}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "x-api-key": "x",
    "x-app": "cli",
}


def test_claude_code(read: Read) -> None:
    reply = read.post("/v1/messages?beta=true", CLAUDE, **CLAUDE_HEADERS)
    assert read.prompt == offered("Read", "Bash") + turns(
        ("system", "You are an agent.\n\nWork in /src."),
        ("user", "<reminder>…</reminder>\nGo."),
        ("assistant", "<think>Read first.</think>Reading." + called("Read", '{"name": "a.py"}') + called("Bash", "{}")),
        ("tool", "1: pass"),
        ("tool", "The tool failed."),
        ("system", "3 files changed."),
        ("user", DONE),
    )
    assert read.submitted["max_tokens"] == 300
    assert read.submitted["sampling"]["temperature"] == 1
    found = events(reply)
    assert (
        "".join(event["delta"].get("text", "") for event in found if event["type"] == "content_block_delta") == "Done."
    )
    assert found[-1]["type"] == "message_stop"
    counted = {name: CLAUDE[name] for name in ("model", "system", "tools", "messages", "thinking", "tool_choice")}
    count = read.http.post("/v1/messages/count_tokens?beta=true", json=counted, headers=CLAUDE_HEADERS).json()
    assert count == {"input_tokens": len(read.submitted["tokens"])}


# --- Codex


def test_codex(read: Read) -> None:
    function = {"type": "function", "strict": False, "parameters": SCHEMA}
    body = {
        "model": "agent",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: on."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAAopaque"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py","metadata":{}}'},
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "call_2"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
            {"type": "local_shell_call", "call_id": "call_3", "status": "completed", "action": {"type": "exec"}},
            {"type": "function_call_output", "call_id": "call_3", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": DONE}]},
        ],
        "tools": [
            {**function, "name": "shell", "description": "Runs."},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
            },
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
            {"type": "namespace", "name": "mcp__files", "tools": [{**function, "name": "read"}]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"a": "b"},
        "service_tier": None,
    }
    reply = read.post("/v1/responses", body)
    assert read.prompt == offered("shell", "mcp__files.read") + turns(
        ("system", "You are an agent."),
        ("developer", "Sandbox: on."),
        ("user", "Go."),
        ("assistant", "Looking." + called("shell", '{"command": ["ls"]}')),
        ("tool", '{"output":"a.py","metadata":{}}'),
        ("assistant", called("apply_patch", '{"input": "*** Begin"}')),
        ("tool", "Success."),
        ("assistant", called("local_shell", '{"type": "exec"}')),
        ("tool", "ok"),
        ("user", DONE),
    )
    done = events(reply)[-1]
    assert (done["type"], done["response"]["output"][-1]["content"][0]["text"]) == ("response.completed", "Done.")


# --- agents of chat completions


def test_cline(read: Read) -> None:
    task = "<task>\nGo.\n</task>"
    body = {
        "model": "agent",
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": task, **CACHED},
                    {"type": "text", "text": "<environment_details>\n# Mode\nACT\n</environment_details>"},
                ],
            },
            {
                "role": "assistant",
                "content": "<read_file>\n<path>a.py</path>\n</read_file>",
                "reasoning_content": "Read.",
            },
            {"role": "user", "content": [{"type": "text", "text": "[read_file for 'a.py'] Result:"}]},
            {"role": "user", "content": [{"type": "text", "text": DONE}]},
        ],
        "temperature": 0,
        "max_tokens": None,
        "reasoning_effort": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": None,
        "tool_choice": None,
        "parallel_tool_calls": None,
    }
    reply = read.post("/v1/chat/completions", body)
    assert read.prompt == turns(
        ("system", "You are Cline."),
        ("user", f"{task}\n<environment_details>\n# Mode\nACT\n</environment_details>"),
        ("assistant", "<think>Read.</think><read_file>\n<path>a.py</path>\n</read_file>"),
        ("user", "[read_file for 'a.py'] Result:"),
        ("user", DONE),
    )
    assert read.submitted["sampling"]["temperature"] == 0
    found = events(reply)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found[:-1]) == "Done."
    assert found[-1]["usage"]["prompt_tokens"] == len(read.submitted["tokens"])
    assert reply.text.endswith("data: [DONE]\n\n")


def test_opencode(read: Read) -> None:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"filePath": {"type": "string", "description": "The path."}, "limit": {"type": "number"}},
        "required": ["filePath"],
        "additionalProperties": False,
    }
    body = {
        "model": "agent",
        "max_tokens": 32000,
        "temperature": 0,
        "top_p": 1,
        "messages": [
            {"role": "system", "content": "You are opencode."},
            {"role": "system", "content": "Directory: /src"},
            {"role": "user", "content": [{"type": "text", "text": "Go."}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Read.",
                "reasoning_details": [{"type": "reasoning.text", "text": "Read."}],
                "refusal": None,
                "function_call": None,
                "audio": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "index": 0,
                        "function": {"name": "read", "arguments": '{"filePath":"a.py"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "<file>pass</file>"}]},
            {"role": "user", "content": DONE, "name": "u"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": parameters}},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "stop": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "logit_bias": None,
        "response_format": None,
        "seed": None,
        "user": "u",
        "prompt_cache_key": "k",
    }
    reply = read.post("/v1/chat/completions", body)
    assert read.prompt == offered("read") + turns(
        ("system", "You are opencode."),
        ("system", "Directory: /src"),
        ("user", "Go."),
        ("assistant", "<think>Read.</think>" + called("read", '{"filePath": "a.py"}')),
        ("tool", "<file>pass</file>"),
        ("user", DONE),
    )
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in events(reply)[:-1]) == "Done."


def test_continue_talks_by_the_native_api(read: Read) -> None:
    body = {
        "model": "agent",
        "messages": [
            {"role": "system", "content": "Agent mode."},
            {"role": "user", "content": "Go.", "images": None},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "builtin_read_file", "arguments": {"filepath": "a.py"}}}],
            },
            {"role": "tool", "content": "pass", "tool_name": None},
            {"role": "user", "content": DONE},
        ],
        "tools": [{"type": "function", "function": {"name": "builtin_read_file", "parameters": SCHEMA}}],
        "options": {
            "num_predict": 90,
            "num_ctx": 4096,
            "stop": ["<|im_start|>", "<|im_end|>"],
            "temperature": None,
            "top_p": None,
            "top_k": None,
            "mirostat": None,
            "num_thread": None,
            "use_mmap": None,
            "num_gpu": None,
        },
        "keep_alive": 1800,
        "stream": True,
        "think": None,
    }
    reply = read.post("/api/chat", body)
    assert read.prompt == offered("builtin_read_file") + turns(
        ("system", "Agent mode."),
        ("user", "Go."),
        ("assistant", called("builtin_read_file", '{"filepath": "a.py"}')),
        ("tool", "pass"),
        ("user", DONE),
    )
    assert read.submitted["max_tokens"] == 90
    objects = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(item["message"]["content"] for item in objects) == "Done."


def test_continue_completes_in_the_middle_of_a_file(read: Read) -> None:
    prompt = f"<|fim_prefix|>def f():\n    <|fim_suffix|>\n    return x<|fim_middle|>{say('x = 1')}"
    body = {
        "model": "coder",
        "raw": True,
        "prompt": prompt,
        "options": {"num_predict": 64, "temperature": 0.01, "stop": ["<|fim_prefix|>", "\n\n"]},
        "keep_alive": 1800,
    }
    reply = read.post("/api/generate", body, special=FIM)
    assert "".join(json.loads(line)["response"] for line in reply.text.splitlines()) == "x = 1"
    assert read.prompt == prompt
    # As control tokens, not as text.
    assert sum(token > 255 for token in read.submitted["tokens"]) == 3


def test_an_agent_sends_a_picture_of_the_screen(seeing: Seeing) -> None:
    data = base64.b64encode(FIRST).decode()
    native = {"role": "user", "content": "what?", "images": [data]}
    asked = {"model": "seeing", "options": OPTIONS, "stream": False, "messages": [native]}
    expected = seeing.http.post("/api/chat", json=asked).json()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "what?"},
    ]
    chat = seeing.http.post(
        "/v1/chat/completions",
        json={"model": "seeing", "options": OPTIONS, "messages": [{"role": "user", "content": parts, "name": None}]},
    ).json()
    assert chat["choices"][0]["message"]["content"] == expected["message"]["content"]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source, **CACHED}, {"type": "text", "text": "what?", **CACHED}]
    message = seeing.http.post(
        "/v1/messages",
        json={
            "model": "seeing",
            "options": OPTIONS,
            "max_tokens": OPTIONS["num_predict"],
            "messages": [{"role": "user", "content": blocks}],
        },
    ).json()
    assert message["content"][0]["text"] == expected["message"]["content"]

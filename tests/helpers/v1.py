"""The clients of OpenAI and Anthropic for tests, and a stored model that thinks and calls tools."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from tests.helpers.live_server import LiveServer
from tests.helpers.stored_model import put_model

AGENT = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }} in <tool_call> tags<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TWO_CALLS = (
    'Two notes.</think>\nSaving.\n<tool_call>{"name": "save_note", "arguments": {"name": "a"}}</tool_call>\n'
    '<tool_call>{"name": "save_note", "arguments": {"name": "b"}}</tool_call>'
)
"""What a model writes that thinks, speaks and calls twice."""

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
NOTE: dict[str, Any] = {"type": "function", "function": {"name": "save_note", "parameters": SCHEMA}}
"""The tool of those calls, in the form of chat completions."""


def put_agent(server: LiveServer) -> str:
    """Store a model that thinks and calls tools; its name."""
    put_model(server.store, "agent", template=AGENT)
    return "agent"


def openai_options(server: LiveServer) -> dict[str, Any]:
    """How OpenAI's client is made, sync or async."""
    return {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
        "timeout": 20,
    }


def anthropic_options(server: LiveServer) -> dict[str, Any]:
    """How Anthropic's client is made, sync or async."""
    return {
        "base_url": server.url,
        "api_key": "none",
        "max_retries": 0,
        "_strict_response_validation": True,
        "timeout": 20,
    }


def openai_client(server: LiveServer) -> openai.OpenAI:
    """A client that checks every reply against the types that it knows."""
    return openai.OpenAI(**openai_options(server))


def anthropic_client(server: LiveServer) -> anthropic.Anthropic:
    """As `openai_client`."""
    return anthropic.Anthropic(**anthropic_options(server))

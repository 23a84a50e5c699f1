"""Events of a generation → Anthropic's stream of blocks, in the one order that is legal.

message_start, then blocks one after another (start, deltas of its kind, stop; indices count from 0), then
message_delta and message_stop. Whatever comes in, a block is closed before the next one opens.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from arriero.chat.messages import ToolCall
from arriero.server.compat.openai_writer import new_id, truncation
from arriero.server.completion import Final
from arriero.server.transcript import Delta

Event = dict[str, Any]
"""The data of one event; its name is its `type`."""

Kind = Literal["thinking", "text"]


class MessageEvents:
    """One reply as it is streamed; `message` is the whole of it at any time."""

    def __init__(self, model: str, *, show_thinking: bool = True, parallel: bool = True) -> None:
        """`parallel` False keeps the first call only; `show_thinking` False leaves blocks of thinking empty."""
        self.message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._blocks: list[dict[str, Any]] = self.message["content"]
        self._show_thinking = show_thinking
        self._parallel = parallel
        self._state: Literal["new", "open", "ended"] = "new"
        self._kind: Kind | None = None
        """Of the block that is open."""
        self._thoughts = hashlib.sha256()
        self._called = False

    def start(self, prompt_tokens: int) -> list[Event]:
        """The opening event; nothing when it was sent."""
        if self._state != "new":
            return []
        self._state = "open"
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self.message | {"content": [], "usage": usage}}]

    def feed(self, delta: Delta) -> list[Event]:
        """The events of one piece."""
        if self._state != "open":
            raise RuntimeError(f"a piece of a reply that is {self._state}")
        events: list[Event] = []
        if delta.thinking:
            events += self._piece("thinking", delta.thinking)
        if delta.content:
            events += self._piece("text", delta.content)
        for call in delta.tool_calls:
            if self._parallel or not self._called:
                events += self._call(call)
        return events

    def end(self, final: Final, max_tokens: int) -> list[Event]:
        """The last events; `max_tokens` tells a reply at its limit from a full window."""
        if self._state != "open":
            raise RuntimeError(f"the end of a reply that is {self._state}")
        events = self._close()
        self._state = "ended"
        stop: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}
        if final.reason == "length":
            full = final.generated_tokens < max_tokens and not final.looped
            stop["stop_reason"] = "model_context_window_exceeded" if full else "max_tokens"
        elif self._called:
            stop["stop_reason"] = "tool_use"
        elif final.stopped_by is not None:
            stop = {"stop_reason": "stop_sequence", "stop_sequence": final.stopped_by}
        usage = {
            "input_tokens": len(final.prompt) - final.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": final.cached_tokens,
            "output_tokens": final.generated_tokens,
            "output_tokens_details": {"thinking_tokens": final.thinking_tokens},
            **truncation(final),
        }
        self.message |= stop | {"usage": usage}
        return [*events, {"type": "message_delta", "delta": stop, "usage": usage}, {"type": "message_stop"}]

    def _piece(self, kind: Kind, text: str) -> list[Event]:
        events: list[Event] = []
        if self._kind != kind:
            events += self._close()
            block: dict[str, Any] = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
                self._thoughts = hashlib.sha256()
            events.append(self._open(block))
            self._kind = kind
        if kind == "thinking":
            self._thoughts.update(text.encode())
            if not self._show_thinking:
                return events
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall) -> list[Event]:
        events = self._close()
        self._called = True
        arguments = call.mapping()
        block: dict[str, Any] = {"type": "tool_use", "id": call.id or new_id("toolu_"), "name": call.name, "input": {}}
        events.append(self._open(block))
        text = call.text() if arguments else ""
        if arguments is None:
            arguments = {"arguments": call.text()}
            text = ToolCall(name="", arguments=arguments).text()
        block["input"] = arguments
        events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return [*events, self._stop()]

    def _open(self, block: dict[str, Any]) -> Event:
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _close(self) -> list[Event]:
        """Close the block that is open; thoughts are signed first, for clients that send back only what is signed."""
        if self._kind is None:
            return []
        events: list[Event] = []
        if self._kind == "thinking":
            signature = self._blocks[-1]["signature"] = self._thoughts.hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        self._kind = None
        return [*events, self._stop()]

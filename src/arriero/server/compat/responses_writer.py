"""Events of a generation → OpenAI's response: its items, and the stream that builds them in the one legal order.

response.created, response.in_progress, then items one after another (added, pieces, done; `output_index` counts from
0), then response.completed, .incomplete or .failed. Whatever comes in, an item is done before the next one is added.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from arriero.chat.messages import ToolCall
from arriero.server.compat.openai_writer import logprobs_of, new_id, truncation
from arriero.server.compat.responses_request import OUR_THOUGHTS
from arriero.server.completion import Final
from arriero.server.transcript import Delta, Logprob

Event = dict[str, Any]
"""The data of one event; its name is its `type`."""

Kind = Literal["reasoning", "message"]


class ResponseEvents:
    """One response as it is streamed; `response` is the whole of it at any time."""

    def __init__(
        self,
        echoed: dict[str, Any],
        *,
        seal_thoughts: bool = False,
        logprobs: bool = False,
        parallel: bool = True,
        namespaces: frozenset[str] = frozenset(),
    ) -> None:
        """`echoed` are the fields that repeat the request; `parallel` False keeps the first call only."""
        self.response: dict[str, Any] = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "output": [],
            "usage": None,
            **echoed,
        }
        self._output: list[dict[str, Any]] = self.response["output"]
        self._seal_thoughts = seal_thoughts
        self._logprobs = logprobs
        self._parallel = parallel
        self._namespaces = namespaces
        self._state: Literal["new", "open", "ended"] = "new"
        self._kind: Kind | None = None
        """Of the item that is open."""
        self._text = ""
        self._items: list[dict[str, Any]] = []
        """Log-probabilities of the open message."""
        self._called = False
        self._number = 0

    def start(self) -> list[Event]:
        """The opening events; nothing when they were sent."""
        if self._state != "new":
            return []
        self._state = "open"
        return [self._about("response.created"), self._about("response.in_progress")]

    def feed(self, delta: Delta) -> list[Event]:
        """The events of one piece."""
        if self._state != "open":
            raise RuntimeError(f"a piece of a response that is {self._state}")
        events: list[Event] = []
        if delta.thinking:
            events += self._thought(delta.thinking)
        if delta.content:
            events += self._said(delta.content, delta.logprobs)
        for call in delta.tool_calls:
            if self._parallel or not self._called:
                events += self._call(call)
        return events

    def end(self, final: Final) -> list[Event]:
        """The last events of a response that came to its end."""
        if self._state != "open":
            raise RuntimeError(f"the end of a response that is {self._state}")
        cut = final.reason == "length"
        events = self._close("incomplete" if cut else "completed")
        self._state = "ended"
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": {
                "input_tokens": len(final.prompt),
                "input_tokens_details": {"cached_tokens": final.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": final.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": final.thinking_tokens},
                "total_tokens": len(final.prompt) + final.generated_tokens,
                **truncation(final),
            },
        }
        return [*events, self._about("response.incomplete" if cut else "response.completed")]

    def fail(self, message: str) -> list[Event]:
        """The last events of a response that broke."""
        if self._state == "ended":
            return []
        events = self.start() + self._close("incomplete")
        self._state = "ended"
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
        return [*events, self._about("response.failed")]

    def _thought(self, text: str) -> list[Event]:
        events: list[Event] = []
        place = {"summary_index": 0}
        if self._kind != "reasoning":
            events += self._close("completed")
            events.append(self._open("reasoning", {"id": new_id("rs_"), "type": "reasoning", "summary": []}))
            part = {"type": "summary_text", "text": ""}
            events.append(self._inside("response.reasoning_summary_part.added", place, part=part))
        self._text += text
        return [*events, self._inside("response.reasoning_summary_text.delta", place, delta=text)]

    def _said(self, text: str, logprobs: Sequence[Logprob]) -> list[Event]:
        events: list[Event] = []
        place = {"content_index": 0}
        if self._kind != "message":
            events += self._close("completed")
            item = {
                "id": new_id("msg_"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            events.append(self._open("message", item))
            events.append(self._inside("response.content_part.added", place, part=self._part()))
        self._text += text
        items = [msgspec.to_builtins(item) for item in logprobs_of(logprobs)] if self._logprobs else []
        self._items += items
        return [*events, self._inside("response.output_text.delta", place, delta=text, logprobs=items)]

    def _call(self, call: ToolCall) -> list[Event]:
        events = self._close("completed")
        self._called = True
        space, dot, name = call.name.partition(".")
        spaced = {"name": name, "namespace": space} if dot and space in self._namespaces else {"name": call.name}
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "status": "in_progress",
            "arguments": "",
            "call_id": call.id or new_id("call_"),
            **spaced,
        }
        events.append(self._added(item))
        text = call.text()
        events.append(self._inside("response.function_call_arguments.delta", {}, delta=text))
        events.append(self._inside("response.function_call_arguments.done", {}, arguments=text, name=item["name"]))
        item |= {"status": "completed", "arguments": text}
        return [*events, self._done()]

    def _open(self, kind: Kind, item: dict[str, Any]) -> Event:
        self._kind, self._text, self._items = kind, "", []
        return self._added(item)

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        """Finish the item that is open."""
        if self._kind is None:
            return []
        item, events = self._output[-1], []
        if self._kind == "reasoning":
            place, part = {"summary_index": 0}, {"type": "summary_text", "text": self._text}
            events.append(self._inside("response.reasoning_summary_text.done", place, text=self._text))
            events.append(self._inside("response.reasoning_summary_part.done", place, part=part))
            item["summary"] = [part]
            if self._seal_thoughts:
                item["encrypted_content"] = OUR_THOUGHTS + self._text
        else:
            place, part = {"content_index": 0}, self._part()
            done = "response.output_text.done"
            events.append(self._inside(done, place, text=self._text, logprobs=self._items))
            events.append(self._inside("response.content_part.done", place, part=part))
            item |= {"content": [part], "status": status}
        self._kind = None
        return [*events, self._done()]

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._items)}

    def _added(self, item: dict[str, Any]) -> Event:
        self._output.append(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))

    def _done(self) -> Event:
        index = len(self._output) - 1
        return self._event("response.output_item.done", output_index=index, item=dict(self._output[-1]))

    def _inside(self, name: str, place: dict[str, int], /, **fields: Any) -> Event:
        item = self._output[-1]
        return self._event(name, item_id=item["id"], output_index=len(self._output) - 1, **place, **fields)

    def _about(self, name: str) -> Event:
        return self._event(name, response=self.response | {"output": list(self._output)})

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}

"""Other ways to write a conversation that a strict template refuses.

Many templates raise for conversations that clients send every day. A template that accepts a conversation always gets
it as it was sent; only when it raises are these rewritings tried, in order, until one is accepted:

1. Leading system messages become one, joined with a blank line; every later system message becomes a user message where
   it stands. What comes before a stray system message is thereby written as before, so it can be reused.
2. Also, neighbouring user messages become one, joined with a blank line.
3. Also, the system message goes in front of the first user message.

Each of them is tried with more changes where they apply: text beside thinking in a turn that makes calls becomes part
of the thinking; calls of one turn get a turn each, its result behind it; call ids become nine letters and digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from arriero.chat.messages import Message

_SYSTEM = ("system", "developer")


def readings(messages: list[Message]) -> Iterator[list[Message]]:
    """The messages as sent, then every rewriting that differs from those before it.

    Images are marks in the contents here, so they go where their text goes.
    """
    yield messages
    seen = [messages]
    settled = system_first(messages)
    alternating = _merge_users(settled)
    for roles in (messages, settled, alternating, _system_in_user(alternating)):
        for texts in (roles, _text_into_thinking(roles)):
            for turns in (texts, one_call_a_turn(texts)):
                for reading in (turns, _short_ids(turns)):
                    if reading not in seen:
                        seen.append(reading)
                        yield reading


def system_first(messages: list[Message]) -> list[Message]:
    """Leading system messages as one, later ones as the user's."""
    lead = 0
    while lead < len(messages) and messages[lead].role in _SYSTEM:
        lead += 1
    found = [Message(role="system", content=_joined(messages[:lead]))] if lead else []
    later = (
        msgspec.structs.replace(message, role="user") if message.role in _SYSTEM else message
        for message in messages[lead:]
    )
    return [*found, *later]


def _merge_users(messages: list[Message]) -> list[Message]:
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and message.role == last.role == "user":
            found[-1] = msgspec.structs.replace(last, content=_joined([last, message]))
        else:
            found.append(message)
    return found


def _system_in_user(messages: list[Message]) -> list[Message]:
    if not messages or messages[0].role != "system":
        return messages
    if len(messages) > 1 and messages[1].role == "user":
        merged = msgspec.structs.replace(messages[1], content=_joined(messages[:2]))
        return [merged, *messages[2:]]
    return [msgspec.structs.replace(messages[0], role="user"), *messages[1:]]


def _text_into_thinking(messages: list[Message]) -> list[Message]:
    return [
        msgspec.structs.replace(message, thinking=f"{message.thinking}\n\n{message.content}", content="")
        if message.tool_calls and message.thinking and message.content
        else message
        for message in messages
    ]


def one_call_a_turn(messages: list[Message]) -> list[Message]:
    """Turns with several calls as turns with one call each, followed by its result; text and thinking stay in front."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        end = at
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        results, at = messages[at:end], end
        for index, call in enumerate(message.tool_calls):
            turn = message if index == 0 else Message(role=message.role)
            found.append(msgspec.structs.replace(turn, tool_calls=[call]))
            own = [result for result in results if call.id and result.tool_call_id == call.id] or results[:1]
            found += own
            results = [result for result in results if result not in own]
        found += results
    return found


def _short_ids(messages: list[Message]) -> list[Message]:
    if not any(message.tool_calls for message in messages):
        return messages
    found = []
    for turn, message in enumerate(messages):
        if message.tool_calls:
            calls = [
                msgspec.structs.replace(call, id=_short_id(call.id or f"{turn}.{index}"))
                for index, call in enumerate(message.tool_calls)
            ]
            found.append(msgspec.structs.replace(message, tool_calls=calls))
        elif message.role == "tool":
            found.append(msgspec.structs.replace(message, tool_call_id=_short_id(message.tool_call_id or str(turn))))
        else:
            found.append(message)
    return found


def _short_id(text: str) -> str:
    if len(text) == 9 and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _joined(messages: list[Message]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)

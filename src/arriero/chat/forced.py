"""A reply that must be a call: the grammar that makes it one, in the syntax that the model's parser reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from arriero import grammar
from arriero.chat.grammar import Format
from arriero.chat.messages import Tool
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.reply import ReplyParser
from arriero.errors import InvalidRequest, UnsupportedFeature

log = logging.getLogger(__name__)

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_MOST_CALLS = 16
"""In one reply: a model that has lost its way would call for ever."""


def call_format(parser: Parser, tools: Sequence[Tool], *, many: bool = True) -> Format:
    """The form of a reply that calls one of `tools`, or several in a row when `many`, behind its thoughts.

    Arguments fit the tool's schema. A schema that can't be enforced is InvalidRequest for a tool that is `strict`; for
    others any object will do, with a warning. Raises UnsupportedFeature for a family whose syntax has no grammar here.
    """
    tagged = isinstance(parser, ReplyParser) and "<tool_call>" in parser.call_openings
    if not tagged and not (isinstance(parser, ReplyParser) and "{" in parser.call_leads):
        raise UnsupportedFeature("this model's way of writing calls has no grammar here, so a call can't be enforced")
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{"arguments" if tagged else "parameters"}": '
        rules.append(f"call_{index}: {_literal(head)} arguments_{index} {_literal('}')}")
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool), ensure_ascii=False)}")
    start = "start: call"
    if tagged:
        block = f"{_literal(f'<tool_call>{chr(10)}')} call {_literal(f'{chr(10)}</tool_call>')}"
        more = f" ({_literal(chr(10))} block){{0,{_MOST_CALLS - 1}}}" if many else ""
        start = f"start: block{more}\nblock: {block}"
    text = "\n".join([start, *rules])
    grammar.check("lark", text)
    return Format("lark", text, alone=True)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, as far as it can be enforced."""
    function = tool.definition.get("function")
    assert isinstance(function, dict)
    schema = function.get("parameters")
    if not isinstance(schema, dict) or not schema:
        return _ANY_OBJECT
    try:
        grammar.check("json_schema", json.dumps(schema))
    except InvalidRequest as error:
        if function.get("strict"):
            raise InvalidRequest(f"the parameters of the tool '{tool.name}': {error}") from None
        log.warning("the arguments of '%s' may be any object: %s", tool.name[:80], error)
        return _ANY_OBJECT
    return schema | {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": grammar.BLANKS}}

"""Calls that must fit their tools' schemas: a reply that is one, and replies that are free to make one or not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from arriero import grammar
from arriero.chat.calls.forms import MOST_CALLS, CallForm
from arriero.chat.calls.rules import Rules, literal
from arriero.chat.grammar import Format, Spell, marked
from arriero.chat.messages import Tool
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.runner.messages import Trigger

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.:/-]{1,128}")
_BLANKS = r"/[ \n]{0,2}/"
"""Between the tag of a call and what follows."""
_HEADER = "[^<\xff]{0,40}"


def call_format(form: CallForm | None, spell: Spell, tools: Sequence[Tool], *, many: bool = True) -> Format:
    """The form of a reply that calls one of `tools`, or several in a row when `many`, behind its thoughts.

    Arguments fit the tool's schema. A schema that can't be enforced is InvalidRequest for a tool that is `strict`; for
    others any arguments will do, with a warning. Raises UnsupportedFeature for a family whose calls have no grammar.
    """
    if form is None:
        raise UnsupportedFeature("this model's way of writing calls has no grammar here, so a call can't be enforced")
    rules = Rules(spell)
    if form.channels:
        text = _in_channels(form, rules, tools)
    else:
        count = MOST_CALLS - 1 if many and form.many else 0
        body = _calls(form, rules, tools, form.opening, first=True)
        other = _calls(form, rules, tools, form.opening) if form.first and count else body
        more = f"({rules.written(form.between)} {other}){{0,{count}}}" if count else ""
        parts = (rules.written(form.begin, form.tags), body, more, rules.written(form.end, form.tags))
        text = f"start: {' '.join(part for part in parts if part)}\n{rules.text}"
    grammar.check("lark", text)
    return Format("lark", text, alone=True, whole=form.channels)


def strict_calls(form: CallForm | None, spell: Spell, tools: Sequence[Tool]) -> list[Trigger]:
    """What makes the calls of `strict` tools fit in a reply that may hold some; nothing without such tools.

    Raises InvalidRequest for a strict schema that can't be enforced. A family whose calls have no grammar is a warning.
    """
    strict = [tool for tool in tools if _is_strict(tool)]
    if not strict:
        return []
    if form is None:
        log.warning("this model's way of writing calls has no grammar here: 'strict' tools are called like any other")
        return []
    if form.opening:
        rules = Rules(spell)
        body = _calls(form, rules, tools, "", strict_only=True)
        lark = f"start: {body}\n{rules.text}"
        grammar.check("lark", lark)
        opening = marked(form.opening, spell)
        return [Trigger(pattern=opening, lark=lark, in_thoughts=rules.is_token(form.opening))]
    found = []
    for tool in strict:
        rules = Rules(spell)
        arguments = _arguments(form, rules, tool)
        blank = "" if form.channels else rules.add_terminal(_BLANKS)
        lark = f"start: {blank} {arguments} {rules.written(form.closing)}\n{rules.text}"
        grammar.check("lark", lark)
        pattern = _header(tool.name, spell) if form.channels else _bare(form, tool.name, spell)
        found.append(Trigger(pattern=pattern, lark=lark, ends=form.channels, in_thoughts=form.channels))
    return found


def _header(name: str, spell: Spell) -> str:
    """Behind the header of a message to a tool."""
    channel, constrain, message = (marked(f"<|{tag}|>", spell) for tag in ("channel", "constrain", "message"))
    rest = rf"{_HEADER}(?:{channel}{_HEADER})?(?:{constrain}{_HEADER})?{message}"
    return rf"to=(?:functions\.)?{re.escape(name)}(?![\w.-]){rest}"


def _bare(form: CallForm, name: str, spell: Spell) -> str:
    """Behind the name of a call that begins with nothing else, as the first thing of a reply."""
    key = form.middle.strip(' ,:"')
    tag = marked("<|python_tag|>", spell)
    return rf'\A\s*(?:{tag}\s*)?\{{\s*"name"\s*:\s*{re.escape(literal(name))}\s*,\s*"{key}"\s*:'


def _in_channels(form: CallForm, rules: Rules, tools: Sequence[Tool]) -> str:
    """A message of analysis, or none, and one to a tool."""
    missing = [tag for tag in form.tags if not rules.is_token(tag)]
    if missing:
        raise UnsupportedFeature(f"a call can't be enforced: the vocabulary lacks {missing[0]}")
    thoughts = rules.written("<|channel|>analysis<|message|>", form.tags)
    between = rules.written("<|end|><|start|>assistant", form.tags)
    analysis = rules.add("analysis", f"{thoughts} {rules.add_terminal('/(?s:.*)/')} {between}")
    calls = []
    for tool in tools:
        head = f"<|channel|>commentary to=functions.{_named(form, tool)} <|constrain|>json<|message|>"
        calls.append(f"{rules.written(head, form.tags)} {_arguments(form, rules, tool)}")
    return f"start: ({analysis})? ({' | '.join(calls)})\n{rules.text}"


def _calls(
    form: CallForm, rules: Rules, tools: Sequence[Tool], opening: str, *, first: bool = False, strict_only: bool = False
) -> str:
    """The rule of one call of any of the tools."""
    ways = []
    for tool in tools:
        free = strict_only and not _is_strict(tool)
        arguments = form.notation.anything(rules) if free else _arguments(form, rules, tool)
        begun = f"{opening}{form.head if opening else form.head.lstrip()}{_named(form, tool)}{form.mark}"
        if first and form.first:
            begun += form.first
        if form.number and not (first and form.first):
            number = rules.add_terminal(f"/{form.number}/")
            begun = f"{rules.written(begun, form.tags)} {number} {rules.written(form.middle, form.tags)}"
        else:
            begun = rules.written(f"{begun}{form.middle}", form.tags)
        ways.append(f"{begun} {arguments} {rules.written(form.closing, form.tags)}")
    body = rules.add("call", " | ".join(ways))
    return body if opening or not form.opening else f"{rules.add_terminal(_BLANKS)} {body}"


def _named(form: CallForm, tool: Tool) -> str:
    if form.quoted:
        return json.dumps(tool.name, ensure_ascii=False)
    if _NAME.fullmatch(tool.name) is None:
        raise InvalidRequest(f"a call of '{tool.name[:80]}' can't be enforced: use letters, digits and _ in its name")
    return tool.name


def _is_strict(tool: Tool) -> bool:
    function = tool.definition.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _arguments(form: CallForm, rules: Rules, tool: Tool) -> str:
    """A tool's arguments, as far as its schema can be enforced."""
    function = tool.definition.get("function")
    assert isinstance(function, dict)
    schema: Any = function.get("parameters")
    if not isinstance(schema, dict) or not schema:
        return form.notation.anything(rules)
    try:
        return form.notation.arguments(rules, schema)
    except (InvalidRequest, RecursionError) as found:
        error = "it is nested too deeply" if isinstance(found, RecursionError) else found
        if _is_strict(tool):
            raise InvalidRequest(f"the parameters of the tool '{tool.name}': {error}") from None
        log.warning("the arguments of '%s' may be any: %s", tool.name[:80], error)
        return form.notation.anything(rules)

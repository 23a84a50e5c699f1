"""Calls written as elements, a parameter each: `<function=f><parameter=a>1</parameter></function>` and its relatives.

Values are bare text. A closing tag counts as one only where another parameter or the end of the call follows, so text
about the format can be an argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from arriero.chat.messages import ToolCall
from arriero.chat.parsers.marks import past_space, reach_any
from arriero.chat.parsers.offered import OfferedTools
from arriero.chat.parsers.syntax import Done, Failed, Outcome


@dataclass(frozen=True, slots=True)
class ElementForm:
    """The tags of one family."""

    header: re.Pattern[str]
    """Matches what stands before the parameters, with the group `name`."""
    header_part: re.Pattern[str]
    """Matches every beginning of a header, in full."""
    opening: str
    """What every parameter begins with."""
    parameter: re.Pattern[str]
    """Matches what stands before a value, with the group `name`."""
    parameter_part: re.Pattern[str]
    closing: str
    """What stands behind a value."""
    end: str
    """What ends a call."""
    block_end: str = ""
    """What may stand behind the last call of a block; its text instead of `end` ends a call too."""
    again: str = ""
    """What another call in the same block begins with."""
    trims: bool = False
    """Whether one line break at either edge of a value is not part of it."""


def _part(word: str, rest: str = "") -> re.Pattern[str]:
    """Matches every beginning of `word`, and `word` with what `rest` matches."""
    return re.compile("".join(f"(?:{re.escape(char)}" for char in word) + f"(?:{rest})?" + ")?" * len(word))


def _attribute_form(prefix: str, block_end: str) -> ElementForm:
    """`<invoke name="f"><parameter name="a">1</parameter></invoke>` with a prefix in front of every tag's name."""
    return ElementForm(
        header=re.compile(rf'<{prefix}invoke name="(?P<name>[^"\n]{{1,128}})"\s{{0,8}}>'),
        header_part=_part(f'<{prefix}invoke name="', r'[^"\n]{0,128}"?\s{0,8}'),
        opening=f"<{prefix}parameter",
        parameter=re.compile(rf'<{prefix}parameter name="(?P<name>[^"\n]{{1,256}})"[^>\n]{{0,64}}>'),
        parameter_part=_part(f'<{prefix}parameter name="', r'[^"\n]{0,256}(?:"[^>\n]{0,64})?'),
        closing=f"</{prefix}parameter>",
        end=f"</{prefix}invoke>",
        block_end=block_end,
        again=f"<{prefix}invoke",
    )


def _function_form(block_end: str) -> ElementForm:
    """`<function=f><parameter=a>1</parameter></function>` in a block."""
    return ElementForm(
        header=re.compile(r"<function=\s{0,8}(?P<name>[^>\s]{1,128})\s{0,8}>"),
        header_part=_part("<function=", r"\s{0,8}[^>\s]{0,128}\s{0,8}"),
        opening="<parameter=",
        parameter=re.compile(r"<parameter=\s{0,8}(?P<name>[^>\n]{1,256})>"),
        parameter_part=_part("<parameter=", r"\s{0,8}[^>\n]{0,256}"),
        closing="</parameter>",
        end="</function>",
        block_end=block_end,
        again="<function=",
        trims=True,
    )


QWEN = _function_form("</tool_call>")
SEED = _function_form("</seed:tool_call>")
MINIMAX = _attribute_form("", "</minimax:tool_call>")
DSML = _attribute_form("｜DSML｜", "</｜DSML｜function_calls>")
GLM = ElementForm(
    header=re.compile(r"\s*(?P<name>[\w.:/-]{1,128})\s{0,16}(?=<)"),
    header_part=re.compile(r"\s*[\w.:/-]{0,128}\s{0,16}"),
    opening="<arg_key>",
    parameter=re.compile(r"<arg_key>(?P<name>[^<]{1,256})</arg_key>\s{0,16}<arg_value>"),
    parameter_part=re.compile(r"<arg_key>[^<]{0,256}(?:<[/\w]{0,10}(?:>\s{0,16}(?:<\w{0,10})?)?)?"),
    closing="</arg_value>",
    end="</tool_call>",
)

_Phase = Literal["header", "between", "value", "closed"]


class ElementReader:
    """One call, or several in one block."""

    def __init__(self, start: int, form: ElementForm, tools: OfferedTools, *, known: bool = False) -> None:
        """`start` is where the header begins; `known`: a call to a tool that isn't offered is none."""
        self._form = form
        self._tools = tools
        self._known = known
        self._phase: _Phase = "header"
        self._at = self._body = self._value_at = start
        self._gap = 0
        self._name = self._parameter = ""
        self._arguments: dict[str, object] = {}
        self._calls: list[ToolCall] = []
        self._end = start

    def read(self, text: str) -> Outcome:
        while True:
            steps = {"header": self._header, "between": self._between, "value": self._value, "closed": self._closed}
            moved = steps[self._phase](text)
            if not isinstance(moved, bool):
                return moved

    def finish(self, text: str) -> Outcome:
        """A call whose end was written counts even where its parameters are not closed as they should be."""
        if self._phase in ("between", "value"):
            ends = [at for at in (text.find(self._form.end, self._body), self._find_block_end(text)) if at >= 0]
            if ends:
                end = min(ends)
                tag = self._form.end if text.startswith(self._form.end, end) else self._form.block_end
                self._arguments = self._loose(text[self._body : end])
                self._close(end + len(tag))
                if tag == self._form.end and self._form.again:
                    return self.read(text) or Done(self._end, tuple(self._calls))
        return Done(self._end, tuple(self._calls)) if self._calls else Failed()

    def _find_block_end(self, text: str) -> int:
        return text.find(self._form.block_end, self._body) if self._form.block_end else -1

    def _header(self, text: str) -> Outcome | Literal[True]:
        found = self._form.header.match(text, self._at)
        if found is None:
            return None if self._form.header_part.fullmatch(text, self._at) else self._failed()
        self._name = found["name"]
        if self._known and self._name not in self._tools:
            return self._failed()
        self._arguments = {}
        self._at = self._body = found.end()
        self._phase = "between"
        return True

    def _between(self, text: str) -> Outcome | Literal[True]:
        form = self._form
        self._at = past_space(text, self._at)
        found = reach_any(text, self._at, tuple(tag for tag in (form.opening, form.end, form.block_end) if tag))
        if found is None:
            return None
        if found is False:
            return self._failed()
        if found == form.opening:
            opened = form.parameter.match(text, self._at)
            if opened is None:
                return None if form.parameter_part.fullmatch(text, self._at) else self._failed()
            self._parameter = opened["name"].strip()
            self._at = self._value_at = opened.end()
            self._gap = 0
            self._phase = "value"
            return True
        self._close(self._at + len(form.end if found == form.end else form.block_end))
        if found == form.block_end or not form.again:
            return Done(self._end, tuple(self._calls))
        return True

    def _value(self, text: str) -> Outcome | Literal[True]:
        form = self._form
        follows = tuple(tag for tag in (form.opening, form.end, form.block_end) if tag)
        while True:
            closing = text.find(form.closing, self._at)
            if closing < 0:
                self._at = max(self._at, len(text) - len(form.closing) + 1)
                return None
            self._at = closing
            behind = self._gap = past_space(text, max(self._gap, closing + len(form.closing)))
            found = reach_any(text, behind, follows)
            if found is None:
                return None
            if found is not False:
                self._arguments[self._parameter] = self._typed(self._parameter, text[self._value_at : closing])
                self._at = behind
                self._phase = "between"
                return True
            self._at = closing + len(form.closing)

    def _closed(self, text: str) -> Outcome | Literal[True]:
        self._at = past_space(text, self._at)
        found = reach_any(text, self._at, (self._form.block_end, self._form.again))
        if found is None:
            return None
        if found == self._form.again:
            self._phase = "header"
            return True
        if found == self._form.block_end:
            self._end = self._at + len(self._form.block_end)
        return Done(self._end, tuple(self._calls))

    def _close(self, end: int) -> None:
        self._calls.append(ToolCall(name=self._name, arguments=self._arguments))
        self._at = self._end = end
        self._phase = "closed"

    def _failed(self) -> Outcome:
        return Done(self._end, tuple(self._calls)) if self._calls else Failed()

    def _typed(self, parameter: str, value: str) -> object:
        if self._form.trims:
            value = value.removeprefix("\n").removesuffix("\n")
        return self._tools.value(self._name, parameter, value)

    def _loose(self, body: str) -> dict[str, object]:
        """Parameters of a call whose closing tags are missing or misplaced: each goes on to the next one."""
        opened = list(self._form.parameter.finditer(body))
        found: dict[str, object] = {}
        for index, start in enumerate(opened):
            stop = opened[index + 1].start() if index + 1 < len(opened) else len(body)
            value, closed, _ = body[start.end() : stop].rpartition(self._form.closing)
            if not closed:
                value = body[start.end() : stop].rstrip()
            name = start["name"].strip()
            found[name] = self._typed(name, value)
        return found

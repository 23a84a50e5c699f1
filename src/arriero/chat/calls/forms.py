"""How each family writes a call, for grammars: what stands around its name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from arriero.chat.calls.notation import ElementNotation, GemmaNotation, JsonNotation, Notation

MOST_CALLS = 16
"""In one reply: a model that has lost its way would call for ever."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """One family's way. `opening head NAME middle ARGUMENTS closing`, with `begin` and `end` around a row of them."""

    opening: str
    """What tells that a call has begun; '' where nothing does but the name of a tool."""
    head: str
    middle: str
    closing: str
    notation: Notation
    begin: str = ""
    end: str = ""
    between: str = ""
    many: bool = True
    """Whether one reply may hold several."""
    quoted: bool = False
    """Whether the name is a JSON string."""
    mark: str = ""
    """What stands behind the name where a call has a number."""
    number: str = ""
    """A regular expression for that."""
    first: str = ""
    """The number of the first call, where that is known."""
    tags: tuple[str, ...] = ()
    """All tags above, which may be tokens."""
    channels: bool = False
    """Whether it is written behind a header with the name, which begins a message of its own, and ends the reply."""


_JSON = JsonNotation()
_TAGS = ("<tool_call>", "</tool_call>")
_TAGGED = CallForm(
    "<tool_call>", '\n{"name": ', ', "arguments": ', "}\n</tool_call>", _JSON, between="\n", quoted=True, tags=_TAGS
)
_QWEN_ELEMENTS = CallForm(
    "<tool_call>",
    "\n<function=",
    ">\n",
    "</function>\n</tool_call>",
    ElementNotation("<parameter=", ">\n", "\n", "</parameter>", "\n"),
    between="\n",
    tags=_TAGS,
)
_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_ELEMENTS = CallForm(
    "<tool_call>",
    "",
    "\n",
    "</tool_call>",
    ElementNotation("<arg_key>", "</arg_key>\n<arg_value>", "", "</arg_value>", "\n", _GLM_TAGS),
    between="\n",
    tags=_TAGS,
)
_SEED = CallForm(
    "<seed:tool_call>",
    "<function=",
    ">",
    "</function></seed:tool_call>",
    ElementNotation("<parameter=", ">", "", "</parameter>", ""),
    tags=("<seed:tool_call>", "</seed:tool_call>"),
)


def _invoked(prefix: str, block: str, behind: str = '">') -> CallForm:
    """`<invoke name="f">` in a block, with a prefix in front of every tag's name."""
    return CallForm(
        f"<{block}>",
        f'\n<{prefix}invoke name="',
        '">\n',
        f"</{prefix}invoke>\n</{block}>",
        ElementNotation(
            f'<{prefix}parameter name="', behind, "", f"</{prefix}parameter>", "\n", says_kind="{}" in behind
        ),
        tags=(f"<{block}>", f"</{block}>"),
    )


_DSML = _invoked("｜DSML｜", "｜DSML｜function_calls", '" string="{}">')
_DEEPSEEK_TAGS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_DEEPSEEK = CallForm(
    "<｜tool▁call▁begin｜>",
    "",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    _JSON,
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    tags=_DEEPSEEK_TAGS,
)
_DEEPSEEK_FENCED = replace(
    _DEEPSEEK,
    head="function<｜tool▁sep｜>",
    middle="\n```json\n",
    closing="\n```<｜tool▁call▁end｜>",
    between="\n",
)
_MISTRAL_TAGS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_MISTRAL = CallForm("[TOOL_CALLS]", "", "[ARGS]", "", _JSON, tags=_MISTRAL_TAGS)
_MISTRAL_IDS = replace(_MISTRAL, mark="[CALL_ID]", number="[0-9A-Za-z]{9}")
_MISTRAL_LIST = CallForm(
    "[TOOL_CALLS]", ' [{"name": ', ', "arguments": ', "}]", _JSON, quoted=True, many=False, tags=_MISTRAL_TAGS
)


def _gemma(opening: str, closing: str, quote: str) -> CallForm:
    return CallForm(opening, "call:", "", closing, GemmaNotation(quote), tags=(opening, closing, quote))


_FORMS: Mapping[str, CallForm] = {
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "harmony": CallForm(
        "",
        "",
        "",
        "",
        _JSON,
        many=False,
        tags=tuple(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end")),
        channels=True,
    ),
    "llama3": CallForm("", '{"name": ', ', "parameters": ', "}", _JSON, quoted=True, many=False),
    "kimi": CallForm(
        "<|tool_call_begin|>",
        "functions.",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        _JSON,
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        mark=":",
        number="[0-9]{1,2}",
        first="0",
        tags=(
            *(f"<|tool_calls_section_{name}|>" for name in ("begin", "end")),
            *(f"<|tool_call_{name}|>" for name in ("begin", "argument_begin", "end")),
        ),
    ),
    "cohere": CallForm(
        "<|START_ACTION|>",
        '[{"tool_call_id": "0", "tool_name": ',
        ', "parameters": ',
        "}]<|END_ACTION|>",
        _JSON,
        quoted=True,
        many=False,
        tags=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "minimax": _invoked("", "minimax:tool_call"),
    "seed": _SEED,
}
_ELEMENTS = re.compile(r"<function=")


def form_of(family: str, template: str, knows: Callable[[str], bool]) -> CallForm | None:
    """How a model writes calls, by its family, template and vocabulary; None where there is no grammar."""
    if family in ("qwen", "glm", "generic"):
        if _ELEMENTS.search(template):
            return _QWEN_ELEMENTS
        return _GLM_ELEMENTS if "<arg_key>" in template else _TAGGED
    if family == "mistral":
        named = "[ARGS]" in template or (knows("[ARGS]") and "[TOOL_CALLS] [" not in template)
        if not named:
            return _MISTRAL_LIST
        return _MISTRAL_IDS if "[CALL_ID]" in template else _MISTRAL
    if family == "deepseek":
        if "｜DSML｜" in template:
            return _DSML
        return _DEEPSEEK_FENCED if "```json" in template else _DEEPSEEK
    return _FORMS.get(family)

"""The parsers by name, and which of them a model needs, told from its template and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from arriero.chat.messages import Tool
from arriero.chat.parsers.elements import DSML, GLM, MINIMAX, QWEN, SEED, ElementForm, ElementReader
from arriero.chat.parsers.events import Parser
from arriero.chat.parsers.gemma_calls import GemmaReader
from arriero.chat.parsers.harmony import HarmonyParser
from arriero.chat.parsers.json_calls import JsonReader, NamedJsonReader
from arriero.chat.parsers.marks import ThinkingTags, reach
from arriero.chat.parsers.offered import OfferedTools
from arriero.chat.parsers.passthrough import PassthroughParser
from arriero.chat.parsers.pythonic import PythonicReader
from arriero.chat.parsers.reply import ReplyParser
from arriero.chat.parsers.syntax import Choice, Failed, Reader

ReaderMaker = Callable[[int, OfferedTools], Reader]


@dataclass(frozen=True, slots=True)
class Openings:
    """A syntax as a table: what a call begins with, and the reader of what follows."""

    anywhere: Mapping[str, ReaderMaker]
    first: Mapping[str, ReaderMaker] = field(default_factory=dict)
    """What counts only before everything else of the answer."""

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(self.anywhere)

    @property
    def leads(self) -> tuple[str, ...]:
        return tuple(self.first)

    def reader(self, opening: str, start: int, tools: OfferedTools) -> Reader:
        return (self.anywhere.get(opening) or self.first[opening])(start, tools)


@dataclass(frozen=True, slots=True)
class Family:
    """How the replies of one family are read."""

    tags: ThinkingTags | None = None
    syntax: Openings | None = None
    silent: tuple[str, ...] = ()
    harmony: bool = False
    name: str = ""

    def thinks(self, template: str) -> bool:
        """Whether a model of this family thinks, as far as its template shows."""
        return self.harmony or (self.tags is not None and (self.tags.closing in template or self.tags.label != ""))

    def parser(self, prompt: str, tools: Iterable[Tool]) -> Parser:
        """A parser for one reply to a rendered prompt."""
        if self.harmony:
            return HarmonyParser(prompt, tools)
        if self.tags is None and self.syntax is None:
            return PassthroughParser()
        return ReplyParser(prompt, tags=self.tags, syntax=self.syntax, tools=tools, silent=self.silent)


def _json(closing: str = "") -> ReaderMaker:
    return lambda start, _tools: JsonReader(start, closing)


def _bare_json(opening: str, closing: str = "") -> ReaderMaker:
    """JSON that begins with its opening and counts only as a call to a tool on offer."""
    size = len(opening) if opening in ("{", "[") else 0
    return lambda start, tools: JsonReader(start - size, closing, tools)


def _named(header: str, closing: str | None = None) -> ReaderMaker:
    patterns = re.compile(header), None if closing is None else re.compile(closing)
    return lambda start, _tools: NamedJsonReader(start, *patterns)


def _elements(form: ElementForm) -> ReaderMaker:
    """A block of elements behind its own opening."""
    return lambda start, tools: Choice(start, lambda _text, at: ElementReader(at, form, tools))


def _bare_function(start: int, tools: OfferedTools) -> Reader:
    """The function's own tag, its block's tag having been left out."""
    return ElementReader(start - len(QWEN.again), QWEN, tools, known=True)


def _tool_call(start: int, tools: OfferedTools) -> Reader:
    """What stands in `<tool_call>`: JSON, a function's element, or a name with keys and values."""

    def choose(text: str, at: int) -> Reader | Failed | None:
        if text[at] in "{[":
            return JsonReader(at, "</tool_call>")
        function = reach(text, at, QWEN.again)
        if text[at] != "<":
            return ElementReader(at, GLM, tools, known=True)
        return ElementReader(at, QWEN, tools) if function else None if function is None else Failed()

    return Choice(start, choose)


def _mistral(start: int, tools: OfferedTools) -> Reader:
    def choose(text: str, at: int) -> Reader:
        if text[at] in "{[":
            return JsonReader(at)
        return NamedJsonReader(at, _MISTRAL_HEADER)

    return Choice(start, choose)


_MISTRAL_HEADER = re.compile(
    r"(?P<name>[\w.:/-]{1,128})\s{0,8}(?:\[CALL_ID\](?P<id>\w{1,64})\s{0,8})?(?:\[ARGS\])?\s{0,8}(?=\{)"
)
_DEEPSEEK_HEADER = (
    r"\s{0,8}(?:function\s{0,4}<｜tool▁sep｜>)?(?P<name>[^\s<｜]{1,128})\s{0,8}(?:<｜tool▁sep｜>)?\s{0,8}(?:```json)?\s{0,8}"
    r"(?=\{)"
)
_KIMI_HEADER = (
    r"\s{0,8}(?:functions\.)?(?P<name>[\w.-]{1,128}?)(?::\d{1,6})?\s{0,8}<\|tool_call_argument_begin\|>\s{0,8}(?=\{)"
)
_BARE = {"{": _bare_json("{"), "[": _bare_json("[")}
_FENCED = {"```json": _bare_json("```json", "```")}
_THINK = ThinkingTags()

# Small models often leave the tags out.
_TAGGED = Openings({"<tool_call>": _tool_call, "<function=": _bare_function}, _BARE | _FENCED)
_DEEPSEEK = Openings(
    {
        "<｜tool▁call▁begin｜>": _named(_DEEPSEEK_HEADER, r"\s*(?:```)?\s*<｜tool▁call▁end｜>"),
        "<｜DSML｜function_calls>": _elements(DSML),
    }
)

_QWEN = Family(_THINK, _TAGGED)
_FAMILIES = {
    "qwen": _QWEN,
    "glm": _QWEN,
    "gemma4": Family(
        ThinkingTags("<|channel>", "<channel|>", label="thought\n", anywhere=True),
        Openings({"<|tool_call>": lambda start, tools: GemmaReader(start, "<tool_call|>", '<|"|>', tools)}),
        ("<tool_call|>", "<|tool_response>"),
    ),
    "functiongemma": Family(
        None,
        Openings(
            {"<start_function_call>": lambda start, tools: GemmaReader(start, "<end_function_call>", "<escape>", tools)}
        ),
        ("<start_function_response>",),
    ),
    "harmony": Family(harmony=True),
    "llama3": Family(
        _THINK,
        Openings(
            {
                "<|python_tag|>": _json(),
                "<function=": _named(r"(?P<name>[^>\s{}]{1,128})>?\s{0,8}(?=\{)", r"\s*</function>"),
            },
            _BARE,
        ),
    ),
    "mistral": Family(ThinkingTags("[THINK]", "[/THINK]"), Openings({"[TOOL_CALLS]": _mistral})),
    "deepseek": Family(_THINK, _DEEPSEEK, ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")),
    "kimi": Family(
        _THINK,
        Openings({"<|tool_call_begin|>": _named(_KIMI_HEADER, r"\s*<\|tool_call_end\|>")}),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "lfm2": Family(
        _THINK,
        Openings({"<|tool_call_start|>": lambda start, _tools: PythonicReader(start, "<|tool_call_end|>")}),
    ),
    "olmo3": Family(
        _THINK, Openings({"<function_calls>": lambda start, _tools: PythonicReader(start, "</function_calls>")})
    ),
    "cohere": Family(
        ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>"),
        Openings({"<|START_ACTION|>": _json("<|END_ACTION|>")}),
        ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "minimax": Family(_THINK, Openings({"<minimax:tool_call>": _elements(MINIMAX)})),
    "seed": Family(ThinkingTags("<seed:think>", "</seed:think>"), Openings({"<seed:tool_call>": _elements(SEED)})),
    "generic": Family(
        _THINK,
        Openings(
            {
                **_TAGGED.anywhere,
                "<|tool_call|>": _json("<|/tool_call|>"),
                "<TOOLCALL>": _json("</TOOLCALL>"),
            },
            _BARE | _FENCED,
        ),
    ),
    "passthrough": Family(),
}
FAMILIES: Mapping[str, Family] = {name: replace(family, name=name) for name, family in _FAMILIES.items()}

_NAMES = {
    "qwen": "qwen3 qwen3-thinking qwen3-vl-instruct qwen3-vl-thinking qwen3-coder qwen3-next qwen3.5 qwen3.8 ornith "
    "hermes nemotron-3-nano nemotron-3.5-nano nemotron-3",
    "glm": "glm-4.7 glm-4 glm-ocr laguna poolside-v1",
    "gemma4": "gemma4-no-thinking gemma4-small gemma4-large gemma4-nemotron",
    "harmony": "gpt-oss",
    "llama3": "llama3.1 llama3.2 llama3.3",
    "mistral": "ministral",
    "deepseek": "deepseek3 deepseek3.1 deepseek-v3",
    "lfm2": "lfm2-thinking",
    "olmo3": "olmo3-think",
    "kimi": "kimi-k2",
    "minimax": "minimax-m2",
    "generic": "gemma3",
}
PARSER_NAMES: Mapping[str, str] = {name: name for name in FAMILIES} | {
    name: family for family, names in _NAMES.items() for name in names.split()
}
"""Name in a Modelfile's PARSER → family."""

_MARKS = (
    ("harmony", ("<|start|>", "<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("deepseek", ("｜DSML｜",)),
    ("kimi", ("<|tool_call_begin|>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed", ("<seed:tool_call>",)),
    ("qwen", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", "parameters")),
)
_THINKING = (_THINK, ThinkingTags("[THINK]", "[/THINK]"), ThinkingTags("<seed:think>", "</seed:think>"))


def family_of(template: str, knows: Callable[[str], bool], *, takes_tools: bool) -> Family:
    """The family of a model: by what its template writes, else by the tokens that its vocabulary has.

    A template that takes tools and shows no known syntax makes it `generic`; one that takes none and doesn't think,
    `passthrough`. The template also says what stands around thinking.
    """
    tags = next((tags for tags in _THINKING if tags.closing in template), None)
    name = _by_marks(lambda mark: mark in template)
    if name is None and takes_tools:
        name = _by_marks(knows)
    if name is None:
        return replace(FAMILIES["generic"], tags=tags) if takes_tools else Family(tags)
    family = FAMILIES[name]
    return replace(family, tags=tags) if tags is not None or family.tags in _THINKING else family


def _by_marks(has: Callable[[str], bool]) -> str | None:
    return next((name for name, marks in _MARKS if all(has(mark) for mark in marks)), None)

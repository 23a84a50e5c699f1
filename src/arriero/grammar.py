"""Grammars as llguidance takes them, with the limits and options that we always use.

The server checks a grammar with this before it loads anything; the runner compiles the same text. Refuses to know
tokens, models and HTTP.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import llguidance

from arriero.errors import InvalidRequest

Kind = Literal["json_schema", "regex", "lark"]

BLANKS = r"(?: |\r?\n[ \t]{0,40})?"
"""White space between the parts of JSON: a blank, or a line break and its indentation, and no more, since models that
have lost their way write blanks and empty lines for ever.
"""

_JSON: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
}
_FREE = '%llguidance {"no_forcing": true}'
"""Text that must come is left to the model's own way of cutting it into tokens."""
_NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}
_LARGEST = 1 << 20
_PLACE = re.compile(r"at \d+\(\d+\): ")
_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


def source(kind: Kind, text: str) -> str:
    """The grammar in llguidance's own notation; InvalidRequest for a schema that is no JSON object."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{_NAMES[kind]} holds half of a surrogate pair, which is no character") from None
    if len(text) > _LARGEST:
        raise InvalidRequest(f"{_NAMES[kind]} has {len(text)} characters; at most {_LARGEST} are taken")
    if kind == "lark":
        # Behind the text, so that errors count its own lines.
        return json.dumps({"grammars": [{"lark_grammar": f"{text}\n{_FREE}"}]})
    if kind == "regex":
        whole = json.loads(llguidance.LLMatcher.grammar_from_regex(text))
        return json.dumps({"grammars": [{"lark_grammar": f"{whole['grammars'][0]['lark_grammar']}\n{_FREE}"}]})
    try:
        whole = json.loads(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON))
    except ValueError as error:
        raise InvalidRequest(f"{_NAMES[kind]} can't be used: {error}") from None
    schema = whole["grammars"][0]["json_schema"]
    return json.dumps(
        {"grammars": [{"lark_grammar": f"start: @schema\n{_FREE}"}, {"name": "schema", "json_schema": schema}]}
    )


def limits() -> llguidance.LLParserLimits:
    """What compiling and following a grammar may cost; messages without the parser's insides."""
    return llguidance.LLParserLimits(verbose_errors=False)


def check(kind: Kind, text: str) -> None:
    """Raise InvalidRequest for a grammar that can't be used, naming the keyword or the place.

    May take a fraction of a second.
    """
    wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source(kind, text), limits=limits())
    if wrong:
        raise unusable(kind, messages[0])


def unusable(kind: Kind, why: str) -> InvalidRequest:
    """The error for a grammar that llguidance refuses."""
    keys = _KEYS.search(why)
    if keys is not None:
        names = keys.group(1).replace('"', "'")
        why = f"the keywords {names} are not supported" if "," in names else f"the keyword {names} is not supported"
    elif "coerce_one_of" in why:
        why = "the keyword 'oneOf' is supported only where its branches exclude each other; use 'anyOf'"
    elif "error: " in why:
        place = _PLACE.match(why)
        why = f"{place.group() if place else ''}{why.rpartition('error: ')[2]}"
    return InvalidRequest(f"{_NAMES[kind]} can't be used: {why.strip().splitlines()[0]}")

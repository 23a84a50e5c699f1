"""Text → instructions, with line and column in every error."""

from __future__ import annotations

import codecs
import difflib
from collections.abc import Mapping

from arriero.errors import ModelfileError
from arriero.modelfile.instruction import KEYED, NAMES, ROLES, Instruction, Modelfile
from arriero.modelfile.value import SPACE, Unclosed, fence_lines, invisible, read_value, skip_blanks

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_SMART_QUOTES = "“”„«»‘’"


def parse(source: str | bytes) -> Modelfile:
    """The instructions of a Modelfile; raises ModelfileError (`(line N, column M): …`)."""
    text = _decode(source) if isinstance(source, bytes) else source.removeprefix("\ufeff")
    lines = text.split("\n")
    fences = fence_lines(lines)
    found: list[Instruction] = []
    at = 0
    while at < len(lines):
        start = skip_blanks(lines[at], 0)
        if start == len(lines[at]) or lines[at][start] == "#":
            at += 1
            continue
        instruction, at = _instruction(lines, at, start, found, fences)
        found.append(instruction)
    if not any(instruction.name == "from" for instruction in found):
        raise _error(
            len(lines) - 1, 0, "no FROM line; a Modelfile needs one, e.g. FROM ./model.gguf or FROM the name of a model"
        )
    return Modelfile(tuple(found))


def _instruction(
    lines: list[str], at: int, start: int, before: list[Instruction], fences: Mapping[str, list[int]]
) -> tuple[Instruction, int]:
    line = lines[at]
    end = _word_end(line, start)
    word = _visible(line[start:end])
    name = word.lower()
    if name not in NAMES:
        raise _error(at, start, _unknown_word(word, before))
    key, value_start = "", skip_blanks(line, end)
    if name in KEYED:
        key_start = value_start
        end = _word_end(line, key_start)
        key, value_start = _visible(line[key_start:end]).lower(), skip_blanks(line, end)
        if name == "message" and key not in ROLES:
            raise _error(
                at, key_start, f'message role must be one of "system", "user", or "assistant"; found "{key[:40]}"'
            )
    if value_start == len(line):
        raise _error(at, start, f'{name.upper()} needs {KEYED.get(name, "a value")} on the same line ("" for none)')
    try:
        value, after = read_value(lines, at, value_start, fences)
    except Unclosed:
        raise _error(
            at, value_start, "unexpected EOF: no line ends with the quote that closes the text starting here"
        ) from None
    if name == "from" and not value:
        raise _error(at, value_start, "FROM needs a model name, a file or a folder")
    return Instruction(name, value, key, at + 1, start + 1), after


def _unknown_word(word: str, before: list[Instruction]) -> str:
    allowed = ", ".join(f'"{name}"' for name in NAMES[:-1]) + f', or "{NAMES[-1]}"'
    text = f'command must be one of {allowed}; found "{word[:40]}"'
    near = difflib.get_close_matches(word.lower(), NAMES, n=1, cutoff=0.75)
    if near:
        return f"{text}; did you mean {near[0].upper()}?"
    previous = before[-1] if before else None
    if previous is not None and previous.value[:1] in tuple(_SMART_QUOTES):
        text += f'; the text of {previous.name.upper()} in line {previous.line} starts with a typographic quote, use "'
    elif previous is not None and previous.name in ("system", "template", "license", "message"):
        text += (
            f"; if this belongs to the {previous.name.upper()} of line {previous.line}, use triple quotes: "
            f'{previous.name.upper()} """a text of several lines"""'
        )
    return text


def _decode(source: bytes) -> str:
    mark, encoding = next((pair for pair in _BOMS if source.startswith(pair[0])), (b"", "utf-8"))
    body = source[len(mark) :]
    try:
        return body.decode(encoding)
    except UnicodeDecodeError as error:
        before = body[: error.start].decode(encoding, errors="replace")
        line = before.count("\n")
        raise _error(
            line,
            len(before) - (before.rfind("\n") + 1),
            f"this byte is not {encoding.upper()}; save the file as UTF-8, or as UTF-16 with a byte-order mark",
        ) from None


def _word_end(line: str, at: int) -> int:
    while at < len(line) and line[at] not in SPACE:
        at += 1
    return at


def _visible(word: str) -> str:
    return "".join(character for character in word if not invisible(character))


def _error(line: int, column: int, text: str) -> ModelfileError:
    return ModelfileError(f"(line {line + 1}, column {column + 1}): {text}")

"""Threadgroup variables of a kernel, rewritten for C++."""

from __future__ import annotations

import re
from pathlib import Path

from tests.metal.harness.errors import MetalError

LITERAL = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
"""A comment, a string or a character."""


def line_offsets(path: Path) -> dict[str, int]:
    """First lines of header and body in the file, for messages."""
    out = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        m = re.match(r"//:\s*(header|body)\b", line)
        if m:
            out[m[1]] = number + 1
    return out


def lined_header(path: Path | None, label: str, header: str) -> str:
    """The header, each of its files with its own name and lines for messages."""
    if path is None:
        return f'#line 1 "{label}"\n{header}'
    lines = header.splitlines(keepends=True)
    parts = []
    for directive in re.findall(r"^//:\s*include\s+(.*)$", path.read_text(encoding="utf-8"), re.M):
        for name in directive.split():
            count = len((path.parent / name).read_text(encoding="utf-8").splitlines())
            parts.append(f'#line 1 "{name}"\n{"".join(lines[:count])}')
            lines = lines[count:]
    return "".join([*parts, f'#line {line_offsets(path).get("header", 1)} "{label}"\n', *lines])


def blank_comments(s: str) -> str:
    """The text with comments and literals blanked, same length."""
    return re.sub(LITERAL, lambda found: re.sub(r"[^\n]", " ", found[0]), s, flags=re.S)


DECLARE = 'msl_tg_{name}& {name} = msl::tg_var<msl_tg_{name}>({n}, "{name}");'


def rewrite_threadgroup(src: str, declare: str = DECLARE) -> str:
    """`threadgroup T a[N], b;` -> references into memory that the threadgroup shares.

    Pointers, references, parameters and casts keep the qualifier, a macro that is empty.
    """
    clean = blank_comments(src)
    out, pos, n = [], 0, 0
    for m in re.finditer(r"\bthreadgroup\b(?!\s*\()", clean):
        if m.start() < pos:
            continue
        before = re.sub(r"\balignas\s*\([^)]*\)\s*$", "", clean[: m.start()].rstrip()).rstrip()
        if before and before[-1] not in ";{}:":
            continue  # a parameter, a cast, a template argument
        end = clean.find(";", m.end())
        if end < 0:
            continue
        decl = clean[m.end() : end]
        depth, parts, last = 0, [], 0
        for i, ch in enumerate(decl):
            depth += (ch in "<([{") - (ch in ">)]}")
            if ch == "," and depth == 0:
                parts.append(decl[last:i])
                last = i + 1
        parts.append(decl[last:])
        head = parts[0].split("=")[0].strip()
        if re.search(r"[*&(]", re.sub(r"\[[^\]]*\]", "", head)):
            continue  # threadgroup T* p = ...;
        first = re.match(r"(?P<type>.*?)\b(?P<name>[A-Za-z_]\w*)\s*(?P<dims>(\[[^\]]*\]\s*)*)$", head, re.S)
        if not first:
            continue
        ty = first["type"].strip()
        if not ty:
            continue
        code = []
        for p in parts:
            if "=" in p:
                raise MetalError("compile", "a threadgroup variable cannot have an initialiser: threadgroup" + decl)
            q = re.match(r"(?:.*?)\b([A-Za-z_]\w*)\s*((?:\[[^\]]*\]\s*)*)$", p.strip(), re.S)
            name, dims = q[1], q[2].replace("\n", " ")
            line = ty.replace(chr(10), " ")
            code.append(f"typedef {line} msl_tg_{name} {dims}; " + declare.format(name=name, n=n))
            n += 1
        out.append(src[pos : m.start()] + " ".join(code) + "\n" * src[m.start() : end + 1].count("\n"))
        pos = end + 1
    return "".join(out) + src[pos:]

"""Pictures that a message names by their paths, typed or dropped into the terminal."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

_KINDS = r"\.(?:jpe?g|png|webp|gif|bmp)"
_PATH = re.compile(
    rf"""(?P<quote>["'])(?P<quoted>(?:~|\.{{1,2}})?/[^"'\n]*?{_KINDS})(?P=quote)"""
    rf"""|(?<![\w:/.~"'])(?P<bare>(?:~|\.{{1,2}})?/(?:\\.|[^\s\\"'])*?{_KINDS})(?![\w/.-]|\.\w)""",
    re.IGNORECASE,
)
"""A path that begins with `/`, `./`, `../` or `~/`: in quotes, or with its blanks escaped."""


def take_pictures(text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """`content`, and `images` (base64) where there are any, of a message to the model that these facts are of.

    The files that the text names go with it and their names go out of it, each with a line on stderr. What is no file
    stays text, and so does everything where the model doesn't see. ClickException for a file that cannot be read.
    """
    if "vision" not in (facts.get("capabilities") or ()):
        return {"content": text}
    images: list[str] = []

    def take(found: re.Match[str]) -> str:
        path = _path(found)
        if not path.is_file():
            click.echo(f"there is no picture at {path}; the name stays text", err=True)
            return found.group()
        try:
            images.append(base64.b64encode(path.read_bytes()).decode("ascii"))
        except OSError as error:
            raise click.ClickException(f"the picture {path} cannot be read: {error.strerror}") from None
        click.echo(f"added the picture {path}", err=True)
        return ""

    content = _PATH.sub(take, text)
    return {"content": content.strip(), "images": images} if images else {"content": text}


def begins_with_picture(text: str) -> bool:
    """Whether a message that begins with `/` begins with a picture's path rather than a command."""
    found = _PATH.match(text)
    return found is not None and _path(found).is_file()


def _path(found: re.Match[str]) -> Path:
    name = found["quoted"] or re.sub(r"\\(.)", r"\1", found["bare"])
    return Path(name).expanduser()

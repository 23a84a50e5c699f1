"""Writes docs/cli.md from the command line's own parser; `--check` only compares (a test does)."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from arriero.cli.chat.slash import HELP, HELP_KEYS, HELP_SET, HELP_SHOW
from arriero.cli.main import ALIASES, VERBS, cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

INTRODUCTION = """# Command line

This page is made from the parser by `tools/make_cli_docs.py`; change the help texts, not the page.

Results go to stdout; progress, prompts and errors to stderr. Exit codes: 0, 1 for an error (`Error: …` on stderr),
130 for an interrupt. Every verb talks to the server that `ARRIERO_HOST` (or `OLLAMA_HOST`) names; `run`, `create` and
`bench` start one when none answers, and say so.
"""

CONVERSATION = """## In a conversation

`arriero run MODEL` without a prompt talks with the model. A line that begins with `/` is a command; a message that
begins with three quotes goes on over lines until three more. Paths of [pictures](images.md) in it go with it.
"""


def page() -> str:
    """The whole page as text."""
    names = cli.context_settings["help_option_names"]
    context = click.Context(
        cli, info_name="arriero", max_content_width=100, terminal_width=100, help_option_names=names
    )
    parts = [INTRODUCTION, f"```\n{cli.get_help(context)}\n```\n"]
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command is not None
        aliases = [alias for alias, verb in ALIASES.items() if verb == name]
        also = f" (also `{'`, `'.join(aliases)}`)" if aliases else ""
        with click.Context(command, info_name=name, parent=context, max_content_width=100, terminal_width=100) as own:
            parts.append(f"## {name}{also}\n\n```\n{command.get_help(own)}\n```\n")
    parts.append(CONVERSATION)
    parts += [f"```\n{text}\n```\n" for text in (HELP, HELP_SET, HELP_SHOW, HELP_KEYS)]
    return "\n".join(parts)


def main() -> int:
    """Write or check the page; 1 when it differs."""
    text = page()
    if "--check" in sys.argv:
        return int(not PAGE.exists() or PAGE.read_text("utf-8") != text)
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

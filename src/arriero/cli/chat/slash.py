"""The slash commands of the conversation; each is one function in the table at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from arriero.errors import InvalidRequest
from arriero.options import OPTIONS, parse_parameter

if TYPE_CHECKING:
    from arriero.cli.chat.session import Session

HELP = """Available Commands:
  /set            Set session variables
  /show           Show model information
  /load <model>   Load a session or model
  /save <model>   Save your current session
  /clear          Clear session context
  /list           List models
  /bye            Exit
  /?, /help       Help for a command
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin a multi-line message."""

HELP_SET = """Available Commands:
  /set parameter NAME VALUE...  Set a parameter ("a b" = one value with a blank)
  /set system <string>          Set system message
  /set history                  Enable history
  /set nohistory                Disable history
  /set wordwrap                 Enable wordwrap
  /set nowordwrap               Disable wordwrap
  /set format json              Enable JSON mode
  /set noformat                 Disable formatting
  /set verbose                  Show LLM stats
  /set quiet                    Disable LLM stats
  /set think [LEVEL]            Enable thinking
  /set nothink                  Disable thinking"""

HELP_SHOW = """Available Commands:
  /show info         Show details for this model
  /show license      Show model license
  /show modelfile    Show Modelfile for this model
  /show parameters   Show parameters for this model
  /show system       Show system message
  /show template     Show prompt template"""

HELP_KEYS = """Available keyboard shortcuts:
  Ctrl + a            Move to the beginning of the line (Home)
  Ctrl + e            Move to the end of the line (End)
   Alt + b            Move back (left) one word
   Alt + f            Move forward (right) one word
  Ctrl + k            Delete the sentence after the cursor
  Ctrl + u            Delete the sentence before the cursor
  Ctrl + w            Delete the word before the cursor
  Ctrl + l            Clear the screen
  Ctrl + g            Edit the message in your editor
  Ctrl + j            Insert a new line (Alt + Enter too)
  Ctrl + c            Stop the model from responding
  Ctrl + d            Exit (/bye)"""

_EMPTY = {
    "license": "No license was specified for this model.",
    "modelfile": "No Modelfile was specified for this model.",
    "parameters": "No parameters were specified for this model.",
    "system": "No system message was specified for this model.",
    "template": "No prompt template was specified for this model.",
}
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_THINK_LEVELS = ("low", "medium", "high", "max")


class Leave(Exception):
    """The person wants to leave."""


def run_command(session: Session, text: str) -> None:
    """Run one slash command; an unknown one is answered with the way to the help."""
    word, _, rest = text.partition(" ")
    for names, command in _COMMANDS:
        if any(word == name or (name in ("/bye", "/exit") and word.startswith(name)) for name in names):
            command(session, rest.strip())
            return
    click.echo(f"Unknown command '{word}'. Type /? for help")


def _leave(session: Session, rest: str) -> None:
    raise Leave


def _help(session: Session, rest: str) -> None:
    topics = {"set": HELP_SET, "/set": HELP_SET, "show": HELP_SHOW, "/show": HELP_SHOW, "shortcuts": HELP_KEYS}
    click.echo(topics.get(rest, HELP))


def _clear(session: Session, rest: str) -> None:
    session.messages.clear()
    click.echo("Cleared session context")


def _list(session: Session, rest: str) -> None:
    from arriero.cli.commands.models import print_models

    print_models(session.client, rest)


def _load(session: Session, rest: str) -> None:
    if not rest:
        click.echo("Usage:\n  /load <modelname>")
        return
    click.echo(f"Loading model '{rest}'")
    if session.load(rest):
        session.messages.clear()
        session.options.clear()
        session.system = ""


def _save(session: Session, rest: str) -> None:
    if not rest:
        click.echo("Usage:\n  /save <modelname>")
        return
    # What the model's own MESSAGEs say is a part of the conversation, and a list replaces them.
    messages = [*(session.facts.get("messages") or []), *session.messages]
    body: dict[str, Any] = {"model": rest, "from": session.model, "messages": messages, "stream": False}
    if session.system:
        body["system"] = session.system
    if session.options:
        body["parameters"] = session.options
    session.client.call("POST", "/api/create", body)
    click.echo(f"Created new model '{rest}'")


def _show(session: Session, rest: str) -> None:
    if rest == "info":
        from arriero.cli.commands.show import render

        click.echo(render(session.facts), err=True)
        return
    if rest not in _EMPTY:
        click.echo(HELP_SHOW)
        return
    value = session.facts.get(rest) or ""
    if rest == "system" and session.system:
        value = session.system
    if rest == "parameters" and session.options:
        value = (
            "User defined parameters:\n"
            + "\n".join(
                f"{name:<30} {json.dumps(item)}"
                for name, given in session.options.items()
                for item in (given if isinstance(given, list) else [given])
            )
            + (f"\n\nModel defined parameters:\n{value}" if value else "")
        )
    click.echo(value or _EMPTY[rest])


def _set(session: Session, rest: str) -> None:
    what, _, value = rest.partition(" ")
    handler = _SETTERS.get(what)
    if handler is None:
        click.echo(HELP_SET if not what else f"Unknown command '/set {what}'. Type /? for help")
        return
    handler(session, value.strip())


def _set_parameter(session: Session, rest: str) -> None:
    name, *values = (quoted or bare for quoted, bare in _WORD.findall(rest)) if rest else ("",)
    if not values:
        click.echo("Usage:\n  /set parameter NAME VALUE...")
        return
    if name not in OPTIONS:
        click.echo(f"Couldn't set parameter: \"unknown parameter '{name}'\"")
        return
    try:
        session.options[name] = parse_parameter(name, values)
    except InvalidRequest as error:
        click.echo(f'Couldn\'t set parameter: "{error}"')
        return
    click.echo(f"Set parameter '{name}' to '{', '.join(values)}'")


def _set_system(session: Session, rest: str) -> None:
    text = rest.removeprefix('"""').removesuffix('"""').strip()
    if not text:
        click.echo("Usage:\n  /set system <message>")
        return
    session.system = text
    click.echo("Set system message.")


def _set_history(on: bool) -> Callable[[Session, str], None]:
    def setter(session: Session, rest: str) -> None:
        if session.reader is not None:
            session.reader.keep_history(on)
        click.echo(f"Set '{'history' if on else 'nohistory'}' mode.")

    return setter


def _set_wrap(on: bool) -> Callable[[Session, str], None]:
    def setter(session: Session, rest: str) -> None:
        session.wrap = on
        click.echo(f"Set '{'wordwrap' if on else 'nowordwrap'}' mode.")

    return setter


def _set_verbose(on: bool) -> Callable[[Session, str], None]:
    def setter(session: Session, rest: str) -> None:
        session.verbose = on
        click.echo(f"Set '{'verbose' if on else 'quiet'}' mode.")

    return setter


def _set_format(session: Session, rest: str) -> None:
    if rest != "json":
        click.echo("Invalid or missing format. For 'json' mode use '/set format json'")
        return
    session.request["format"] = "json"
    click.echo("Set format to 'json' mode.")


def _set_noformat(session: Session, rest: str) -> None:
    session.request.pop("format", None)
    click.echo("Disabled format.")


def _set_think(session: Session, rest: str) -> None:
    if rest and rest not in _THINK_LEVELS:
        click.echo(f'Couldn\'t set think level: "{rest}" is not one of {", ".join(_THINK_LEVELS)}')
        return
    session.request["think"] = rest or True
    click.echo(f"Set 'think' mode to '{rest}'." if rest else "Set 'think' mode.")


def _set_nothink(session: Session, rest: str) -> None:
    session.request["think"] = False
    click.echo("Set 'nothink' mode.")


_SETTERS: dict[str, Callable[[Session, str], None]] = {
    "parameter": _set_parameter,
    "system": _set_system,
    "history": _set_history(True),
    "nohistory": _set_history(False),
    "wordwrap": _set_wrap(True),
    "nowordwrap": _set_wrap(False),
    "verbose": _set_verbose(True),
    "quiet": _set_verbose(False),
    "format": _set_format,
    "noformat": _set_noformat,
    "think": _set_think,
    "nothink": _set_nothink,
}

_COMMANDS: list[tuple[tuple[str, ...], Callable[[Session, str], None]]] = [
    (("/bye", "/exit"), _leave),
    (("/?", "/help"), _help),
    (("/clear",), _clear),
    (("/list", "/ls"), _list),
    (("/load",), _load),
    (("/save",), _save),
    (("/show",), _show),
    (("/set",), _set),
]

"""`arriero run`: one question, or a conversation."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from arriero.cli.autostart import connect_or_start
from arriero.cli.chat.output import Printer, print_statistics
from arriero.cli.client import ApiError, Client
from arriero.cli.pictures import take_pictures
from arriero.durations import parse_keep_alive
from arriero.errors import InvalidRequest
from arriero.settings import Settings

_THINK = ("true", "false", "high", "medium", "low", "max")


class RunCommand(click.Command):
    """`run`, whose `--think` takes the next word as its value only where that is one: it may be the prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words of the command line, a bare `--think` written out."""
        end = args.index("--") if "--" in args else len(args)
        for at in range(end):
            if args[at] == "--think" and not (at + 1 < end and args[at + 1] in _THINK):
                args = [*args[:at], "--think=true", *args[at + 1 :]]
        return super().parse_args(ctx, args)


@click.command("run", cls=RunCommand, context_settings={"ignore_unknown_options": False})
@click.argument("model")
@click.argument("prompt", nargs=-1)
@click.option("--keepalive", help="How long the model stays loaded (5m, 300, -1 for ever).")
@click.option("--verbose", is_flag=True, help="Show timings after each reply.")
@click.option("--nowordwrap", is_flag=True, help="Don't wrap lines at words.")
@click.option("--format", "format_", help="Reply format: json, or a JSON schema.")
@click.option(
    "--think", is_flag=False, flag_value="true", default=None, help="Think first: true, false, low, medium, high, max."
)
@click.option("--hidethinking", is_flag=True, help="Don't show the thinking.")
@click.option("--insecure", is_flag=True, help="Where the model must be pulled first: by plain HTTP.")
def run(
    model: str,
    prompt: tuple[str, ...],
    keepalive: str | None,
    verbose: bool,
    nowordwrap: bool,
    format_: str | None,
    think: str | None,
    hidethinking: bool,
    insecure: bool,
) -> int:
    """Ask MODEL the PROMPT, with what is piped in; without a prompt, talk with it."""
    settings = Settings.from_environ()
    options: dict[str, Any] = {}
    if keepalive is not None:
        options["keep_alive"] = _keep_alive(keepalive)
    if think is not None:
        options["think"] = _think(think)
    if format_:
        options["format"] = _format(format_)
    piped = _piped_text()
    client = connect_or_start(settings)
    facts = _show(client, model, insecure=insecure)
    if not prompt and piped is None:
        from arriero.cli.chat.session import Session

        return Session(
            client, model, facts, settings, options, verbose=verbose, wrap=not nowordwrap, hide_thinking=hidethinking
        ).loop()
    # Only what a person types names pictures: a text that is piped in sends no files.
    asked = take_pictures(" ".join(filter(None, map(_argument, prompt))), facts)
    text = " ".join(filter(None, (piped, asked.pop("content"))))
    if not text and not asked:
        client.call("POST", "/api/generate", {"model": model, "stream": False, **options})
        return 0
    body = {"model": model, "prompt": text, **asked, **options}
    return ask(client, body, verbose=verbose, wrap=not nowordwrap, hide=hidethinking)


def ask(client: Client, body: dict[str, Any], *, verbose: bool, wrap: bool, hide: bool) -> int:
    """One `/api/generate` request, streamed to stdout; the exit code is 1 when the reply was cut off by an error."""
    printer = Printer(wrap=wrap, hide_thinking=hide)
    final: dict[str, Any] | None = None
    try:
        for chunk in client.stream("POST", "/api/generate", body):
            printer.thinking(chunk.get("thinking") or "")
            printer.content(chunk.get("response") or "")
            if chunk.get("done"):
                final = chunk
    finally:
        printer.end()
    if final is None:
        raise click.ClickException("the reply ended before it was complete; see the server's log")
    if verbose:
        print_statistics(final)
    return 0


def _show(client: Client, model: str, *, insecure: bool) -> dict[str, Any]:
    """What is known of the model, which is pulled first when it is not there."""
    try:
        facts: dict[str, Any] = client.call("POST", "/api/show", {"model": model})
    except ApiError as error:
        if error.status != 404:
            raise
        from arriero.cli.commands.transfer import pull_model

        try:
            pull_model(client, model, insecure=insecure)
        except ApiError as failure:
            names = [m["name"] for m in client.call("GET", "/api/tags")["models"]]
            have = f"there are {', '.join(names)}" if names else "there are none yet"
            raise click.ClickException(
                f"model '{model}' not found here ({have}), and it cannot be pulled: {failure}"
            ) from None
        facts = client.call("POST", "/api/show", {"model": model})
    return facts


def _piped_text() -> str | None:
    """All of stdin when it is not a terminal (nothing when it is closed); None when it is one."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    if sys.stdin.isatty():
        return None
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def _argument(text: str) -> str:
    """An argument as the UTF-8 that it is, also where the locale says something else."""
    return os.fsencode(text).decode("utf-8", "replace")


def _keep_alive(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        parse_keep_alive(text)
        return text


def _think(text: str) -> bool | str:
    if text not in _THINK:
        raise InvalidRequest(f'invalid value for --think: "{text}" (must be true, false, high, medium, low, or max)')
    return {"true": True, "false": False}.get(text, text)


def _format(text: str) -> Any:
    if text == "json":
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRequest("--format must be 'json' or a JSON schema") from None

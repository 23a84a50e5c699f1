"""The command `arriero`: verbs are loaded only when they are called, so that none waits for another's imports."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from arriero.errors import ArrieroError

# verb → (module under arriero.cli.commands, attribute, one-line help shown in the list of verbs)
VERBS: dict[str, tuple[str, str, str]] = {
    "serve": ("serve", "serve", "Start the server"),
    "run": ("run", "run", "Ask a model, once or in a conversation"),
    "create": ("create", "create", "Make a model from a Modelfile"),
    "pull": ("transfer", "pull", "Pull a model from a registry"),
    "push": ("transfer", "push", "Push a model to a registry"),
    "show": ("show", "show", "Show what is known of a model"),
    "list": ("models", "list_models", "List models"),
    "ps": ("models", "ps", "List running models"),
    "stop": ("models", "stop", "Unload a running model"),
    "cp": ("models", "cp", "Copy a model"),
    "rm": ("models", "rm", "Remove models"),
    "verify": ("transfer", "verify", "Check stored models"),
    "bench": ("bench", "bench", "Measure speed, or what quantising cost"),
}
ALIASES = {"ls": "list", "start": "serve"}


class LazyGroup(click.Group):
    """A group that knows its verbs' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = VERBS.get(ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command = getattr(importlib.import_module(f"arriero.cli.commands.{entry[0]}"), entry[1])
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.ClickException(f'unknown command "{args[0]}" for "arriero"')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, _, help_text) in VERBS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("-v", "--version", is_flag=True, help="Show the versions of this program and of the running server.")
@click.pass_context
def cli(ctx: click.Context, version: bool) -> None:
    """Run large language models on your own machine."""
    if version:
        from arriero.cli.commands.version import show_version

        show_version()
        ctx.exit()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; errors go to stderr as `Error: …`. Exit codes: 0, 1 for errors, 130 for an interrupt."""
    _prepare_streams()
    sys.exit(_run(args))


def _prepare_streams() -> None:
    """Make writing safe wherever it goes: text is UTF-8 whatever the locale says, and a closed stream is /dev/null."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            # Left free, the number would go to the next file or socket that is opened.
            os.open(os.devnull, os.O_RDWR)
        if number:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (lives as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _run(args: Sequence[str] | None) -> int:
    try:
        result: Any = cli.main(args=None if args is None else list(args), prog_name="arriero", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.ClickException as error:
        return _fail(error.format_message())
    except ArrieroError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of our output is gone (`arriero list | head -1`): nobody to tell, and nothing went wrong here.
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Send what is still buffered nowhere, or it would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fail(message: str) -> int:
    click.echo(f"Error: {message}", err=True)
    return 1

"""`arriero --version`."""

from __future__ import annotations

import click

from arriero import __version__
from arriero.cli.client import ApiError, Client
from arriero.errors import ServerUnreachable
from arriero.settings import Settings


def show_version() -> None:
    """Our version, and a warning when no server answers or it speaks for another program."""
    click.echo(f"arriero version is {__version__}")
    client = Client.from_settings(Settings.from_environ())
    try:
        reply = client.call("GET", "/api/version")
    except (ServerUnreachable, ApiError):
        click.echo(f"Warning: no server answers at {client.address}", err=True)
        return
    ours = reply.get("arriero")
    if ours is None:
        click.echo(f"Warning: the server at {client.address} is Ollama {reply.get('version')}, not arriero", err=True)
    elif ours != __version__:
        click.echo(f"Warning: the server at {client.address} is arriero {ours}", err=True)

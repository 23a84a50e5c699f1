"""`arriero serve`."""

from __future__ import annotations

import click

from arriero.settings import Settings


@click.command("serve")
def serve() -> None:
    """Start the server. All settings come from the environment (see docs/settings.md)."""
    from arriero.server.app import serve as run_server

    run_server(Settings.from_environ())

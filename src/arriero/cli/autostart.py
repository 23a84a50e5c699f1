"""Starts a server when none answers, for the verbs that need one to be of any use (`run`, `create`)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click

from arriero.cli.client import Client
from arriero.errors import ServerUnreachable
from arriero.settings import DEFAULT_HOST, Settings

_PATIENCE = 30.0


def connect_or_start(settings: Settings) -> Client:
    """A client of a server that answers; starts one in the background when none does, and says so on stderr.

    Only for an address of this machine: a remote one that does not answer is an error.
    """
    client = Client.from_settings(settings)
    if client.is_up():
        return client
    if client.host not in (DEFAULT_HOST, "localhost", "::1"):
        raise ServerUnreachable(f"no server answers at {client.address}; it is not on this machine, so start it there")
    log_path = settings.home / "logs" / "server.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        # A session of its own: Ctrl-C in this terminal must not end a server that others may use by then.
        process = subprocess.Popen(
            [sys.executable, "-m", "arriero", "serve"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    click.echo(f"no server answered at {client.address}: started one (pid {process.pid}, log {log_path})", err=True)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if client.is_up(timeout=1.0):
            return client
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise ServerUnreachable(f"the server did not start: {_last_line(log_path)} (whole log: {log_path})")


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it wrote no log"

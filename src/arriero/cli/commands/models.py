"""Verbs on models that are there: `list`, `ps`, `stop`, `cp`, `rm`."""

from __future__ import annotations

from contextlib import suppress

import click

from arriero.cli import human
from arriero.cli.client import ApiError, Client
from arriero.settings import Settings


def connect() -> Client:
    """A client for the server that the environment names."""
    return Client.from_settings(Settings.from_environ())


def print_models(client: Client, prefix: str = "") -> None:
    """The table of `arriero list` on stdout."""
    models = client.call("GET", "/api/tags")["models"]
    rows = []
    for m in models:
        if not m["name"].lower().startswith(prefix.lower()):
            continue
        rows.append((m["name"], m["digest"][:12], human.size(m["size"]), human.ago(m["modified_at"])))
        if draft := m.get("draft"):
            what = " ".join(filter(None, (draft.get("architecture"), draft.get("quantization_level"))))
            rows.append((f"  + draft {what}", "", human.size(draft["size"]), ""))
    click.echo(human.table(("NAME", "ID", "SIZE", "MODIFIED"), rows))


@click.command("list")
@click.argument("prefix", default="")
def list_models(prefix: str) -> None:
    """List models, newest first; PREFIX limits the list to names that start with it."""
    print_models(connect(), prefix)


@click.command("ps")
@click.argument("prefix", default="")
def ps(prefix: str) -> None:
    """List running models with their memory, context window and time left."""
    rows = [
        (
            m["name"],
            m["digest"][:12],
            human.size(m["size"]),
            human.processor(m["size"], m["size_vram"]),
            str(m.get("context_length", "")),
            human.until(m["expires_at"]),
        )
        for m in connect().call("GET", "/api/ps")["models"]
        if m["name"].lower().startswith(prefix.lower())
    ]
    click.echo(human.table(("NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"), rows))


@click.command("stop")
@click.argument("model")
def stop(model: str) -> None:
    """Unload MODEL from memory."""
    try:
        connect().call("POST", "/api/generate", {"model": model, "keep_alive": 0})
    except ApiError as error:
        if error.status == 404:
            raise click.ClickException(f'couldn\'t find model "{model}" to stop') from None
        raise


@click.command("cp")
@click.argument("source")
@click.argument("destination")
def cp(source: str, destination: str) -> None:
    """Copy a model; the copy shares the weights."""
    connect().call("POST", "/api/copy", {"source": source, "destination": destination})
    click.echo(f"copied '{source}' to '{destination}'")


@click.command("rm")
@click.argument("models", nargs=-1, required=True)
def rm(models: tuple[str, ...]) -> None:
    """Unload and remove models; stops at the first that cannot be removed."""
    client = connect()
    for model in models:
        with suppress(ApiError):  # whatever is wrong with it, what counts is whether it can be removed
            client.call("POST", "/api/generate", {"model": model, "keep_alive": 0})
        client.call("DELETE", "/api/delete", {"model": model})
        click.echo(f"deleted '{model}'")

"""Moving models to and from registries: `pull`, `push`; and `verify`, which checks what arrived."""

from __future__ import annotations

import click

from arriero.cli.autostart import connect_or_start
from arriero.cli.client import Client
from arriero.cli.progress import Progress
from arriero.settings import Settings
from arriero.store.names import DEFAULT_HOST, Name

_INSECURE = click.option("--insecure", is_flag=True, help="Reach the registry by plain HTTP.")


def pull_model(client: Client, model: str, *, insecure: bool = False) -> None:
    """Pull a model, with bars on stderr."""
    with Progress() as progress:
        progress.follow(client.stream("POST", "/api/pull", {"model": model, "insecure": insecure}))


@click.command("pull")
@click.argument("model")
@_INSECURE
def pull(model: str, insecure: bool) -> None:
    """Pull MODEL from its registry, or from Hugging Face's hub (hf.co/OWNER/REPOSITORY[:QUANTISATION]).

    What has arrived is kept when it breaks off; the next pull goes on from there.
    """
    pull_model(connect_or_start(Settings.from_environ()), model, insecure=insecure)


@click.command("push")
@click.argument("model")
@_INSECURE
def push(model: str, insecure: bool) -> None:
    """Push MODEL to the registry that its name says."""
    client = connect_or_start(Settings.from_environ())
    with Progress() as progress:
        progress.follow(client.stream("POST", "/api/push", {"model": model, "insecure": insecure}))
    name = Name.parse(model)
    if name.host == DEFAULT_HOST:
        click.echo(f"You can find your model at:\n\n\thttps://ollama.com/{name.namespace}/{name.model}")


@click.command("verify")
@click.argument("model", default="")
@click.option("--repair", is_flag=True, help="Delete damaged blobs, so that the next pull fetches them again.")
def verify(model: str, repair: bool) -> int:
    """Check MODEL, or all models: every file is hashed and read again. The exit code is 1 when something is wrong."""
    client = connect_or_start(Settings.from_environ())
    problems: list[str] = []
    with Progress() as progress:
        for update in client.stream("POST", "/api/verify", {"model": model, "repair": repair}):
            if "problem" in update:
                problems.append(update["problem"])
            elif update.get("total"):
                progress.show(update["status"], update.get("completed", 0), update["total"])
    for problem in problems:
        click.echo(problem)
    if not problems:
        click.echo(f"{model or 'all models'}: no problems")
    return int(bool(problems))

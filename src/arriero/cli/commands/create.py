"""`arriero create`."""

from __future__ import annotations

from pathlib import Path

import click

from arriero.cli.autostart import connect_or_start
from arriero.cli.client import Client
from arriero.cli.progress import Progress
from arriero.settings import Settings


@click.command("create")
@click.argument("model")
@click.option(
    "-f", "--file", "file", type=click.Path(path_type=Path), help="The Modelfile (default: ./Modelfile, else FROM .)."
)
@click.option("-q", "--quantize", help="Quantise while importing (for example nvfp4).")
@click.option("--draft-quantize", help="Quantise the DRAFT model while importing.")
def create(model: str, file: Path | None, quantize: str | None, draft_quantize: str | None) -> None:
    """Make MODEL from a Modelfile, whose FROM is a folder, a .gguf file or a model."""
    from arriero.create.gather import gather
    from arriero.modelfile import parse

    path = file or Path("Modelfile")
    if path.is_dir() or (file is not None and not path.exists()):
        raise click.ClickException(f"there is no Modelfile at {path}")
    if path.exists():
        # Not only plain files: `-f /dev/stdin` and `-f <(…)` are pipes, whose relative paths start here.
        instructions = parse(path.read_bytes())
        folder = path.resolve().parent if path.is_file() else Path.cwd()
    else:
        instructions, folder = parse("FROM .\n"), Path.cwd()
    with Progress() as progress:
        progress.show("gathering model components")
        gathered = gather(instructions, folder)
        client = connect_or_start(Settings.from_environ())
        for digest, source in gathered.uploads.items():
            _upload(client, digest, source, progress)
        body = {**gathered.body, "model": model}
        if quantize:
            body["quantize"] = quantize
        if draft_quantize:
            body["draft_quantize"] = draft_quantize
        progress.follow(client.stream("POST", "/api/create", body))


def _upload(client: Client, digest: str, path: Path, progress: Progress) -> None:
    if client.has_blob(digest):
        return
    status = f"copying file {digest[:19]}"
    client.upload(digest, path, lambda done, total: progress.show(status, done, total))

"""`arriero create`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arriero.cli.autostart import connect_or_start
from arriero.cli.client import Client
from arriero.cli.progress import Progress
from arriero.errors import NotFound
from arriero.settings import Settings

if TYPE_CHECKING:
    from arriero.modelfile import Modelfile
    from arriero.store.model import StoredModel
    from arriero.store.store import Store

_LONG = 64 << 20
"""Bytes of a file whose hashing is shown."""


@click.command("create")
@click.argument("model")
@click.option(
    "-f", "--file", "file", type=click.Path(path_type=Path), help="The Modelfile (default: ./Modelfile, else FROM .)."
)
@click.option("-q", "--quantize", help="Quantise while importing: nvfp4, mxfp4, mxfp8, int4, int8, or plain bf16, f16.")
@click.option("--no-scale-search", is_flag=True, help="Take the first scale of each group, not the best: faster.")
@click.option("--dry-run", is_flag=True, help="Print what would become of each tensor, and stop.")
@click.option("--draft-quantize", help="Quantise the DRAFT model while importing.")
def create(
    model: str,
    file: Path | None,
    quantize: str | None,
    no_scale_search: bool,
    dry_run: bool,
    draft_quantize: str | None,
) -> None:
    """Make MODEL from a Modelfile, whose FROM is a folder, a .gguf file or a model."""
    from arriero.create.gather import gather
    from arriero.create.precisions import parse_precision
    from arriero.modelfile import parse
    from arriero.store.names import Name

    # What the server would refuse anyway is refused before gigabytes are hashed and sent.
    Name.parse(model)
    for precision in (quantize, draft_quantize):
        if precision:
            parse_precision(precision)
    path = file or Path("Modelfile")
    if path.is_dir() or (file is not None and not path.exists()):
        raise click.ClickException(f"there is no Modelfile at {path}")
    if path.exists():
        # Not only plain files: `-f /dev/stdin` and `-f <(…)` are pipes, whose relative paths start here.
        instructions = parse(path.read_bytes())
        folder = path.resolve().parent if path.is_file() else Path.cwd()
    else:
        instructions, folder = parse("FROM .\n"), Path.cwd()
    if draft_quantize and not instructions.all("draft"):
        raise click.ClickException("--draft-quantize requires a DRAFT model")
    if dry_run:
        _print_plan(instructions, folder, quantize or "", draft_quantize or "")
        return
    with Progress() as progress:
        progress.show("gathering model components")

        def hashed(name: str, done: int, size: int) -> None:
            if size >= _LONG:
                progress.show(f"hashing {name}", done, size)

        gathered = gather(instructions, folder, hashed)
        client = connect_or_start(Settings.from_environ())
        for digest, source in gathered.uploads.items():
            _upload(client, digest, source, progress)
        body = {**gathered.body, "model": model}
        if quantize:
            body["quantize"] = quantize
        if draft_quantize:
            body["draft_quantize"] = draft_quantize
        if quantize or draft_quantize:
            body["scale_search"] = not no_scale_search
        progress.follow(client.stream("POST", "/api/create", body))


def _print_plan(instructions: Modelfile, folder: Path, quantize: str, draft_quantize: str) -> None:
    """Tensor groups, their number, what they are and become, and the bytes of that; the sum last."""
    from arriero.cli.human import size, table
    from arriero.create.dry_run import dry_run
    from arriero.create.gather import adapter_files, draft_sources, sources
    from arriero.store.store import Store

    store = Store.from_settings(Settings.from_environ())
    name, files = sources(instructions, folder)
    draft_name, draft_files = draft_sources(instructions, folder)
    model = files if name is None else _stored(store, "FROM", name)
    draft = (draft_files or None) if draft_name is None else _stored(store, "DRAFT", draft_name)
    adapters = adapter_files(instructions, folder)
    groups = dry_run(model, quantize, adapters=adapters, draft=draft, draft_precision=draft_quantize)
    rows = [[g.name, str(g.count), g.source, g.target, size(g.target_bytes)] for g in groups]
    before, after = sum(g.source_bytes for g in groups), sum(g.target_bytes for g in groups)
    rows.append(["all", str(sum(g.count for g in groups)), size(before), size(after), f"{after} bytes"])
    click.echo(table(["TENSORS", "COUNT", "SOURCE", "TARGET", "SIZE"], rows))


def _stored(store: Store, verb: str, name: str) -> StoredModel:
    """A model that an instruction names; a dry run pulls nothing."""
    try:
        return store.get(name)
    except NotFound:
        raise click.ClickException(
            f"{verb} {name} is no file, no folder and no model of the store at {store.root}; a dry run pulls nothing"
        ) from None


def _upload(client: Client, digest: str, path: Path, progress: Progress) -> None:
    if client.has_blob(digest):
        return
    status = f"copying file {digest[:19]}"
    client.upload(digest, path, lambda done, total: progress.show(status, done, total))

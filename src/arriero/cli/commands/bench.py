"""`arriero bench`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from arriero.cli import human
from arriero.cli.autostart import connect_or_start
from arriero.settings import Settings


@click.command("bench")
@click.argument("model")
@click.option(
    "-p", "--prompt", "prompts", type=int, multiple=True, help="Words of the prompt; may repeat (default 400)."
)
@click.option("-n", "--tokens", default=128, show_default=True, help="New tokens of each reply.")
@click.option(
    "-c", "--parallel", "parallels", type=int, multiple=True, help="Requests at once; may repeat (default 1)."
)
@click.option("-r", "--runs", default=3, show_default=True, help="Runs of each setting, after one warm-up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def bench(
    model: str, prompts: tuple[int, ...], tokens: int, parallels: tuple[int, ...], runs: int, as_json: bool
) -> None:
    """Measure the speed of MODEL as a client sees it; medians over the runs."""
    from arriero.bench.speed import measure

    client = connect_or_start(Settings.from_environ())
    results = [
        measure(client, model, words=words, tokens=tokens, parallel=parallel, runs=runs)
        for words in prompts or (400,)
        for parallel in parallels or (1,)
    ]
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=2))
        return
    rows = [
        (
            str(r.prompt_tokens),
            str(r.parallel),
            f"{r.prefill:.1f}",
            f"{r.decode:.1f}",
            f"{r.total:.1f}",
            f"{1000 * r.first_token:.0f} ms",
            f"{100 * r.spread:.0f} %",
        )
        for r in results
    ]
    header = ("PROMPT", "PARALLEL", "PREFILL TOK/S", "DECODE TOK/S", "TOTAL TOK/S", "FIRST TOKEN", "SPREAD")
    click.echo(human.table(header, rows))

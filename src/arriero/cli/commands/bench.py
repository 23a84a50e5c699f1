"""`arriero bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arriero.cli import human
from arriero.cli.autostart import connect_or_start
from arriero.settings import Settings

if TYPE_CHECKING:
    from arriero.bench.compared import Comparison

GPU = "gpu"
"""In the place of a model: the kernels of this machine's GPU. A model of that name is `gpu:latest`."""

_SPEED_OPTIONS = ("prompts", "tokens", "parallels", "runs")
_QUALITY_OPTIONS = ("text", "most", "window", "dtype", "plot")


@click.command("bench")
@click.argument("models", nargs=-1, required=True, metavar="MODEL [REFERENCE]")
@click.option(
    "-p", "--prompt", "prompts", type=int, multiple=True, help="Words of the prompt; may repeat (default 400)."
)
@click.option("-n", "--tokens", default=128, show_default=True, help="New tokens of each reply.")
@click.option(
    "-c", "--parallel", "parallels", type=int, multiple=True, help="Requests at once; may repeat (default 1)."
)
@click.option("-r", "--runs", default=3, show_default=True, help="Runs of each setting, after one warm-up.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quality", is_flag=True, help="Measure what MODEL lost against REFERENCE, instead of speed.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The text that --quality reads (default: some 2,200 tokens that come with arriero).",
)
@click.option("--most", type=click.IntRange(min=2), help="Tokens of the text that --quality reads at most.")
@click.option(
    "--window", type=click.IntRange(min=2), default=2048, show_default=True, help="Tokens of context of --quality."
)
@click.option("--dtype", help="Activations of --quality: float32, bfloat16 or float16 (default: REFERENCE's own).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw what --quality or gpu found.")
@click.option(
    "--served",
    multiple=True,
    metavar="SHAPE",
    help="Of gpu: measure a shape through server, runner and stream too; may repeat.",
)
@click.pass_context
def bench(
    ctx: click.Context,
    models: tuple[str, ...],
    prompts: tuple[int, ...],
    tokens: int,
    parallels: tuple[int, ...],
    runs: int,
    as_json: bool,
    quality: bool,
    text: Path | None,
    most: int | None,
    window: int,
    dtype: str | None,
    plot: Path | None,
    served: tuple[str, ...],
) -> None:
    """Measure the speed of MODEL as a client sees it; medians over the runs.

    With --quality: perplexity, divergence of each token's distribution and error of the weights of MODEL against
    REFERENCE, in this process, without the server. Both are stored models, folders or GGUF files.

    `arriero bench gpu` measures the kernels on this machine's NVIDIA GPU beside plain MLX, and `arriero bench gpu
    SHAPE …` whole models of published shapes (Qwen3-8B, Qwen3.8-27B, Gemma-4-31B, …) with random weights, beside mlx-lm
    where that is installed; --served SHAPE measures one through a server of its own, as a client sees it.
    """
    if models[0] == GPU:
        taken = tuple(name for name in (*_SPEED_OPTIONS, *_QUALITY_OPTIONS, "quality") if name != "plot")
        _refuse_others(ctx, taken, "goes without gpu")
        _gpu(models[1:], as_json, plot, served)
        return
    _refuse_others(ctx, ("served",), "belongs to gpu")
    wrong = "goes without --quality" if quality else "belongs to --quality"
    _refuse_others(ctx, _SPEED_OPTIONS if quality else _QUALITY_OPTIONS, wrong)
    if not quality:
        if len(models) != 1:
            raise click.UsageError(f"speed is measured of one model, {len(models)} were given (two need --quality)")
        _speed(models[0], prompts, tokens, parallels, runs, as_json)
        return
    if len(models) != 2:
        raise click.UsageError(f"--quality compares MODEL with REFERENCE, two models; {len(models)} given")
    found = _compare(*models, text, most or 0, window, dtype or "", plot)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else render(found))


def _refuse_others(ctx: click.Context, names: tuple[str, ...], what: str) -> None:
    """No option is without effect."""
    given = [name for name in names if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        flags = {p.name: p.opts[-1] for p in ctx.command.params}
        raise click.UsageError(f"{flags[given[0]]} {what}")


def _speed(
    model: str, prompts: tuple[int, ...], tokens: int, parallels: tuple[int, ...], runs: int, as_json: bool
) -> None:
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


def _gpu(names: tuple[str, ...], as_json: bool, plot: Path | None, served: tuple[str, ...]) -> None:
    from arriero.bench.gpu import measure
    from arriero.cli.gpu_tables import render as tables

    if plot is not None:
        from arriero.bench.plot import check_plotting

        check_plotting(plot)
    report = measure(names, lambda what: click.echo(what, err=True), through_server=served)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else tables(report))
    if plot is not None:
        from arriero.bench.gpu_plot import plot as draw

        draw(report, plot)


def _compare(
    candidate: str, reference: str, text: Path | None, most: int, window: int, dtype: str, plot: Path | None
) -> Comparison:
    from arriero.bench.compared import DEFAULT_TEXT, compare_models, find
    from arriero.cli.progress import Progress
    from arriero.store.store import Store

    if plot is not None:
        from arriero.bench.plot import check_plotting

        check_plotting(plot)
    try:
        content = (text or DEFAULT_TEXT).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"--text {text} is not UTF-8: {error}") from None
    store = Store.from_settings(Settings.from_environ())
    sides = find(reference, store), find(candidate, store)
    with Progress() as progress:
        found = compare_models(
            *sides,
            content,
            text_name=str(text) if text else "the default text",
            tokens=most,
            window=window,
            dtype=dtype,
            progress=progress.show,
        )
    if plot is not None:
        from arriero.bench.plot import plot as draw

        draw(found, plot)
    return found


def render(found: Comparison) -> str:
    """The figures of a comparison as text."""
    q = found.quality
    head = (
        f"{found.candidate} against {found.reference}: {q.tokens} tokens of {found.text} in windows of {found.window}, "
        f"activations {found.dtype}"
    )
    ratio = found.candidate_bytes / found.reference_bytes if found.reference_bytes else 0.0
    sizes = [
        ("size", human.size(found.reference_bytes), human.size(found.candidate_bytes), f"× {ratio:.3f}"),
        ("perplexity", f"{q.reference_perplexity:.4f}", f"{q.perplexity:.4f}", f"{100 * (q.ratio - 1):+.2f} %"),
    ]
    divergences = (
        f"{q.mean_divergence:.3e}",
        f"{q.high_divergence:.3e}",
        f"{q.largest_divergence:.3e}",
        f"{100 * q.same_likeliest:.2f} %",
    )
    groups = [
        (
            g.name,
            str(g.count),
            g.reference,
            g.candidate,
            human.size(g.reference_bytes),
            human.size(g.bytes),
            f"{100 * g.error:.3f} %",
            f"{100 * g.largest:.3f} %",
        )
        for g in found.weights.groups
    ]
    parts = [
        head,
        human.table(("", "REFERENCE", "MODEL", "CHANGE"), sizes),
        human.table(("MEAN KL", "99 % KL", "LARGEST KL", "SAME LIKELIEST TOKEN"), [divergences]),
        human.table(("WEIGHTS", "COUNT", "REFERENCE", "MODEL", "SIZE", "SIZE", "ERROR", "LARGEST"), groups)
        + f"\nall matrices: error {100 * found.weights.error:.3f} % (root mean square, relative)",
    ]
    for side, names in (
        (found.reference, found.weights.only_reference),
        (found.candidate, found.weights.only_candidate),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            parts.append(f"{len(names)} matrices of {side} have no partner of their name and shape: {shown}")
    return "\n\n".join(parts)

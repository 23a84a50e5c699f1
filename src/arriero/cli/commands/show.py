"""`arriero show`."""

from __future__ import annotations

from typing import Any

import click

from arriero.cli import human
from arriero.cli.commands.models import connect

_FIELDS = ("license", "modelfile", "parameters", "system", "template")


@click.command("show")
@click.argument("model")
@click.option("--license", "field", flag_value="license", help="Show only the licence.")
@click.option("--modelfile", "field", flag_value="modelfile", help="Show only the Modelfile.")
@click.option("--parameters", "field", flag_value="parameters", help="Show only the parameters.")
@click.option("--system", "field", flag_value="system", help="Show only the system message.")
@click.option("--template", "field", flag_value="template", help="Show only the template.")
@click.option("-v", "--verbose", is_flag=True, help="Show all metadata and every tensor.")
@click.pass_context
def show(ctx: click.Context, model: str, field: str | None, verbose: bool) -> None:
    """Show what is known of MODEL."""
    if len(_flags_given(ctx)) > 1:
        raise click.ClickException(
            "only one of '--license', '--modelfile', '--parameters', '--system', or '--template' can be specified"
        )
    reply = connect().call("POST", "/api/show", {"model": model, "verbose": verbose})
    click.echo(reply.get(field) or "" if field else render(reply, verbose))


def _flags_given(ctx: click.Context) -> list[str]:
    # Click keeps the last of several flags of one destination, so the exclusivity is read from the command line.
    import sys

    given = [name for name in _FIELDS if f"--{name}" in sys.argv]
    return given if ctx.params.get("field") else []


def render(reply: dict[str, Any], verbose: bool = False) -> str:
    """The sections of a `/api/show` reply as text."""
    sections = [_section("Model", _model_rows(reply))]
    if groups := reply.get("tensor_groups"):
        sections.append(_section("Quantization", _group_rows(groups)))
    if draft := reply.get("draft"):
        sections.append(_section("Draft", _draft_rows(draft)))
    if capabilities := reply.get("capabilities"):
        sections.append(_section("Capabilities", [(name,) for name in capabilities]))
    if parameters := reply.get("parameters"):
        rows = [tuple(line.split(maxsplit=1)) for line in parameters.splitlines() if line.strip()]
        sections.append(_section("Parameters", rows))
    if verbose:
        info = reply.get("model_info") or {}
        sections.append(_section("Metadata", [(key, _short(info[key])) for key in sorted(info)]))
        tensors = reply.get("tensors") or []
        tensors = tensors + ((reply.get("draft") or {}).get("tensors") or [])
        rows = [(t["name"], t["type"], str(list(t["shape"]))) for t in tensors]
        sections.append(_section("Tensors", rows))
    if system := reply.get("system"):
        sections.append(_section("System", [(line,) for line in _head(system)]))
    if licence := reply.get("license"):
        sections.append(_section("License", [(line,) for line in _head(licence)]))
    return "\n".join(sections)


def _model_rows(reply: dict[str, Any]) -> list[tuple[str, ...]]:
    info, details = reply.get("model_info") or {}, reply.get("details") or {}
    architecture = info.get("general.architecture") or details.get("family") or ""
    package = info.get("general.runs_through")
    rows = [
        ("architecture", f"{architecture} (through {package})" if package else architecture),
        ("parameters", details.get("parameter_size") or ""),
        ("context length", info.get(f"{architecture}.context_length", "")),
        ("embedding length", info.get(f"{architecture}.embedding_length", "")),
        ("quantization", details.get("quantization_level") or ""),
        ("requires", reply.get("requires") or ""),
    ]
    return [(name, str(value)) for name, value in rows if value not in ("", None)]


def _group_rows(groups: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each kind of tensor: name, how many, type, bytes."""
    return [(g["name"], str(g["count"]), g["type"], human.size(g["bytes"])) for g in groups]


def _draft_rows(draft: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        ("architecture", draft.get("architecture") or ""),
        ("parameters", draft.get("parameter_size") or ""),
        ("quantization", draft.get("quantization_level") or ""),
        ("size", human.size(draft["size"])),
    ]
    return [row for row in rows if row[1]] + _group_rows(draft.get("tensor_groups") or [])


def _section(title: str, rows: list[tuple[str, ...]]) -> str:
    columns = max((len(row) for row in rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
    lines = ["    " + "    ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([f"  {title}", *lines, ""])


def _short(value: Any) -> str:
    if isinstance(value, list):
        shown = " ".join(str(item) for item in value[:3])
        return f"[{shown} ...+{len(value) - 3} more]" if len(value) > 3 else f"[{shown}]"
    return str(value)


def _head(text: str, count: int = 2) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [*lines[:count], "..."] if len(lines) > count else lines

"""What `arriero bench gpu` found, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arriero.cli import human

if TYPE_CHECKING:
    from arriero.bench.gpu import ModelRun, Report
    from arriero.bench.gpu_flash_next import FlashNext
    from arriero.bench.gpu_mlx_lm import MlxLm


def render(report: Report) -> str:
    """Every figure of a report."""
    parts = [
        f"{report.device}: copy {report.copy / 1e9:.0f} GB/s, bfloat16 products {report.products / 1e12:.0f} TFLOP/s"
    ]
    if report.kernels:
        parts.append(_kernels(report))
    parts += [f"{name}, NVFP4, random weights\n{_model(run)}" for name, run in report.models.items()]
    for name, found in report.served.items():
        rows = [
            (
                str(speed.parallel),
                str(speed.prompt_tokens),
                f"{speed.decode:.1f}",
                f"{speed.streamed:.1f}",
                f"{speed.total:.1f}",
                f"{1000 * speed.first_token:.0f} ms",
            )
            for speed in found
        ]
        header = ("REQUESTS", "PROMPT", "DECODE TOK/S", "STREAMED TOK/S", "TOTAL TOK/S", "FIRST TOKEN")
        parts.append(f"{name}, NVFP4, random weights, through /api/generate\n{human.table(header, rows)}")
    if report.flash_next is not None:
        parts.append(_flash_next(report.flash_next))
    parts += [f"{name} was not measured: {why}" for name, why in report.failures.items()]
    parts += [f"{part} was not alone with the GPU: {why}" for part, why in report.disturbed.items()]
    return "\n\n".join(parts)


def _flash_next(found: FlashNext) -> str:
    rows = [
        ("decode, 512 held", f"{1000 * found.short:.2f} ms", f"{1 / found.short:.0f}", ""),
        *([("decode, 8 rows", f"{1000 * found.eight:.2f} ms", f"{8 / found.eight:.0f}", "")] if found.eight else []),
        *([("verify of 8 tokens", f"{1000 * found.verify:.2f} ms", "", "")] if found.verify else []),
        (f"decode, {found.prompt} held", f"{1000 * found.long:.2f} ms", f"{1 / found.long:.0f}", ""),
        (
            f"prompt, {found.read} of {found.prompt} tokens",
            f"{1000 * found.prefill:.0f} ms",
            f"{found.read / found.prefill:.0f}",
            human.size(found.prefill_bytes),
        ),
        ("its last chunk", f"{1000 * found.ours.seconds:.0f} ms", "", human.size(found.ours.bytes)),
    ]
    if found.plain is not None:
        rows.append(
            ("the same by plain MLX", f"{1000 * found.plain.seconds:.0f} ms", "", human.size(found.plain.bytes))
        )
    head = (
        f"Flash Next, {found.layers} layers, random weights of {human.size(found.weight_bytes)}; a table of "
        f"{human.size(found.table_bytes)} on the host, of which a token brings {found.host_bytes} bytes"
    )
    return f"{head}\n{human.table(('', 'TIME', 'TOK/S', 'MEMORY BESIDES'), rows)}"


def _shorter(lm: MlxLm, run: ModelRun) -> str:
    """Of a prompt that mlx-lm would have read for too long."""
    return "" if lm.prompt == run.prompt.context else f" (its {lm.prompt} tokens)"


def _kernels(report: Report) -> str:
    rows = [
        (
            k.operation,
            k.shape,
            str(k.rows),
            f"{1e6 * k.seconds:.1f} µs",
            f"{k.rate / (1e9 if k.unit == 'GB/s' else 1e12):.0f} {k.unit}",
            f"{100 * k.share:.0f} %",
            "" if k.plain_seconds is None else f"× {k.plain_seconds / k.seconds:.1f}",
        )
        for k in report.kernels
    ]
    return human.table(("KERNEL", "SHAPE", "ROWS", "TIME", "RATE", "SHARE", "PLAIN MLX"), rows)


def _model(run: ModelRun) -> str:
    lm = None if isinstance(run.mlx_lm, str) else run.mlx_lm
    rows = [
        (
            f"decode, {decoding.rows} row{'s' if decoding.rows > 1 else ''}",
            f"{1000 * decoding.step:.2f} ms",
            f"{decoding.total:.0f}",
            f"{100 * share:.0f} %",
            f"× {lm.step / decoding.step:.2f}" if lm is not None and decoding.rows == 1 else "",
        )
        for decoding, share in ((run.one, run.shares.one), (run.eight, run.shares.eight))
    ]
    rows.append(
        (
            "verify of 8 tokens",
            f"{1000 * run.verify:.2f} ms",
            f"× {run.verify / run.single:.2f} of one token",
            f"{100 * run.shares.verify:.0f} %",
            "",
        )
    )
    rows.append(
        (
            f"prompt of {run.prompt.context}",
            f"{1000 * run.prompt.context / run.prompt.prefill:.0f} ms",
            f"{run.prompt.prefill:.0f}",
            "",
            "" if lm is None else f"× {run.prompt.prefill / lm.prefill:.2f}{_shorter(lm, run)}",
        )
    )
    drafts = run.drafts
    if drafts is not None and not isinstance(drafts, str):
        rows.append(
            (
                f"round of {drafts.drafted} drafts, {drafts.right} right",
                f"{1000 * drafts.seconds:.2f} ms",
                f"{drafts.speed:.0f} (plain {1 / drafts.step:.0f})",
                "",
                "",
            )
        )
    table = human.table(("", "TIME", "TOK/S", "OF THE LIMIT", "MLX-LM"), rows)
    said = "".join(f"\n{why}" for why in (run.drafts, run.mlx_lm) if isinstance(why, str))
    return f"{table}\nat most {human.size(run.peak_bytes)} of the GPU's memory{said}"

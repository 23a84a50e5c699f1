"""`arriero bench gpu`: the kernels of this machine's NVIDIA GPU, and whole models of published shapes.

One thing at a time has the GPU: first everything of ours, then servers, each with its own runner, and last mlx-lm's
processes, which may be at work for minutes and are waited for, or ended, before the next begins.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import psutil

from arriero.bench import gpu_flash_next, gpu_mlx_lm
from arriero.bench.gpu_conditions import Conditions, conditions
from arriero.bench.gpu_drafts import Rounds, with_draft
from arriero.bench.gpu_flash_next import FlashNext
from arriero.bench.gpu_kernels import MODES, Measured, copy_rate, every_kernel, product_rate
from arriero.bench.gpu_mlx_lm import MlxLm
from arriero.bench.gpu_models import Decoding, decoding, random_model, verifying
from arriero.bench.gpu_served import served
from arriero.bench.gpu_shapes import CONFIGS, step_bytes
from arriero.bench.speed import Speed
from arriero.errors import ArrieroError, UnsupportedFeature
from arriero.kernels import device

KERNELS = "kernels"
"""In the place of a shape: the kernels, one by one."""
FLASH_NEXT = "Flash-Next"
"""Qwen3.8 Flash Next, of which as many layers are made as fit; measured by `gpu_flash_next`."""
ROOM = 0.8, 0.6
"""Parts of the device's memory and of the host's free memory that its weights and its table may take."""
CONTEXT, PROMPT, DRAFTED = 512, 4096, 8
"""Tokens held while rows decode, of the prompt whose reading is timed, and of a forward that verifies drafts."""
STEPS = 160
"""Tokens that rows write."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a model's decoding: bytes that its steps must move at the copy rate, over the time that they take."""

    one: float
    eight: float
    verify: float


@dataclass(slots=True)
class ModelRun:
    """What one model reaches, its weights NVFP4."""

    one: Decoding
    """One row."""
    eight: Decoding
    """Eight rows."""
    prompt: Decoding
    """One row with a long prompt."""
    verify: float
    """Seconds of a forward of `DRAFTED` tokens of one row, read before the next is built."""
    single: float
    """The same with one token."""
    shares: Shares
    peak_bytes: int
    """Of the device's memory."""
    mlx_lm: MlxLm | str = "mlx-lm was not measured"
    """Or why there is nothing to compare with."""
    drafts: Rounds | str | None = None
    """Rounds of a DFlash 2, where the shape of one is known; or why there are none."""


@dataclass(slots=True)
class Report:
    """Everything of one run."""

    device: str
    copy: float
    """Bytes a second, read and written."""
    products: float
    """Operations a second of a bfloat16 product of 8192."""
    kernels: list[Measured] = field(default_factory=list)
    models: dict[str, ModelRun] = field(default_factory=dict)
    served: dict[str, list[Speed]] = field(default_factory=dict)
    """Through server, runner and stream."""
    flash_next: FlashNext | None = None
    failures: dict[str, str] = field(default_factory=dict)
    """What could not be measured, and why."""
    conditions: dict[str, Conditions] = field(default_factory=dict)
    """Before each part."""
    disturbed: dict[str, str] = field(default_factory=dict)
    """Parts that were not alone with the GPU, and what shows it."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure(names: Sequence[str], tell: Callable[[str], object] = str, *, through_server: Sequence[str] = ()) -> Report:
    """Measure the kernels (`KERNELS`), the models of these names in `CONFIGS`, `FLASH_NEXT`; without names the kernels.

    Models of `through_server` are measured as clients see them, behind the others; mlx-lm with the shapes of `names`
    comes last. `tell` hears what is being done, and figures as they come. UnsupportedFeature for an unknown name, for
    one that is not served, and where there is no GPU that the kernels work on. Of several parts one that fails is left
    out and told in the report; a lone one's error is raised.
    """
    names = list(names) or ([] if through_server else [KERNELS])
    others = [FLASH_NEXT, KERNELS]
    for name in names:
        if name not in [*CONFIGS, *others]:
            raise UnsupportedFeature(
                f"there is no shape '{name}' to measure; there are {', '.join([*CONFIGS, *others[:-1]])}, and {KERNELS}"
            )
    for name in through_server:
        if name not in CONFIGS:
            raise UnsupportedFeature(f"{name} is not measured through the server; {', '.join(CONFIGS)} are")
    if device.cuda() is None:
        raise UnsupportedFeature("there is no NVIDIA GPU here that arriero's kernels work on, so nothing was measured")
    tell("copy and bfloat16 products")
    report = Report(str(mx.device_info().get("device_name", "")), copy_rate(), product_rate(8192))
    mx.clear_cache()
    parts: list[tuple[str, Callable[[], None]]] = [(name, partial(_ours, name, report, tell)) for name in names]
    parts += [(f"{name}, served", partial(_served, name, report, tell)) for name in through_server]
    lone = len(parts) == 1
    parts += [(f"{name}, mlx-lm", partial(_mlx_lm, name, report)) for name in names if name in CONFIGS]
    for part, run in parts:
        _alone(part, report, tell)
        try:
            run()
        except (ArrieroError, RuntimeError) as error:
            if lone:
                raise
            report.failures[part] = f"{type(error).__name__}: {error}"
            tell(f"{part} failed: {error}")
        free()
    return report


def _alone(part: str, report: Report, tell: Callable[[str], object]) -> None:
    """Note whether anything else is at work on the GPU before a part begins."""
    found = report.conditions[part] = conditions()
    tell(f"{part}, with copies at {found.copy / 1e9:.0f} GB/s")
    why = found.disturbed(report.copy)
    if why is not None:
        report.disturbed[part] = why
        tell(f"{part} is not alone with the GPU: {why}")


def _ours(name: str, report: Report, tell: Callable[[str], object]) -> None:
    """Add what one name stands for to the report."""
    if name == KERNELS:
        report.kernels += every_kernel(report.copy, tell)
    elif name == FLASH_NEXT:
        layers, ngrams = fitting(mx.get_memory_limit(), psutil.virtual_memory().available)
        report.flash_next = gpu_flash_next.measure(layers, ngrams=ngrams, tell=tell)
    else:
        report.models[name] = model_run(name, report.copy, tell)


def _served(name: str, report: Report, tell: Callable[[str], object]) -> None:
    report.served[name] = served(CONFIGS[name], MODES["nvfp4"], tell=tell)


def _mlx_lm(name: str, report: Report) -> None:
    """mlx-lm with another model of the same shape; nothing where ours failed."""
    if name in report.models:
        report.models[name].mlx_lm = gpu_mlx_lm.beside(name, MODES["nvfp4"], context=CONTEXT, prompt=PROMPT)


def model_run(name: str, copy: float, tell: Callable[[str], object]) -> ModelRun:
    """One model through the engine, with rounds of drafts where a draft of its shape is known."""
    config, how = CONFIGS[name], MODES["nvfp4"]
    mx.reset_peak_memory()
    model = random_model(config, how)
    decodings = []
    for rows in (1, 8):
        # Kernels are compiled, and rows that join made their recordings, before anything is timed.
        decoding(model, rows=rows, context=64, tokens=24)
        decodings.append(decoding(model, rows=rows, context=CONTEXT, tokens=STEPS))
        tell(f"{name}, {rows} at once: {1000 * decodings[-1].step:.3f} ms, {decodings[-1].total:.0f} tok/s")
    one, eight = decodings
    verifying(model, context=CONTEXT, tokens=DRAFTED, rounds=6)
    verify = verifying(model, context=CONTEXT, tokens=DRAFTED)
    single = verifying(model, context=CONTEXT, tokens=1)
    decoding(model, rows=1, context=PROMPT, tokens=4)
    prompt = decoding(model, rows=1, context=PROMPT, tokens=16)
    tell(f"{name}, {DRAFTED} tokens of a row: {1000 * verify:.2f} ms, one: {1000 * single:.2f} ms")
    tell(f"{name}, a prompt of {PROMPT}: {prompt.prefill:.0f} tok/s")
    drafts: Rounds | str | None
    try:
        drafts = with_draft(name, model, how)
    except RuntimeError as error:
        drafts = f"rounds of drafts failed: {error}"
    if isinstance(drafts, Rounds):
        tell(f"{name}, rounds with {drafts.right} right: {1000 * drafts.seconds:.2f} ms, {drafts.speed:.0f} tok/s")
    peak = mx.get_peak_memory()

    def share(rows: int, seconds: float, chosen: int = 1) -> float:
        return step_bytes(config, how, rows=rows, context=CONTEXT, tokens=chosen) / copy / seconds

    shares = Shares(share(1, one.step), share(8, eight.step), share(1, verify, DRAFTED))
    return ModelRun(one, eight, prompt, verify, single, shares, peak, drafts=drafts)


def fitting(device_bytes: int, host_bytes: int) -> tuple[int, int]:
    """Layers of Flash Next that the device's memory takes, by fours, and n-grams of each head that the host's does."""
    on_device, on_host = ROOM
    layers = gpu_flash_next.LAYERS
    while layers > 4 and gpu_flash_next.weight_bytes(layers) > on_device * device_bytes:
        layers -= 4
    row = gpu_flash_next.table_bytes(1)
    return layers, min(gpu_flash_next.TEXT["ngram_vocab_size_base"], int(on_host * host_bytes / row))


def free() -> None:
    """Give the device's memory back, so that the next model has all of it."""
    gc.collect()
    mx.clear_cache()

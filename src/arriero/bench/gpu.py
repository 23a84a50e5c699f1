"""`arriero bench gpu`: the kernels of this machine's NVIDIA GPU, and whole models of published shapes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from arriero.bench import gpu_mlx_lm
from arriero.bench.gpu_drafts import Rounds, with_draft
from arriero.bench.gpu_kernels import MODES, Measured, copy_rate, every_kernel, product_rate
from arriero.bench.gpu_mlx_lm import MlxLm
from arriero.bench.gpu_models import Decoding, decoding, random_model, verifying
from arriero.bench.gpu_served import served
from arriero.bench.gpu_shapes import CONFIGS, step_bytes
from arriero.bench.speed import Speed
from arriero.errors import UnsupportedFeature
from arriero.kernels import device

KERNELS = "kernels"
"""In the place of a shape: the kernels, one by one."""
CONTEXT, PROMPT, DRAFTED = 512, 4096, 8
"""Tokens held while rows decode, of the prompt whose reading is timed, and of a forward that verifies drafts."""


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
    mlx_lm: MlxLm | str
    """Or why there is nothing to compare with."""
    drafts: Rounds | None = None
    """Rounds of a DFlash 2, where the shape of one is known."""


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

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure(names: Sequence[str], tell: Callable[[str], object] = str, *, through_server: bool = False) -> Report:
    """Measure the kernels (`KERNELS`) and the models of these names in `CONFIGS`; without names the kernels.

    `through_server` measures the models as clients see them instead. UnsupportedFeature for an unknown name, and where
    there is no GPU that the kernels work on; `tell` hears what is being done.
    """
    names = list(names) or [KERNELS]
    unknown = [name for name in names if name not in CONFIGS and name != KERNELS]
    if unknown:
        raise UnsupportedFeature(
            f"there is no shape '{unknown[0]}' to measure; there are {', '.join(CONFIGS)}, and {KERNELS}"
        )
    if device.cuda() is None:
        raise UnsupportedFeature("there is no NVIDIA GPU here that arriero's kernels work on, so nothing was measured")
    tell("copy and bfloat16 products")
    report = Report(str(mx.device_info().get("device_name", "")), copy_rate(), product_rate(8192))
    mx.clear_cache()
    for name in names:
        if name == KERNELS:
            report.kernels += every_kernel(report.copy, tell)
        elif through_server:
            tell(f"{name}, served")
            report.served[name] = served(CONFIGS[name], MODES["nvfp4"])
        else:
            report.models[name] = model_run(name, report.copy, tell)
        free()
    return report


def model_run(name: str, copy: float, tell: Callable[[str], object]) -> ModelRun:
    """One model, then mlx-lm with another of the same shape once the first is gone."""
    config, how = CONFIGS[name], MODES["nvfp4"]
    tell(name)
    mx.reset_peak_memory()
    model = random_model(config, how)
    decodings = []
    for rows in (1, 8):
        # Kernels are compiled, and rows that join made their recordings, before anything is timed.
        decoding(model, rows=rows, context=64, tokens=24)
        decodings.append(decoding(model, rows=rows, context=CONTEXT, tokens=160))
    one, eight = decodings
    verifying(model, context=CONTEXT, tokens=DRAFTED, rounds=6)
    verify = verifying(model, context=CONTEXT, tokens=DRAFTED)
    single = verifying(model, context=CONTEXT, tokens=1)
    decoding(model, rows=1, context=PROMPT, tokens=4)
    prompt = decoding(model, rows=1, context=PROMPT, tokens=16)
    tell(f"{name}, drafts")
    drafts = with_draft(name, model, how)
    peak = mx.get_peak_memory()
    del model
    free()
    tell(f"{name}, mlx-lm")
    beside = gpu_mlx_lm.beside(name, how, context=CONTEXT, prompt=PROMPT)

    def share(rows: int, seconds: float, chosen: int = 1) -> float:
        return step_bytes(config, how, rows=rows, context=CONTEXT, tokens=chosen) / copy / seconds

    shares = Shares(share(1, one.step), share(8, eight.step), share(1, verify, DRAFTED))
    return ModelRun(one, eight, prompt, verify, single, shares, peak, beside, drafts)


def free() -> None:
    """Give the device's memory back, so that the next model has all of it."""
    gc.collect()
    mx.clear_cache()

"""What `arriero bench gpu` makes of the times of kernels, which are executed on the CPU here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace

import mlx.core as mx
import pytest

from arriero.bench import gpu_clock, gpu_kernels
from arriero.bench.gpu_kernels import MODES
from tests.helpers.cuda import EMULATED, emulate

TIME = 1e-6


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels in the emulation, on small matrices; how many operations each measurement had."""
    emulate(monkeypatch)
    counts: list[int] = []

    def timed(run: Callable[[], Sequence[mx.array]], operations: int) -> float:
        made = run()
        mx.eval(made)
        assert len(made) == operations
        counts.append(operations)
        return TIME

    monkeypatch.setattr(gpu_kernels, "device_seconds", timed)
    monkeypatch.setattr(gpu_kernels, "LEAST", 2)
    monkeypatch.setattr(gpu_kernels, "STREAMED", 0)
    monkeypatch.setattr(gpu_kernels, "FEW_ROWS", [(32, 128)])
    monkeypatch.setattr(gpu_kernels, "PROMPTS", (64, 128))
    monkeypatch.setattr(gpu_kernels, "BANKS", [(64, 128), (128, 128)])
    monkeypatch.setattr(gpu_kernels, "EXPERTS", 16)
    monkeypatch.setattr(gpu_kernels, "CONTEXTS", (64,))
    monkeypatch.setattr(gpu_kernels, "VOCABULARY", 300)
    monkeypatch.setattr(gpu_kernels, "DELTA", (1, 2, 64))
    monkeypatch.setattr(gpu_kernels, "CHAIN", 2)
    return counts


def test_few_rows_are_measured_by_the_bytes_of_their_weights(chains: list[int]) -> None:
    found = list(gpu_kernels.few_rows(EMULATED, 1e9))
    assert [(one.operation, one.rows) for one in found] == [(f"product {m}", r) for m in MODES for r in (1, 8)]
    assert found[0].rate == pytest.approx(32 * 128 * (1 / 2 + 1 / 16) / TIME)
    assert found[2].rate == pytest.approx(32 * 128 * (1 + 1 / 32) / TIME)
    assert found[0].share == pytest.approx(found[0].rate / 1e9)
    assert [one.plain_seconds for one in found[:3]] == [TIME, TIME, None]
    assert chains == [2] * 12


def test_experts_are_measured_by_the_distinct_ones(chains: list[int]) -> None:
    one, eight, *_ = gpu_kernels.rows_of_experts(EMULATED, 1e9)
    expert = 64 * 128 * (1 / 2 + 1 / 16)
    assert one.rate == pytest.approx(8 * expert / TIME)
    assert 8 * expert / TIME < eight.rate <= 16.001 * expert / TIME


@pytest.mark.usefixtures("chains")
def test_choices_are_measured_by_the_bytes_of_their_rows() -> None:
    found = list(gpu_kernels.choices(EMULATED, 1e9))
    assert [(one.operation, one.rows) for one in found] == [
        ("largest", 1),
        ("40 largest", 1),
        ("largest", 8),
        ("40 largest", 8),
    ]
    assert found[3].rate == pytest.approx(8 * 300 * 2 / TIME)


@pytest.mark.usefixtures("chains")
def test_states_are_measured_by_reading_and_writing_them() -> None:
    one, eight = gpu_kernels.delta_steps(EMULATED, 1e9)
    assert one.rate == pytest.approx(2 * 2 * 64 * 64 * 4 / TIME)
    assert eight.rate == pytest.approx(8 * one.rate)


def test_without_a_gpu_no_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels.device, "cuda", lambda: None)
    with pytest.raises(RuntimeError, match="no GPU"):
        gpu_kernels.every_kernel(1e9)


class Device:
    """A device on which ten operations take 5 µs, and a host that takes so many seconds to submit them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, submitting: float) -> None:
        self.waits: list[float] = []
        clock = count(0.0, submitting)
        monkeypatch.setattr(gpu_clock, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        monkeypatch.setattr(gpu_clock, "stamp", self.stamp)

    def stamp(self, seconds: float) -> mx.array:
        if seconds:
            self.waits.append(seconds)
        return mx.array([10**18 + (0 if seconds else 5000)] * 8, mx.uint64)

    def measure(self) -> float:
        return gpu_clock.device_seconds(lambda: [mx.zeros((1,))] * 10, 10)


def test_the_device_waits_until_the_host_has_submitted_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 0.01)
    assert device.measure() == pytest.approx(5e-7)
    assert device.waits == [0.004, 0.008] + [0.016] * gpu_clock.RUNS


def test_a_host_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, 1.0)
    with pytest.raises(RuntimeError, match="10 operations were not submitted"):
        device.measure()

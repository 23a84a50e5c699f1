"""Finding the CPU extension: absent, broken, switched off."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator

import mlx.core as mx
import pytest

from arriero.kernels import device


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test looks for the extension anew."""
    device.cpu_extension.cache_clear()
    yield
    device.cpu_extension.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, probe: object) -> types.ModuleType:
    module = types.ModuleType("arriero_cpu")
    if probe is not None:
        module.probe = probe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arriero_cpu", module)
    return module


def raising(error: Exception) -> object:
    def probe() -> str:
        raise error

    return probe


def test_a_missing_extension_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "EXTENSION", "arriero_cpu_that_nobody_has")
    with caplog.at_level(logging.INFO):
        assert device.cpu_extension() is None
    assert not caplog.records


@pytest.mark.parametrize(
    "error", [RuntimeError("built for mlx 0.1"), ValueError("no such instruction"), TypeError("registry")]
)
def test_an_extension_that_cannot_run_is_one_warning_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    pretend(monkeypatch, raising(error))
    assert device.cpu_extension() is None
    assert device.cpu_extension() is None
    assert len(caplog.records) == 1
    assert str(error) in caplog.text
    assert "Reinstall arriero-cpu" in caplog.text


def test_an_extension_without_a_probe_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, None)
    assert device.cpu_extension() is None
    assert "probe" in caplog.text


def test_a_working_extension_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def probe() -> str:
        calls.append(1)
        return "avx2"

    module = pretend(monkeypatch, probe)
    assert device.cpu_extension() is module
    assert device.native() is (module if device.on_cpu() else None)
    assert calls == [1]


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda: "avx2")
    monkeypatch.setenv("ARRIERO_KERNELS", "graph")
    assert device.cpu_extension() is None


def test_an_unknown_choice_is_a_warning_that_lists_the_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = pretend(monkeypatch, lambda: "avx2")
    monkeypatch.setenv("ARRIERO_KERNELS", "fast")
    assert device.cpu_extension() is module
    assert "ARRIERO_KERNELS=fast" in caplog.text


def test_a_device_that_is_not_the_cpu_never_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda: "avx2")
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    assert device.native() is None


def test_on_cpu_follows_the_default_device() -> None:
    assert device.on_cpu() == (mx.default_device().type == mx.DeviceType.cpu)

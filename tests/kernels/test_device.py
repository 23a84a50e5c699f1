"""Finding the CPU extension: absent, broken, switched off."""

from __future__ import annotations

import logging
import shutil
import sys
import types
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from arriero.kernels import device
from arriero.kernels.activation import geglu_graph, softcap, swiglu_graph


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test looks for the extension anew."""
    device.cpu_extension.cache_clear()
    yield
    device.cpu_extension.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, probe: object) -> types.ModuleType:
    module = types.ModuleType("arriero_cpu")
    for name in vars(device.CpuKernels):
        if not name.startswith("_"):
            setattr(module, name, None)
    if probe is not None:
        module.probe = probe  # type: ignore[attr-defined]
    else:
        del module.probe
    monkeypatch.setitem(sys.modules, "arriero_cpu", module)
    return module


def raising(error: Exception) -> object:
    def probe() -> str:
        raise error

    return probe


def test_a_missing_extension_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "EXTENSION", "arriero_cpu_that_nobody_has")
    with caplog.at_level(logging.INFO):
        assert device.cpu_extension() is None
        assert device.cpu_extension() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "plain MLX runs on the CPU" in caplog.text


def test_an_extension_of_another_version_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = pretend(monkeypatch, lambda: "avx2")
    del module.gated_delta
    assert device.cpu_extension() is None
    assert "lacks gated_delta" in caplog.text


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


@pytest.mark.skipif(device.on_cpu() and shutil.which("g++") is None, reason="MLX compiles for the CPU with g++")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_compiled_functions_give_the_same_values_for_any_shape(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype
) -> None:
    functions: list[Callable[[mx.array], mx.array]] = [
        lambda x: swiglu_graph(x, x),
        lambda x: geglu_graph(x, x),
        lambda x: geglu_graph(x, x, tanh=False),
        lambda x: softcap(x, 2.0),
        lambda x: softcap(x, 3.0),
    ]
    inputs = [mx.random.normal(shape, key=mx.random.key(0)).astype(dtype) for shape in [(3, 8), (5, 2, 7)]]
    plain = [f(x) for f in functions for x in inputs]
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    compiled = [f(x) for f in functions for x in inputs]
    for a, b in zip(plain, compiled, strict=True):
        assert a.dtype == b.dtype == dtype
        assert mx.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=1e-2 if dtype == mx.bfloat16 else 1e-5)


def test_on_cpu_follows_the_default_device() -> None:
    assert device.on_cpu() == (mx.default_device().type == mx.DeviceType.cpu)

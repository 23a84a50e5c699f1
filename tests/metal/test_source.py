"""`.metal` files, and when they are used."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx.core as mx
import pytest

from arriero.kernels import device
from arriero.kernels.metal import gpu
from arriero.kernels.metal.source import FOLDER, LEAST_DEVICE_VALUES, load, on_device


def test_a_file_becomes_the_arguments_of_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "one.metal"
    path.write_text(
        "// About it.\n//: inputs a b\n//: outputs y\n//: option ensure_row_contiguous=false\n"
        "//: header\nfloat f();\n//: body\n  // two\n  y[0] = 1;\n"
    )
    assert load(path) == {
        "name": "arriero_one",
        "input_names": ["a", "b"],
        "output_names": ["y"],
        "ensure_row_contiguous": False,
        "header": "float f();\n",
        "source": "  // two\n  y[0] = 1;\n",
    }


@pytest.mark.parametrize("line", ["//: boddy", "//: option atomic_outputs=maybe"])
def test_what_a_file_cannot_say_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "two.metal"
    path.write_text(f"//: inputs a\n{line}\n")
    with pytest.raises(ValueError, match=r"two\.metal, line 2"):
        load(path)


def test_no_file_is_without_a_test_of_its_own() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f'launch("{path.stem}"' in tests for path in FOLDER.glob("*.metal"))


def test_few_values_are_filled_up_to_the_device_address_space() -> None:
    assert on_device(mx.array([5, 6], mx.int32), -1).tolist() == [5, 6] + [-1] * (LEAST_DEVICE_VALUES - 2)
    assert on_device(mx.arange(9), 0).size == 9


@pytest.mark.parametrize(("choice", "used"), [(None, False), ("0", False), ("1", True), (" 1 ", True), ("yes", False)])
def test_kernels_are_off_unless_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str | None, used: bool
) -> None:
    monkeypatch.setattr(gpu, "available", lambda: True)
    monkeypatch.setattr(gpu, "wanted", gpu.wanted.__wrapped__)
    monkeypatch.setattr(device, "_metal_wanted", device._metal_wanted.__wrapped__)
    monkeypatch.delenv("ARRIERO_KERNELS", raising=False)
    if choice is None:
        monkeypatch.delenv(gpu.SETTING, raising=False)
    else:
        monkeypatch.setenv(gpu.SETTING, choice)
    with caplog.at_level(logging.INFO):
        assert device.metal() is used
    assert ("is not known" in caplog.text) == (choice == "yes")
    monkeypatch.setenv("ARRIERO_KERNELS", "graph")
    assert not device.metal()


@pytest.mark.skipif(mx.metal.is_available(), reason="about machines without an Apple GPU")
def test_a_machine_without_an_apple_gpu_never_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_metal_wanted", lambda: True)
    assert not device.metal()

"""The fixture that runs a test with plain MLX and again with the CPU extension."""

from __future__ import annotations

import pytest

from arriero.kernels import device


@pytest.fixture(params=["graph", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernels the test runs with; without arriero-cpu the second run is skipped."""
    if request.param == "graph":
        monkeypatch.setattr(device, "cpu_extension", lambda: None)
    elif device.native() is None:
        pytest.skip("arriero-cpu is not installed, or the default device is not the CPU")
    return str(request.param)

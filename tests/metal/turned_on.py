"""A fixture that has the operations take the Metal kernels wherever they may."""

from __future__ import annotations

import functools
import pkgutil
from collections import Counter
from importlib import import_module
from typing import Any

import pytest

from arriero.kernels import device, metal
from arriero.kernels.metal import source
from tests.metal.launches import ORDERS, launch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was asked for; all of them are on, and neither CUDA's nor the CPU's are."""
    asked: Counter[str] = Counter()
    made = functools.cache(lambda name: launch(name, **ORDERS[0]))

    def counted(name: str) -> Any:
        asked[name] += 1
        return made(name)

    monkeypatch.setattr(device, "cpu_extension", lambda: None)
    monkeypatch.setattr(device, "metal", lambda: True)
    for found in pkgutil.iter_modules(metal.__path__):
        module = import_module(f"{metal.__name__}.{found.name}")
        if module is not source and hasattr(module, "kernel"):
            monkeypatch.setattr(module, "kernel", counted)
    return asked

"""The check before an import, in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import pytest

from arriero.create import accept, check
from arriero.source import ModelSource

Judged = Callable[..., None]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    """The check in this process, with zeros in the place of everything but a few numbers; keeps the verdict."""
    monkeypatch.setattr(accept, "REAL_BYTES", 2000)
    monkeypatch.setattr(check, "REAL_BYTES", 2000)
    device = mx.default_device()
    verdicts: list[accept.Verdict] = []

    def ask(source: ModelSource) -> accept.Verdict:
        verdicts.append(accept.judge(source))
        mx.set_default_device(device)
        return verdicts[-1]

    found = partial(check.check_plan, ask=ask)
    found.verdicts = verdicts  # type: ignore[attr-defined]
    return found

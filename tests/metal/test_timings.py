"""What a Mac times are the kernels and plain MLX, and both give the same."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest

from arriero.kernels.metal.source import FOLDER
from bench import metal
from tests.metal.launches import ON_GPU, runnable
from tests.metal.turned_on import calls

__all__ = ["calls"]

pytestmark = runnable


def test_every_kernel_is_timed_beside_plain_mlx_which_gives_the_same(calls: Counter[str]) -> None:
    for case in metal.cases(small=True):
        before = calls.total()
        assert metal.difference(case) <= 0.02, case.name
        assert calls.total() > before, case.name
    kernels = {path.stem for path in FOLDER.glob("*.metal")}
    assert set(calls) == kernels - {"attention_join"}


@pytest.mark.skipif(ON_GPU, reason="about machines without an Apple GPU")
def test_without_metal_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["metal.py"])
    with pytest.raises(SystemExit, match="on a Mac"):
        metal.main()
    assert metal.median_us(lambda i: mx.array(i), 0) > 0

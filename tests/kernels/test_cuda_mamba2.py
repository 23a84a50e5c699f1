"""The selective state space on an NVIDIA GPU against its graph version."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from arriero.kernels import device
from arriero.kernels.cuda import mamba2 as cuda
from arriero.kernels.cuda.gpu import Gpu
from arriero.kernels.mamba2 import mamba2, mamba2_rows
from tests.helpers.bits import same
from tests.helpers.cuda import ON_GPU, SEED, error, exact, executed

__all__ = ["executed"]


def random(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(SEED.normal(0, 1, shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(mx.bfloat16, 5e-3), (mx.float32, 1e-5)])
@pytest.mark.parametrize(
    ("heads", "lengths", "stops", "limits"),
    [
        (cuda.Heads(4, 32, 2, 32), [5, 1, 37], [[2], [], [1, 32, 36]], (0.01, 2.0)),
        pytest.param(cuda.Heads(2, 8, 1, 16), [1] * 9, [[]] * 9, (0.0, float("inf")), marks=ON_GPU),
    ],
)
def test_rows_and_states_are_those_of_the_graph(
    executed: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    dtype: mx.Dtype,
    bound: float,
    heads: cuda.Heads,
    lengths: list[int],
    stops: list[list[int]],
    limits: tuple[float, float],
) -> None:
    total, shared = sum(lengths), (sum(lengths), heads.groups, heads.size)
    x, dt = random(total, heads.heads, heads.width, dtype=dtype), random(total, heads.heads, dtype=dtype)
    b, c = random(*shared, dtype=dtype), random(*shared, dtype=dtype)
    how: dict[str, Any] = {name: mx.abs(random(heads.heads)) for name in ("rate", "bias", "skip")}
    how |= {"states": [random(*heads.state) for _ in lengths], "lengths": lengths, "stops": stops, "limits": limits}
    ours = mamba2(x, b, c, dt, **how)
    rows = mx.concatenate([part.reshape(total, -1) for part in (x, b, c)], axis=1)
    assert same(mamba2_rows(rows, mx.concatenate([rows, dt], axis=1), heads, dt_at=heads.columns, **how).y, ours.y)
    monkeypatch.setattr(device, "cuda", lambda: None)
    theirs = mamba2(*(part.astype(mx.float32) for part in (x, b, c, dt)), **how)
    assert ours.y.dtype == dtype
    assert error(ours.y, exact(theirs.y)) < bound
    for i in range(len(lengths)):
        for mine, other in zip([*ours.interior[i], ours.ends[i]], [*theirs.interior[i], theirs.ends[i]], strict=True):
            assert error(mine, exact(other)) < 1e-5

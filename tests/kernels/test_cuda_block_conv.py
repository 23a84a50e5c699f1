"""The convolution of DFlash 2's blocks on an NVIDIA GPU, or executed on the CPU: the bits of plain operations."""

from __future__ import annotations

import mlx.core as mx
import pytest

from arriero.kernels import device
from arriero.kernels.cuda import block_conv
from arriero.model.contract import Batch, Span
from arriero.model.drafts.dflash_config import ConvConfig
from arriero.model.drafts.dflash_conv import GroupedDynamicConv
from arriero.model.layers.linear import Linear
from arriero.model.weight import Weight
from tests.helpers.cuda import emulate


def numbers(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, or one that is played."""
    if device.cuda() is None:
        emulate(monkeypatch)


@pytest.mark.parametrize(
    ("rows", "taps", "group", "width"), [(8, 2, 16, 160), (1, 2, 16, 32), (5, 3, 2, 20), (2, 4, 8, 1040)]
)
def test_a_block_is_convolved_as_by_plain_operations(
    monkeypatch: pytest.MonkeyPatch, rows: int, taps: int, group: int, width: int
) -> None:
    project = Linear(Weight(numbers(2 * taps * width // group, width)))
    conv = GroupedDynamicConv(ConvConfig(taps, group), numbers(2, taps, width), project)
    batch = Batch(mx.zeros((rows,), mx.int32), [Span(0, rows, 0, ())])
    x, y, dynamic = numbers(rows, width), numbers(rows, width), numbers(rows, 2 * taps * width // group)
    ours = conv._convolve(0, x, dynamic, batch), conv.after(x, y, dynamic, batch)
    assert block_conv.takes(x, conv.base, dynamic, group)
    monkeypatch.setattr(block_conv, "takes", lambda *_: False)
    plain = conv._convolve(0, x, dynamic, batch), conv.after(x, y, dynamic, batch)
    for a, b in zip(ours, plain, strict=True):
        assert bool(mx.all(a == b))


def test_other_types_and_odd_groups_are_left_to_plain_operations() -> None:
    x, base, dynamic = numbers(2, 6), numbers(2, 2, 6), numbers(2, 8)
    assert not block_conv.takes(x, base, dynamic, 3)
    assert not block_conv.takes(x.astype(mx.float32), base, dynamic, 2)

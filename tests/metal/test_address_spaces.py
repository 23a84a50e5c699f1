"""Address spaces: clang refuses what Metal would. Without it these tests are skipped, and all others run."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.metal.harness.address_spaces import check_address_spaces, clang
from tests.metal.harness.errors import MetalError
from tests.metal.harness.kernel import Kernel

pytestmark = pytest.mark.skipif(clang() is None, reason="the check of address spaces needs clang 16 or newer")


def check(header: str, source: str) -> None:
    body = "threadgroup float buf[32]; buf[0] = inp_shape[0];\n" + source
    kernel = Kernel("asc", ["inp", "few"], ["out"], body, header)
    check_address_spaces(kernel, [mx.zeros((99,)), mx.zeros((3,))], [mx.float32])


@pytest.mark.parametrize(
    ("header", "source"),
    [
        ("", "float* p = out; p[0] = 1;"),
        ("", "device float* p = &buf[0]; p[0] = 1;"),
        ("inline float first(device float* p) { return p[0]; }", "out[0] = first(buf);"),
        ("inline float first(const device float* p) { return p[0]; }", "out[0] = first(few);"),
        ("inline void set(float& x) { x = 1; }", "float v; set(v); out[0] = v;"),
        ("", "const device int* n = inp_shape; out[0] = n[0];"),
    ],
    ids=["none", "threadgroup as device", "threadgroup to device", "few values", "a reference", "a shape"],
)
def test_a_wrong_address_space_is_refused(header: str, source: str) -> None:
    with pytest.raises(MetalError) as error:
        check(header, source)
    assert error.value.kind == "address-space"


@pytest.mark.parametrize(
    ("header", "source"),
    [
        ("inline float first(threadgroup float* p) { return p[0]; }", "out[0] = first(buf);"),
        ("inline void set(device float& x) { x = 1; }", "set(out[0]);"),
        ("", "const auto p = few; out[0] = p[1];"),
    ],
    ids=["threadgroup", "a reference", "auto"],
)
def test_a_right_one_is_accepted(header: str, source: str) -> None:
    check(header, source)

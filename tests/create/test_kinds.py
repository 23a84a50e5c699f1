"""What a file is, by its first bytes."""

import struct

import pytest

from arriero.create.kinds import sniff


@pytest.mark.parametrize("length", [128, 0x180, 0x50, 0x4B50, 0x0A, 0x7B, 0x2E])
def test_no_length_of_a_header_makes_safetensors_look_like_something_else(tmp_path, length):
    """One header in 32 has a length whose first byte is that of a pickle."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}".ljust(length))
    assert sniff(path) == "safetensors"


@pytest.mark.parametrize(
    "head", [b"\x80\x02}q\x00X\x05\x00\x00{", b"\x80\x04\x95\x7b\x22\x00\x00\x00\x00\x00\x00{", b"PK\x03\x04"]
)
def test_pickles_stay_pickles(tmp_path, head):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(head + b"x" * 64)
    assert sniff(path) == "pytorch"

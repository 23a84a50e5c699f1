"""What a load decides before the first weight."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arriero.runner.load import load
from arriero.source import FolderSource

GOLDEN = Path(__file__).resolve().parent.parent / "model" / "goldens" / "llama"


@pytest.mark.parametrize(("dtype", "value"), [("float32", "0"), ("bfloat16", None)])
def test_float32_keeps_nvidia_products_out_of_tf32(
    dtype: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "")
    monkeypatch.delenv("MLX_ENABLE_TF32")
    load(FolderSource(str(GOLDEN)), dtype, lambda _: None)
    assert os.environ.get("MLX_ENABLE_TF32") == value


def test_a_users_own_choice_of_tf32_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    load(FolderSource(str(GOLDEN)), "float32", lambda _: None)
    assert os.environ["MLX_ENABLE_TF32"] == "1"

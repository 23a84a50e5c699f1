"""What a load decides before the first weight."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from arriero.errors import LoadError
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


def test_a_prefill_that_we_dont_know_is_refused_before_anything_is_read() -> None:
    with pytest.raises(LoadError, match="the prefill 'fast' is not known; ARRIERO_PREFILL can be exact or int8"):
        load(FolderSource("/nowhere"), "", lambda _: None, "fast")


@pytest.mark.parametrize(("prefill", "exact"), [("", True), ("exact", True), ("int8", False)])
def test_the_prefill_reaches_every_matrix(prefill: str, exact: bool) -> None:
    model: Any = load(FolderSource(str(GOLDEN)), "bfloat16", lambda _: None, prefill).model
    parts = model.layers[0].feed_forward
    weights = [model.head.weight, parts.down.weight, *(part.weight for part in parts.gate_up.parts)]
    assert [weight.exact for weight in weights] == [exact] * 3

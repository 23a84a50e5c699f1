"""The goldens, made again by the installed reference implementation."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

GOLDENS = Path(__file__).parent / "goldens"
TOOL = Path(__file__).parents[2] / "tools" / "make_goldens.py"


def reference_python() -> str | None:
    """An interpreter with torch and transformers: `ARRIERO_ORACLE_PYTHON`, or this one."""
    named = os.environ.get("ARRIERO_ORACLE_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return sys.executable
    return None


@pytest.mark.oracle
def test_the_reference_still_gives_the_stored_logits(tmp_path: Path) -> None:
    python = reference_python()
    if python is None:
        pytest.skip("torch and transformers are not installed here, and ARRIERO_ORACLE_PYTHON names no interpreter")
    subprocess.run([python, str(TOOL), str(tmp_path)], check=True, capture_output=True, timeout=100)
    made = sorted(folder.name for folder in tmp_path.iterdir())
    assert made == sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
    for name in made:
        with np.load(tmp_path / name / "golden.npz") as new, np.load(GOLDENS / name / "golden.npz") as old:
            np.testing.assert_array_equal(new["ids"], old["ids"])
            np.testing.assert_allclose(new["logits"], old["logits"], atol=1e-5, err_msg=name)

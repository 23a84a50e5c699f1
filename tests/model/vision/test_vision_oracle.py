"""The goldens of images, made again by the installed reference implementation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.pictures import GOLDENS
from tests.model.test_oracle import reference_python

TOOLS = Path(__file__).parents[3] / "tools"
SIZES = Path(__file__).parents[2] / "chat" / "media" / "goldens.npz"


@pytest.fixture(scope="module")
def python() -> str:
    found = reference_python()
    if found is None:
        pytest.skip("torch and transformers are not installed here, and ARRIERO_ORACLE_PYTHON names no interpreter")
    return found


@pytest.mark.oracle
def test_the_reference_still_gives_the_stored_logits_of_images(python: str, tmp_path: Path) -> None:
    tool = str(TOOLS / "make_vision_goldens.py")
    subprocess.run([python, tool, str(tmp_path)], check=True, capture_output=True, timeout=110)
    made = sorted(folder.name for folder in tmp_path.iterdir())
    assert made == sorted(folder.name for folder in GOLDENS.iterdir() if folder.is_dir())
    for name in made:
        with np.load(tmp_path / name / "golden.npz") as new, np.load(GOLDENS / name / "golden.npz") as old:
            assert new.files == old.files
            for key in old.files:
                np.testing.assert_allclose(new[key], old[key], atol=1e-5, err_msg=f"{name} {key}")


@pytest.mark.oracle
def test_the_reference_still_sizes_and_cuts_pictures_so(python: str, tmp_path: Path) -> None:
    if subprocess.run([python, "-c", "import PIL"], capture_output=True, check=False).returncode:
        pytest.skip("Pillow is not installed beside the reference implementation")
    tool = str(TOOLS / "make_picture_goldens.py")
    subprocess.run([python, tool, str(tmp_path / "made.npz")], check=True, capture_output=True, timeout=110)
    with np.load(tmp_path / "made.npz") as new, np.load(SIZES) as old:
        assert new.files == old.files
        for key in old.files:
            np.testing.assert_allclose(new[key], old[key], atol=1e-6, err_msg=key)

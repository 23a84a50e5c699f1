"""Which configurations mlx-lm is asked about, and what is said where it is absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arriero.errors import UnsupportedArchitecture
from arriero.model.adapters import known
from arriero.model.architectures import ARCHITECTURES, check_config, known_architectures, runs_through

OLMO: dict[str, Any] = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_folder", lambda: None)


def test_what_is_not_ours_goes_by_its_own_name() -> None:
    assert check_config(OLMO) == "Olmo2ForCausalLM"
    assert check_config({"model_type": "phi3"}) == "phi3"
    assert runs_through(OLMO) == "mlx-lm"


def test_ours_never_runs_through_another() -> None:
    assert known.mlx_lm_module({"model_type": "qwen3"}) == "qwen3"
    assert runs_through({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}) is None
    assert all(runs_through({"architectures": [name]}) is None for name in ARCHITECTURES)


def test_what_nobody_knows_runs_through_nothing() -> None:
    assert runs_through({"architectures": ["NopeForCausalLM"], "model_type": "nope"}) is None


def test_without_the_package_the_error_lists_ours_and_says_how_to_get_it(absent: None) -> None:
    with pytest.raises(UnsupportedArchitecture) as error:
        check_config(OLMO)
    assert all(name in str(error.value) for name in known_architectures())
    assert "what mlx-lm knows runs too, where it is installed (pip install 'arriero[mlx-lm]')" in str(error.value)


def test_with_the_package_the_error_says_that_it_does_not_know_it_either() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"mlx-lm 0\.32\.2, which is installed, does not know it$"):
        check_config({"architectures": ["NopeForCausalLM"], "model_type": "nope"})


def test_the_synonyms_of_mlx_lm_count() -> None:
    assert known.mlx_lm_module({"architectures": ["KimiK2ForCausalLM"], "model_type": "kimi_k2"}) == "deepseek_v3"
    config = {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"}
    assert known.mlx_lm_module(config) == "bailing_moe_v3"
    assert known.mlx_lm_module({**config, "architectures": ["Other"]}) == "bailing_hybrid"


def test_a_gguf_file_is_never_matched() -> None:
    config = {"architectures": ["phi3"], "model_type": "phi3"}
    assert known.mlx_lm_module(config) is None
    with pytest.raises(UnsupportedArchitecture, match=r"phi3 is not supported.*mlx-lm is of no help with GGUF files$"):
        check_config(config)


@pytest.mark.parametrize(
    "kind", ["base", "cache", "switch_layers", "../utils", "os.path", "", "nope", 3, None, ["phi3"]]
)
def test_only_files_that_hold_a_model_are_matched(kind: Any) -> None:
    assert known.mlx_lm_module({"model_type": kind}) is None


def test_another_mlx_lm_without_tables_of_synonyms_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "utils.py").write_text("import math\nX = {'a': 1}\n")
    (tmp_path / "models" / "fine.py").write_text("class Model(Module):\n    pass\n")
    (tmp_path / "models" / "same.py").write_text("from .fine import Args, Model\n")
    (tmp_path / "models" / "tools.py").write_text("class ModelTools:\n    pass\n")
    monkeypatch.setattr(known, "_folder", lambda: tmp_path)
    found = {kind: known.mlx_lm_module({"model_type": kind}) for kind in ("fine", "same", "tools", "mistral")}
    assert found == {"fine": "fine", "same": "same", "tools": None, "mistral": None}


def test_asking_imports_neither_mlx_lm_nor_an_array_library() -> None:
    code = (
        "import sys, arriero.model.architectures as a; a.check_config({'model_type': 'olmo2'});"
        "sys.exit(any(m.split('.')[0] in ('mlx', 'mlx_lm', 'transformers') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Which architecture a configuration runs as."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.errors import UnsupportedArchitecture
from arriero.model import gguf_config
from arriero.model.architectures import ARCHITECTURES, MODEL_TYPES, check_config, known_architectures

GOLDENS = Path(__file__).parent / "goldens"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_first_known_name_wins() -> None:
    assert check_config({"architectures": ["NopeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"]}) == (
        "Qwen2ForCausalLM"
    )


def test_a_model_type_is_enough_where_no_architecture_is_named() -> None:
    assert check_config({"model_type": "qwen3_moe"}) == "Qwen3MoeForCausalLM"
    assert check_config({"architectures": [], "model_type": "mistral"}) == "MistralForCausalLM"
    assert check_config({"architectures": None, "model_type": "llama"}) == "LlamaForCausalLM"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedArchitecture) as error:
        check_config({"architectures": ["NopeForCausalLM"], "model_type": "nope"})
    assert "NopeForCausalLM" in str(error.value)
    assert all(name in str(error.value) for name in known_architectures())


def test_a_known_model_type_does_not_excuse_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedArchitecture, match="LlamaForSequenceClassification"):
        check_config({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"})


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["llamaforcausallm"]}, "LlamaForCausalLM"),
        ({"model_type": "gemma3-text"}, "Gemma3ForCausalLM"),
    ],
)
def test_a_near_miss_names_the_nearest(config: dict[str, object], nearest: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"Did you mean {nearest}"):
        check_config(config)


def test_a_name_that_only_ends_like_others_is_near_to_none() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"FooForCausalLM is not supported\. Known architectures"):
        check_config({"architectures": ["FooForCausalLM"]})


def test_a_family_that_runs_from_safetensors_only_says_so_of_its_gguf_files() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"gemma4 is not supported\. It runs from safetensors"):
        check_config({"architectures": ["gemma4"], "model_type": "gemma4"})


def test_a_configuration_without_names_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="both `architectures` and `model_type` are missing"):
        check_config({"hidden_size": 8})


@pytest.mark.parametrize("kind", [{}, [], 7, True])
def test_a_model_type_that_is_no_text_is_refused(kind: object) -> None:
    with pytest.raises(UnsupportedArchitecture, match="which is no text"):
        check_config({"architectures": ["Unknown"], "model_type": kind})


def test_every_architecture_has_a_model_type_of_its_own() -> None:
    assert set(MODEL_TYPES.values()) == set(ARCHITECTURES)


def test_every_architecture_has_a_file_that_builds_a_model() -> None:
    for file in set(ARCHITECTURES.values()):
        module = importlib.import_module(f"arriero.model.architectures.{file}")
        assert callable(module.Model.load)


def test_every_file_has_a_golden() -> None:
    goldens = [json.loads(path.read_text()) for path in GOLDENS.parent.glob("[ge]*/*/config.json")]
    assert {ARCHITECTURES[check_config(config)] for config in goldens} == set(ARCHITECTURES.values())


def test_architectures_do_not_know_each_other() -> None:
    files = set(ARCHITECTURES.values())

    def family(stem: str) -> str:
        return max((file for file in files if stem == file or stem.startswith(f"{file}_")), key=len)

    folder = Path(importlib.import_module("arriero.model.architectures").__file__ or "").parent
    for path in folder.glob("[a-z]*.py"):
        for known in re.findall(r"^from arriero\.model\.architectures\.(\w+) import", path.read_text("utf-8"), re.M):
            assert family(known) == family(path.stem), f"{path.name} imports {known}"


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    package = Path(importlib.import_module("arriero.model").__file__ or "").parent
    assert [path for path in package.rglob("*.py") if len(path.read_text("utf-8").splitlines()) > 500] == []


def test_the_table_of_models_is_the_list() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    named = {name: re.findall(r"[\w-]+", row[3])[0] for row in rows for name in re.findall(r"`([\w-]+)`", row[0])}
    assert named == ARCHITECTURES
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row[1])} == set(gguf_config.ARCHITECTURES)


def test_asking_loads_no_array_library() -> None:
    code = (
        "import sys, arriero.model.architectures as a; a.check_config({'model_type': 'llama'});"
        "sys.exit(any(m.split('.')[0] == 'mlx' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

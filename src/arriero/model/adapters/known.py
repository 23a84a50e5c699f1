"""Whether the installed mlx-lm knows an architecture, found out without importing it or an array library."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

EXTRA = "pip install 'arriero[mlx-lm]'"
"""How the package gets there."""

_MODEL = re.compile(r"^class Model\b|^from \S+ import .*\bModel\b", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_\-]+")
_TABLES = ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")


def mlx_lm_version() -> str | None:
    """The version that is installed, or None."""
    try:
        return version("mlx-lm") if _folder() is not None else None
    except PackageNotFoundError:
        return None


def mlx_lm_module(config: Mapping[str, Any]) -> str | None:
    """The name of the file in mlx-lm's `models` that builds this configuration; None when there is none.

    By `model_type`, as mlx-lm does it, with its own tables of synonyms. A GGUF file names a family where others name a
    class, and its tensors have other names: it is never matched.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        return None
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    folder = _folder()
    if folder is None or kind in names:
        return None
    synonyms, by_class = _tables(folder)
    module = next((by_class[kind, name] for name in names if (kind, name) in by_class), synonyms.get(kind, kind))
    return module if _NAME.fullmatch(module) and _is_model(folder / "models" / f"{module}.py") else None


def _folder() -> Path | None:
    spec = importlib.util.find_spec("mlx_lm")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


@cache
def _tables(folder: Path) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """mlx-lm's synonyms: `model_type` → file, and (`model_type`, class) → file; empty where it has none."""
    found: dict[str, dict[Any, str]] = {name: {} for name in _TABLES}
    for statement in ast.parse((folder / "utils.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in found:
                found[name] = ast.literal_eval(statement.value)
    return found[_TABLES[0]], found[_TABLES[1]]


def _is_model(path: Path) -> bool:
    return path.is_file() and _MODEL.search(path.read_text(encoding="utf-8")) is not None

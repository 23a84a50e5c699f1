"""What the room refuses to know."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path


def test_the_text_side_imports_neither_mlx_nor_http() -> None:
    code = (
        "import sys, arriero.chat.model_text, arriero.chat.text;"
        "rooms = {name.split('.')[0] for name in sys.modules};"
        "print(sorted(rooms & {'mlx', 'starlette', 'httpx', 'uvicorn', 'torch', 'transformers'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_files_of_built_in_renderers_are_shipped() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"][
        "arriero"
    ]
    shipped = {path for pattern in patterns for path in (root / "src" / "arriero").glob(pattern)}
    folder = root / "src" / "arriero" / "chat" / "renderers" / "builtin"
    files = {path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert files
    assert files <= shipped

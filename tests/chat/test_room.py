"""What the room refuses to know."""

from __future__ import annotations

import subprocess
import sys


def test_the_text_side_imports_neither_mlx_nor_http() -> None:
    code = (
        "import sys, arriero.chat.model_text, arriero.chat.text;"
        "rooms = {name.split('.')[0] for name in sys.modules};"
        "print(sorted(rooms & {'mlx', 'starlette', 'httpx', 'uvicorn', 'torch', 'transformers'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_server import FakeServer, fake_server

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def environ(server: FakeServer, tmp_path: Path) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("OLLAMA_", "ARRIERO_"))}
    return {**keep, "ARRIERO_HOST": f"127.0.0.1:{server.port}", "ARRIERO_HOME": str(tmp_path / "home"), "TERM": "xterm"}


@pytest.fixture
def arriero(environ: dict[str, str]) -> Run:
    def run(*args: str, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "arriero", *args],
            input=stdin,
            capture_output=True,
            text=True,
            env={**environ, **changes},
            timeout=30,
            check=False,
        )

    return run

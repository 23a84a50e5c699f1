"""What goes where: standard streams that are closed, full, redirected or of another encoding (F06, F07, F08)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.helpers.fake_server import FakeServer, generate_reply

MODELFILE = "FROM tiny\nSYSTEM Piš česky 漢字 🎉\n"
ANSWER = "word " * 40 + "漢字 ďábel 🎉"


@pytest.fixture
def told(server: FakeServer) -> FakeServer:
    server.replies["POST", "/api/show"] = lambda _: (200, {"modelfile": MODELFILE, "details": {}, "model_info": {}})
    server.replies["POST", "/api/generate"] = lambda body: (200, generate_reply(ANSWER) if body.get("prompt") else {})
    server.replies["GET", "/api/tags"] = lambda _: (200, {"models": []})
    return server


def shell(environ: dict[str, str], command: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """A command line with redirections; `arriero` stands for the program."""
    script = f'arriero() {{ "{sys.executable}" -m arriero "$@"; }}; {command}'
    return subprocess.run(
        ["bash", "-c", script], env={**environ, **changes}, capture_output=True, timeout=30, check=False
    )


@pytest.mark.parametrize("redirection", ["", "< /dev/null", "<&-", "2>&-"])
@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_a_printed_modelfile_holds_the_modelfile_only(
    environ: dict[str, str], told: FakeServer, tmp_path: Path, redirection: str, terminal: str
) -> None:
    """F06: what is redirected to a file can be read back."""
    out = tmp_path / "out"
    result = shell(environ, f"arriero show --modelfile tiny > {out} {redirection}", TERM=terminal)
    assert (result.returncode, result.stderr) == (0, b"")
    assert out.read_text("utf-8") == MODELFILE + "\n"


@pytest.mark.parametrize("columns", ["0", "20"])
def test_a_redirected_reply_has_no_codes_and_no_wraps_whatever_the_width(
    environ: dict[str, str], told: FakeServer, columns: str
) -> None:
    """F08"""
    result = shell(environ, "arriero run tiny q < /dev/null", COLUMNS=columns)
    assert result.stdout.decode() == ANSWER + "\n"


def test_a_locale_that_is_not_utf_8_damages_neither_question_nor_answer(
    environ: dict[str, str], told: FakeServer
) -> None:
    """F08: pipes carry UTF-8, as everywhere else in this program."""
    result = shell(environ, "arriero run tiny 'ďábel 漢字' < /dev/null", LC_ALL="C", PYTHONUTF8="0")
    assert (result.returncode, result.stdout.decode()) == (0, ANSWER + "\n")
    assert told.bodies("/api/generate")[0]["prompt"] == "ďábel 漢字"


@pytest.mark.parametrize("redirection", ["<&-", "< /dev/null"])
def test_without_a_prompt_and_without_input_the_model_is_only_loaded(
    environ: dict[str, str], told: FakeServer, redirection: str
) -> None:
    """F07: closed or empty input can't be talked with."""
    result = shell(environ, f"arriero run tiny {redirection}")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert told.bodies("/api/generate") == [{"model": "tiny", "stream": False}]


def test_an_answer_goes_through_when_the_input_is_closed(environ: dict[str, str], told: FakeServer) -> None:
    """F07"""
    assert shell(environ, "arriero run tiny q <&-").stdout.decode() == ANSWER + "\n"


@pytest.mark.parametrize("verb", ["list", "run tiny q"])
def test_a_full_disk_is_an_error_without_a_traceback(environ: dict[str, str], told: FakeServer, verb: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no device that is always full")
    result = shell(environ, f"arriero {verb} < /dev/null > /dev/full")
    assert (result.returncode, result.stderr) == (1, b"Error: No space left on device\n")


@pytest.mark.parametrize("verb", ["list", "run tiny q"])
def test_a_closed_output_is_no_fault(environ: dict[str, str], told: FakeServer, verb: str) -> None:
    result = shell(environ, f"arriero {verb} < /dev/null >&-")
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_reader_that_leaves_ends_the_command_in_silence(environ: dict[str, str], told: FakeServer) -> None:
    pieces = ["a" * 70_000] * 4
    told.replies["POST", "/api/generate"] = lambda _: (200, generate_reply(*pieces))
    result = shell(environ, "arriero run tiny q < /dev/null | head -c 1; exit ${PIPESTATUS[0]}")
    assert (result.returncode, result.stdout, result.stderr) == (1, b"a", b"")


def test_a_modelfile_may_come_through_a_pipe(environ: dict[str, str], told: FakeServer) -> None:
    """F06: the round trip in one line."""
    told.replies["POST", "/api/create"] = lambda _: (200, [{"status": "success"}])
    result = shell(environ, "arriero show --modelfile tiny | arriero create copy -f /dev/stdin")
    assert result.returncode == 0, result.stderr
    assert told.bodies("/api/create")[0] | {"stream": True} == {
        "model": "copy",
        "from": "tiny",
        "system": "Piš česky 漢字 🎉",
        "stream": True,
    }


def test_progress_without_a_terminal_is_one_line_a_step(arriero: Run, server: FakeServer, tmp_path: Path) -> None:
    """F08"""
    (tmp_path / "Modelfile").write_text("FROM tiny")
    steps = [{"status": "copying", "total": 9, "completed": done} for done in range(9)]
    server.replies["POST", "/api/create"] = lambda _: (200, [*steps, {"status": "success"}])
    result = arriero("create", "x", "-f", str(tmp_path / "Modelfile"))
    assert (result.stdout, result.stderr) == ("", "gathering model components\ncopying\nsuccess\n")

"""Pictures that are named by their paths."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from arriero.cli.pictures import begins_with_picture, take_pictures
from tests.cli.conftest import Run
from tests.cli.test_conversation import Chat
from tests.helpers.fake_server import FACTS, FakeServer

SEES = {"capabilities": ["completion", "vision"]}
BYTES = b"\x89PNG not really"
ENCODED = base64.b64encode(BYTES).decode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.png", "two words.JPG", "b.webp"):
        (tmp_path / name).write_bytes(BYTES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        ("What is on ./a.png", "What is on", 1),
        ("~/a.png and ./b.webp?", "and ?", 2),
        ("See './two words.JPG'.", "See .", 1),
        (r"See ./two\ words.JPG, please", "See , please", 1),
        ("./a.png", "", 1),
        ("a.png", "a.png", 0),
        ("https://host/a.png is an address", "https://host/a.png is an address", 0),
        ("./a.pngs and ./a.png/x", "./a.pngs and ./a.png/x", 0),
        ("No picture. /at all", "No picture. /at all", 0),
    ],
)
def test_files_that_a_message_names_go_with_it(folder: Path, text: str, content: str, count: int) -> None:
    found = take_pictures(text, SEES)
    assert found["content"] == content
    assert found.get("images", []) == [ENCODED] * count


def test_an_absolute_path_is_one_too(folder: Path) -> None:
    assert take_pictures(f"{folder}/a.png Look.", SEES) == {"content": "Look.", "images": [ENCODED]}
    assert begins_with_picture(f"{folder}/a.png Look.")
    assert not begins_with_picture("/set system a.png")
    assert not begins_with_picture(f"{folder}/missing.png")


def test_a_name_without_a_file_stays_text_and_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert take_pictures("See ./missing.png", SEES) == {"content": "See ./missing.png"}
    assert "there is no picture at missing.png" in capsys.readouterr().err


def test_a_model_that_does_not_see_gets_the_text(folder: Path) -> None:
    assert take_pictures("See ./a.png", FACTS) == {"content": "See ./a.png"}


def test_run_sends_pictures_of_its_arguments_but_not_of_what_is_piped(
    arriero: Run, server: FakeServer, folder: Path
) -> None:
    server.replies["POST", "/api/show"] = lambda _: (200, {**FACTS, **SEES})
    done = arriero("run", "tiny", "What is", "./a.png", stdin="from ./b.webp")
    assert done.returncode == 0, done.stderr
    (body,) = server.bodies("/api/generate")
    assert body["prompt"] == "from ./b.webp What is"
    assert body["images"] == [ENCODED]
    assert "added the picture a.png" in done.stderr


def test_a_picture_can_be_dropped_into_a_conversation(
    environ: dict[str, str], server: FakeServer, folder: Path
) -> None:
    server.replies["POST", "/api/show"] = lambda _: (200, {**FACTS, **SEES})
    chat = Chat(environ)
    try:
        chat.wait_for(">>> ")
        chat.type(f"{folder}/a.png What?\r")
        chat.wait_for("world.")
        chat.type("/bye\r")
        assert chat.end() == 0
    finally:
        chat.close()
    assert server.bodies("/api/chat")[0]["messages"] == [{"role": "user", "content": "What?", "images": [ENCODED]}]

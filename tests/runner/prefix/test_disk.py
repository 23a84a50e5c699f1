"""Stored prefixes on disk: found after a restart, never another model's, damaged files and full folders do no harm."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from arriero.runner.prefix.disk import DiskTier
from arriero.runner.prefix.fingerprint import fingerprint
from arriero.source import FolderSource, GGUFSource, LayersSource
from tests.helpers.engine_runs import make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import VOCAB, TinyModel

PLENTY = 1 << 30
MODEL = TinyModel("fs", context=2048)
PROMPT = [random.Random(1).randrange(VOCAB) for _ in range(300)]


def ask(folder: Path, prompt: list[int], limit: int = PLENTY, count: int = 5) -> tuple[list[int], int]:
    """The reply of a fresh engine over the folder, and how many prompt tokens it found there."""
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(folder, limit))
    engine.submit(submit("a", prompt, count))
    reply = run(engine)["a"]
    engine.close()
    return reply.tokens, reply.end.cached_tokens


def test_a_restart_goes_on_where_the_last_process_was(tmp_path):
    reply, found = ask(tmp_path / "m", PROMPT)
    assert found == 0
    following = [*PROMPT, *reply, 1, 2, 3]
    again, found = ask(tmp_path / "m", following, count=50)
    assert found == 304
    assert again == plain_loop(MODEL, following, 50)
    assert ask(tmp_path / "m", [*following, *again, 5])[1] == len(following) + 49


def test_each_turn_writes_only_what_is_new(tmp_path):
    prompt = list(PROMPT)
    for _ in range(3):
        reply, _ = ask(tmp_path / "m", prompt, count=50)
        prompt += reply
    # full attention keeps every position once; a window is kept whole with each turn
    sizes = sorted(path.stat().st_size for path in (tmp_path / "m").iterdir())
    assert len(sizes) <= 6
    per_token = MODEL.facts.cache_bytes_per_token
    assert sum(sizes) < 1.35 * (len(prompt) * per_token // 2 + 3 * 2 * 24 * per_token)


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "garbage"])
def test_a_damaged_file_is_removed_and_the_answer_is_right(tmp_path, caplog, harm):
    ask(tmp_path / "m", PROMPT)
    for path in (tmp_path / "m").iterdir():
        data = bytearray(path.read_bytes())
        if harm == "cut":
            data = data[: len(data) // 2]
        elif harm == "flip":
            data[-100] ^= 1
        elif harm == "empty":
            data = bytearray()
        else:
            data = bytearray(os.urandom(500))
        path.write_bytes(data)
    reply, found = ask(tmp_path / "m", PROMPT)
    assert found < 299
    assert reply == plain_loop(MODEL, PROMPT, 5)
    assert "removed" in caplog.text
    assert ask(tmp_path / "m", PROMPT)[1] > 290


def test_a_folder_never_holds_more_than_its_limit(tmp_path):
    for seed in range(6):
        prompt = [random.Random(seed).randrange(VOCAB) for _ in range(300)]
        ask(tmp_path / f"m{seed % 2}", prompt, limit=200_000)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 200_000
    assert ask(tmp_path / "m1", prompt, limit=200_000)[1] > 290, "what was written last is still there"


def test_a_file_that_is_gone_is_no_harm(tmp_path):
    ask(tmp_path / "m", PROMPT)
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(tmp_path / "m", PLENTY))
    for path in (tmp_path / "m").iterdir():
        path.unlink()
    engine.submit(submit("a", PROMPT, 5))
    assert run(engine)["a"].tokens == plain_loop(MODEL, PROMPT, 5)
    engine.close()


def test_a_full_disk_is_a_warning_and_no_failure(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arriero.runner.prefix.disk.write", full)
    assert ask(tmp_path / "m", PROMPT)[0] == plain_loop(MODEL, PROMPT, 5)
    assert "No space left" in caplog.text
    assert list((tmp_path / "m").iterdir()) == []


def test_unfinished_files_of_a_killed_process_go_away(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    old, new = folder / "old.part", folder / "new.part"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    DiskTier(folder, PLENTY).close()
    assert [path.name for path in folder.iterdir()] == ["new.part"]


def test_another_model_dtype_or_mode_has_another_folder(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    blob = tmp_path / "sha256-00"
    blob.write_bytes(b"x")
    names = {
        fingerprint(GGUFSource((str(first),)), "float32", "cpu", "exact"),
        fingerprint(GGUFSource((str(second),)), "float32", "cpu", "exact"),
        fingerprint(GGUFSource((str(first),)), "bfloat16", "cpu", "exact"),
        fingerprint(GGUFSource((str(first),)), "float32", "gpu", "exact"),
        fingerprint(GGUFSource((str(first),)), "float32", "cpu", "int8"),
        fingerprint(FolderSource(str(folder)), "float32", "cpu", "exact"),
        fingerprint(LayersSource({"w": str(blob)}, {}), "float32", "cpu", "exact"),
    }
    assert len(names) == 7
    before = fingerprint(FolderSource(str(folder)), "float32", "cpu", "exact")
    (folder / "config.json").write_text('{"a": 1}')
    assert fingerprint(FolderSource(str(folder)), "float32", "cpu", "exact") != before

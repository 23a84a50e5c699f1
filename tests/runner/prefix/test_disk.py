"""Stored prefixes on disk: found after a restart, never another model's, damaged files and full folders do no harm."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import mlx.core as mx
import pytest

import arriero.runner.prefix.store as store_module
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.model.contract import Batch, Span
from arriero.runner import main
from arriero.runner.messages import RunnerConfig
from arriero.runner.prefix.disk import DiskTier, _opened
from arriero.runner.prefix.fingerprint import fingerprint
from arriero.runner.prefix.keys import row_keys
from arriero.runner.prefix.record import digest, make_record, read_contents
from arriero.runner.prefix.store import PrefixStore
from arriero.source import FolderSource, GGUFSource, LayersSource
from tests.helpers.engine_runs import make_engine, plain_loop, run, submit
from tests.helpers.tiny_model import VOCAB, TinyModel

PLENTY = 1 << 30
MODEL = TinyModel("fs", context=2048)
PROMPT = random.Random(1).choices(range(VOCAB), k=300)


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
        prompt = random.Random(seed).choices(range(VOCAB), k=300)
        ask(tmp_path / f"m{seed % 2}", prompt, limit=200_000)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 200_000
    assert ask(tmp_path / "m1", prompt, limit=200_000)[1] > 290, "what was written last is still there"


def test_a_file_that_is_gone_is_no_harm(tmp_path, caplog):
    ask(tmp_path / "m", PROMPT)
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(tmp_path / "m", PLENTY))
    for path in (tmp_path / "m").iterdir():
        path.unlink()
        with pytest.raises(FileNotFoundError):
            read_contents(path).snapshots(2)
        assert _opened(path) is None
    engine.submit(submit("a", PROMPT, 5))
    assert run(engine)["a"].tokens == plain_loop(MODEL, PROMPT, 5)
    engine.close()
    assert caplog.text == "", "another process may have made room"


def test_a_full_disk_is_a_warning_and_no_failure(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arriero.runner.prefix.disk.write", full)
    assert ask(tmp_path / "m", PROMPT)[0] == plain_loop(MODEL, PROMPT, 5)
    assert "No space left" in caplog.text
    assert list((tmp_path / "m").iterdir()) == []


def test_a_file_has_its_name_only_once_all_of_it_is_written(tmp_path, monkeypatch):
    """A process that is killed meanwhile leaves nothing that the next one would read."""
    seen = []

    def watched(path: Path, *rest: object) -> None:
        write(path, *rest)
        seen.append((path.suffix, len(list(path.parent.glob("*.prefix")))))

    monkeypatch.setattr("arriero.runner.prefix.disk.write", watched)
    ask(tmp_path / "m", PROMPT)
    assert seen
    assert seen == [(".part", before) for before in range(len(seen))]
    assert {path.suffix for path in (tmp_path / "m").iterdir()} == {".prefix"}


def test_unfinished_files_of_a_killed_process_go_away(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    old, new = folder / "old.part", folder / "new.part"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    DiskTier(folder, PLENTY).close()
    assert [path.name for path in folder.iterdir()] == ["new.part"]


def test_another_model_dtype_mode_draft_or_version_has_another_folder(tmp_path, monkeypatch):
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
        fingerprint(GGUFSource((str(first),)), "float32", "cpu", "exact", "mtp"),
        fingerprint(GGUFSource((str(first),)), "float32", "cpu", "exact", "mtp", FolderSource(str(folder))),
        fingerprint(GGUFSource((str(first),)), "float32", "cpu", "exact", "mtp", GGUFSource((str(second),))),
    }
    assert len(names) == 10
    with monkeypatch.context() as other:
        other.setattr("arriero.runner.prefix.fingerprint.__version__", "0")
        assert fingerprint(GGUFSource((str(first),)), "float32", "cpu", "exact") not in names
    before = fingerprint(FolderSource(str(folder)), "float32", "cpu", "exact")
    (folder / "config.json").write_text('{"a": 1}')
    assert fingerprint(FolderSource(str(folder)), "float32", "cpu", "exact") != before


def converse(folder: Path) -> list[int]:
    """Several turns, each of which leaves files that go on from those before; returns all that was said."""
    said: list[int] = []
    for turn in range(6):
        said += random.Random(turn).choices(range(VOCAB), k=45)
        said += ask(folder, said)[0]
    return said


def test_what_two_processes_wrote_twice_does_not_double_the_paths(tmp_path):
    folder, record = tmp_path / "m", TinyModel("f", context=2048)
    prompt = (PROMPT * 5)[:1500]
    keys = row_keys([*prompt, 1])
    for _ in range(2):
        tier = DiskTier(folder, PLENTY)
        caches = record.new_caches()
        record.forward(Batch(mx.array(prompt, mx.int32), [Span(0, len(prompt), 0, caches)]))
        above = None
        for start in range(0, 1500, 50):
            pieces = [caches[0].lazy(start, start + 50)]
            above = tier.keep(make_record(keys, start, start + 50, pieces, digest(keys[:start])), keys, above)
        tier.close()
    tier = DiskTier(folder, PLENTY)
    assert len(list(folder.iterdir())) == 60
    began = time.perf_counter()
    chain, length = tier.match(keys)
    assert time.perf_counter() - began < 1
    assert (len(chain), length) == (30, 1500)
    tier.close()


def test_the_end_of_a_history_makes_room_before_its_beginning(tmp_path):
    """What a beginning is gone of can't be used: the oldest file is never one that others go on from."""
    folder = tmp_path / "m"
    said = converse(folder)
    kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    starts = [int(SafetensorsFile(path).metadata["start"]) for path in kept]
    assert len(starts) >= 5
    assert starts == sorted(starts, reverse=True)
    half = sum(path.stat().st_size for path in kept) // 2
    ask(tmp_path / "other", random.Random(7).choices(range(VOCAB), k=60), limit=half)
    left = [path for path in kept if path.exists()]
    assert 0 < len(left) < len(kept)
    assert left == kept[-len(left) :]
    assert ask(folder, said)[1] >= 40


def test_what_another_process_deleted_is_written_again(tmp_path):
    folder = tmp_path / "m"
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(folder, PLENTY))
    engine.submit(submit("a", PROMPT, 5))
    reply = run(engine)["a"].tokens
    engine.prefixes._disk.flush()
    for path in folder.iterdir():
        path.unlink()
    following = [*PROMPT, *reply, *range(40)]
    engine.submit(submit("b", following, 5))
    run(engine)
    engine.close()
    assert ask(folder, following)[1] >= len(following) - 4


def test_what_could_not_be_written_is_written_the_next_time(tmp_path, monkeypatch, caplog):
    folder, calls = tmp_path / "m", []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise ValueError("a bug, not a full disk")
        write(*arguments)

    monkeypatch.setattr("arriero.runner.prefix.disk.write", once)
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(folder, PLENTY))
    for name in ("a", "b"):
        engine.submit(submit(name, [*PROMPT, *range(40)] if name == "b" else PROMPT, 5))
        run(engine)
        engine.prefixes._disk.flush()
    engine.close()
    assert "a bug" in caplog.text
    assert ask(folder, PROMPT)[1] > 290


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    folder = tmp_path / "m"
    engine = make_engine(MODEL, prefix_bytes=PLENTY, disk=DiskTier(folder, PLENTY))
    folder.rmdir()
    engine.submit(submit("a", PROMPT, 5))
    run(engine)
    engine.close()
    assert ask(folder, PROMPT)[1] > 290


def test_nobody_else_may_read_what_was_said(tmp_path):
    folder = tmp_path / "m"
    DiskTier(folder, PLENTY).close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_wrong_word_about_positions_is_damage(tmp_path, caplog):
    """What a file says of itself is checked as its arrays are."""
    folder = tmp_path / "m"
    ask(folder, PROMPT)
    changed = 0
    for path in folder.iterdir():
        data = path.read_bytes()
        wrong = re.sub(rb"\[0, (\d+)\]", lambda found: b"[0, %d]" % (int(found[1]) - 1), data)
        changed += wrong != data
        path.write_bytes(wrong)
    assert changed
    reply, found = ask(folder, PROMPT)
    assert found == 0
    assert reply == plain_loop(MODEL, PROMPT, 5)
    assert "its checksum" in caplog.text


def test_unfinished_files_of_other_models_go_away_too(tmp_path):
    (tmp_path / "other").mkdir()
    old = tmp_path / "other" / "x.part"
    old.touch()
    os.utime(old, (0, 0))
    DiskTier(tmp_path / "m", PLENTY).close()
    assert not old.exists()


def test_no_more_is_read_than_memory_may_hold(tmp_path, monkeypatch):
    """A long conversation on disk, and little memory for stored prefixes: as much of its start as fits."""
    folder, model = tmp_path / "m", TinyModel("f", context=2048)
    disk = DiskTier(folder, PLENTY)
    engine = make_engine(model, prefix_bytes=PLENTY, disk=disk)
    for end in range(100, 1001, 100):
        engine.submit(submit("a", (PROMPT * 4)[:end], 1))
        run(engine)
    engine.close()
    budget = 450 * model.facts.cache_bytes_per_token
    engine = make_engine(model, prefix_bytes=budget, disk=DiskTier(folder, PLENTY))
    most, fill_nodes = [], PrefixStore._fill
    monkeypatch.setattr(
        PrefixStore, "_fill", lambda store, *rest: (fill_nodes(store, *rest), most.append(store.nbytes))
    )
    engine.submit(submit("a", (PROMPT * 4)[:1000], 5))
    reply = run(engine)["a"]
    assert reply.tokens == plain_loop(model, (PROMPT * 4)[:1000], 5)
    assert 300 <= reply.end.cached_tokens <= 450
    assert 0 < max(most) <= budget
    assert engine.prefixes.nbytes <= budget
    engine.close()


@pytest.mark.parametrize("layers", ["f", "fs"])
def test_a_long_stretch_becomes_several_files(tmp_path, monkeypatch, layers):
    model = TinyModel(layers, context=2048)
    monkeypatch.setattr(store_module, "PIECE_BYTES", 70 * model.facts.cache_bytes_per_token)
    replies = []
    for found in (0, 290):
        engine = make_engine(model, prefix_bytes=PLENTY, disk=DiskTier(tmp_path / "m", PLENTY))
        engine.submit(submit("a", PROMPT, 5))
        reply = run(engine)["a"]
        engine.close()
        assert reply.end.cached_tokens >= found
        replies.append(reply.tokens)
    assert replies == [plain_loop(model, PROMPT, 5)] * 2
    assert len(list((tmp_path / "m").iterdir())) >= 4


def test_files_that_change_while_they_are_loaded_keep_nothing_on_disk(tmp_path, caplog):
    """Else what the old weights computed would be stored under the new ones' name."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"old")
    config = RunnerConfig(endpoint="", source=GGUFSource((str(model),)), prefix_folder=str(tmp_path / "prefixes"))
    files = main._files(config)
    kept = main._disk(config, files, "float32", "")
    assert kept is not None
    kept.close()
    model.write_bytes(b"newer")
    assert main._disk(config, files, "float32", "") is None
    assert "changed while they were loaded" in caplog.text


def test_a_folder_that_is_a_file_is_a_warning(tmp_path, caplog):
    model, wrong = tmp_path / "model.gguf", tmp_path / "file"
    model.write_bytes(b"model")
    wrong.touch()
    config = RunnerConfig(endpoint="", source=GGUFSource((str(model),)), prefix_folder=str(wrong))
    assert main._disk(config, main._files(config), "float32", "") is None
    assert "cannot be used" in caplog.text

"""Blobs: content addressing, atomicity, adoption from another store."""

import hashlib
import os
import time

import pytest

from arriero.errors import InvalidRequest, NotFound, StoreError
from arriero.store.blobs import Blobs


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "blobs")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def test_a_stream_is_stored_under_the_hash_of_its_bytes(blobs):
    stored = blobs.ingest([b"one", memoryview(b"two"), b""])
    assert stored == (digest_of(b"onetwo"), 6, True)
    assert blobs.read(stored.digest) == b"onetwo"
    assert [entry.name for entry in blobs.files()] == [stored.digest.replace(":", "-")]


def test_the_same_content_is_stored_once(blobs):
    assert blobs.put(b"x").created
    assert not blobs.put(b"x").created
    assert not blobs.ingest([b"x"]).created


def test_a_mismatch_leaves_nothing_behind(blobs):
    wanted = digest_of(b"a")
    with pytest.raises(InvalidRequest, match=f'digest mismatch, expected "{wanted}", got "{digest_of(b"b")}"'):
        blobs.ingest([b"b"], expected=wanted)
    assert list(blobs.files()) == []


def test_an_abandoned_writer_leaves_nothing_behind(blobs):
    def pieces():
        yield b"half"
        raise RuntimeError("client went away")

    with pytest.raises(RuntimeError, match="client went away"):
        blobs.ingest(pieces())
    assert list(blobs.files()) == []


def test_an_upper_case_digest_with_a_dash_means_the_same_blob(blobs):
    stored = blobs.put(b"x")
    assert blobs.has("sha256-" + stored.digest[7:].upper())


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:" + "g" * 64, "../../etc/passwd", "sha256:" + "a" * 63, "md5:x"]
)
def test_a_malformed_digest_is_refused(blobs, digest):
    with pytest.raises(InvalidRequest, match="invalid digest format"):
        blobs.path(digest)


def test_putting_heals_a_damaged_blob(blobs):
    stored = blobs.put(b"good")
    blobs.path(stored.digest).write_bytes(b"evil")
    assert not blobs.intact(stored.digest)
    blobs.put(b"good")
    assert blobs.intact(stored.digest)


def test_reuse_renews_the_time(blobs):
    stored = blobs.put(b"x")
    os.utime(blobs.path(stored.digest), (1, 1))
    blobs.put(b"x")
    assert blobs.path(stored.digest).stat().st_mtime > time.time() - 60


def test_a_blob_is_adopted_by_a_hard_link(blobs, tmp_path):
    other = Blobs(tmp_path / "other")
    stored = other.put(b"weights")
    blobs.adopt(stored.digest, other)
    assert os.path.samefile(blobs.path(stored.digest), other.path(stored.digest))


def test_a_blob_is_copied_and_verified_where_links_cannot_reach(blobs, tmp_path, monkeypatch):
    other = Blobs(tmp_path / "other")
    good, bad = other.put(b"weights"), other.put(b"more")
    other.path(bad.digest).write_bytes(b"less")

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    blobs.adopt(good.digest, other)
    assert blobs.read(good.digest) == b"weights"
    with pytest.raises(StoreError, match="is damaged"):
        blobs.adopt(bad.digest, other)
    assert not blobs.has(bad.digest)


def test_a_large_blob_is_not_read_as_text(blobs):
    stored = blobs.put(b"x" * 100)
    with pytest.raises(StoreError, match="100 bytes; at most 99"):
        blobs.read(stored.digest, limit=99)


def test_a_missing_blob_is_named(blobs):
    with pytest.raises(NotFound, match=digest_of(b"?")):
        blobs.read(digest_of(b"?"))


def test_a_full_disk_is_a_sentence(blobs, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with blobs.writer() as writer:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"cannot write to the model store at .*: No space left on device"):
            writer.write(b"x")
    assert list(blobs.files()) == []


def test_a_blob_is_on_the_disk_before_it_has_its_name(blobs, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (done.append(name), real(*args))[1])
    blobs.ingest([b"weights"])
    assert done == ["fsync", "replace"]

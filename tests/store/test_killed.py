"""`create`, `cp` and `rm` that are killed at any step: the store is sound, and the same can be done again."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from arriero.errors import NotFound
from arriero.store.store import GRACE, Store
from arriero.store.verify import verify
from tests.helpers.killing import OPERATIONS, Killer, killing, prepare

POINTS = 50
QUICK = ("import", "quantize", "replace", "cp", "overwrite", "rm")


class Place:
    """A store that can be put back to how it was."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        prepare(self.root)
        self._saved = folder / "saved"
        shutil.copytree(self.root, self._saved)

    def restore(self) -> Store:
        shutil.rmtree(self.root)
        shutil.copytree(self._saved, self.root)
        return Store(self.root)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def killer(place: Place):
    with killing(place.root) as running:
        yield running


def problems(root: Path) -> list[str]:
    """What `arriero verify` finds: every blob hashed, every header and document read."""
    return verify(Store(root), "", lambda status: None, threading.Event())


def check_ruins(place: Place, operation: str) -> None:
    """The store after a kill: sound as it is, complete when the same is done again, and without rubbish in time."""
    assert problems(place.root) == []
    store = Store(place.root)
    names = {model.name.model for model in store.list()}
    assert "kept" in names
    assert ("old" in names) or operation == "rm"
    for model in store.list():
        assert model.source()
    try:
        OPERATIONS[operation](store)
    except NotFound:
        assert operation == "rm"
        assert "old" not in names
    assert problems(place.root) == []
    expected = {"kept"} if operation == "rm" else {"kept", "old"}
    assert {model.name.model for model in store.list()} - {"new"} == expected
    assert ("new" in store) == (operation in ("import", "quantize", "inherit", "cp"))
    past = time.time() - GRACE - 60
    for entry in store.blobs.files():
        os.utime(entry.path, (past, past))
    store.prune()
    used = {digest.replace(":", "-") for model in store.list() for digest in model.manifest.digests()}
    assert {entry.name for entry in store.blobs.files()} == used


def kill_at(place: Place, killer: Killer, operation: str, mode: str, share: float) -> None:
    """Kill an operation after a share of its steps."""
    place.restore()
    steps = int(killer(operation, mode, 0))
    assert steps > 3
    place.restore()
    point = 1 + int(share * steps)
    reply = killer(operation, mode, point)
    # Threads and the clock decide over some lines (who waits, whether progress is due), so the last may not be there.
    assert reply == "killed" or (mode == "lines" and int(reply) < point)
    check_ruins(place, operation)


@pytest.mark.parametrize("operation", QUICK)
def test_an_operation_that_is_killed_leaves_a_sound_store(place: Place, killer: Killer, operation: str) -> None:
    draw = random.Random(operation)
    kill_at(place, killer, operation, draw.choice(("changes", "lines")), draw.random())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_that_are_killed_at_fifty_points(place: Place, killer: Killer, operation: str) -> None:
    draw = random.Random(f"fifty {operation}")
    for count in range(POINTS):
        kill_at(place, killer, operation, ("changes", "lines")[count % 2], draw.random())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_change_that_an_operation_makes_may_be_its_last(place: Place, killer: Killer, operation: str) -> None:
    place.restore()
    steps = int(killer(operation, "changes", 0))
    for point in range(1, steps + 1):
        place.restore()
        assert killer(operation, "changes", point) == "killed"
        check_ruins(place, operation)


def test_an_operation_that_is_killed_again_and_again_still_comes_to_its_end(place: Place, killer: Killer) -> None:
    place.restore()
    steps = int(killer("quantize", "changes", 0))
    place.restore()
    for share in (0.2, 0.5, 0.8):
        assert killer("quantize", "changes", 1 + int(share * steps)) == "killed"
    check_ruins(place, "quantize")

"""Several processes on one store, and processes that are killed in the middle."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from arriero.store.store import Store
from tests.helpers.stored import put_model

WORKER = """
import random, sys
from pathlib import Path
from arriero.errors import NotFound
from arriero.store.store import Store
from tests.helpers.stored import put_model

root, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
store = Store(root)
done = 0
while done < rounds:
    done += 1
    name = f"m{draw.randrange(3)}"
    shared = bytes(200_000 + draw.randrange(3))
    if draw.random() < 0.6:
        put_model(store, name, {"model": shared, "system": bytes([draw.randrange(4)])})
    elif draw.random() < 0.9:
        try:
            store.delete(name)
        except NotFound:
            continue
    else:
        store.prune()
        store.list()
    print(done, flush=True)
"""


def start(root, seed, rounds):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(root), str(seed), str(rounds)], stdout=subprocess.PIPE)


def test_two_processes_that_create_and_delete_leave_a_sound_store(tmp_path):
    workers = [start(tmp_path, seed, 60) for seed in (1, 2)]
    for worker in workers:
        worker.communicate(timeout=60)
        assert worker.returncode == 0
    store = Store(tmp_path)
    assert store.verify() == []
    assert not [entry.name for entry in store.blobs.files() if entry.name.startswith("tmp-")]


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_process_leaves_a_sound_store(tmp_path, seed):
    store = Store(tmp_path)
    put_model(store, "kept", {"model": b"kept"})
    worker = start(tmp_path, seed, 10**9)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.0, 0.15))
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.communicate()
    assert Store(tmp_path).verify() == []
    assert store.get("kept").source()
    # Locks die with their holder: the next process goes on at once.
    put_model(store, "m0", {"model": b"new"})
    store.delete("m0")
    store.prune()
    assert store.verify() == []

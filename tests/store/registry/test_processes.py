"""Pulls in processes of their own: two at once, and some that are killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from arriero.store.store import Store
from tests.helpers.registry import digest_of

BIG = random.Random(7).randbytes(3_000_000)
TENSORS = {f"t{n}": random.Random(n).randbytes(30_000) for n in range(10)}

WORKER = """
import json, sys, threading
from pathlib import Path
from arriero.store.names import Name
from arriero.store.registry.key import Key
from arriero.store.registry.pull import pull
from arriero.store.store import Store
from tests.store.registry.conftest import QUICK

root, name = Path(sys.argv[1]), Name.parse(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
report = lambda status: print(json.dumps(status), flush=True)
pull(Store(root), name, report, threading.Event(), key=Key(root), limits=QUICK, insecure=True)
"""


def start(store, registry, name="a/b"):
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(store.root), f"{registry.host}/{name}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout.readline() == "ready\n"
    return worker


def go(worker):
    worker.stdin.write("go\n")
    worker.stdin.flush()


def test_two_processes_share_the_work_of_one_pull(registry, store):
    registry.add("a/b:latest", {"model": BIG})
    registry.pace = lambda _: 0.05
    workers = [start(store, registry) for _ in range(2)]
    for worker in workers:
        go(worker)
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert registry.sent[digest_of(BIG)] == len(BIG)
    for output in outputs:
        statuses = [json.loads(line) for line in output.splitlines()]
        assert statuses[-1] == {"status": "success"}
        assert len({status.get("completed") for status in statuses}) > 3
    assert store.verify() == []


def killed_pull(registry, store, seed):
    """A pull that is killed after a time that the seed says, and the state that it must leave."""
    draw = random.Random(seed)
    worker = start(store, registry)
    go(worker)
    try:
        time.sleep(draw.uniform(0.0, 0.5))
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.communicate()
    # Whatever was there by then, no blob has a name that is not its hash, and no model lacks a blob.
    assert Store(store.root).verify() == []


def prepared(registry, pace=0.02):
    registry.add("a/b:latest", {"model": BIG}, tensors=TENSORS)
    registry.pace = lambda _: pace


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_pull_leaves_a_sound_store_and_is_resumed(registry, store, puller, seed):
    prepared(registry)
    killed_pull(registry, store, seed)
    registry.pace = None
    model = puller()
    assert model.path(model.manifest.layers[0]).read_bytes() == BIG
    assert store.verify() == []
    assert not [entry.name for entry in store.blobs.files() if "-partial" in entry.name]


def test_a_pull_killed_again_and_again_still_comes_to_its_end(registry, store, puller):
    prepared(registry, 0.03)
    for seed in range(4):
        killed_pull(registry, store, seed + 100)
    had = registry.sent[digest_of(BIG)]
    registry.pace = None
    puller()
    assert store.verify() == []
    # What the killed ones had recorded was not fetched again.
    assert registry.sent[digest_of(BIG)] - had < len(BIG)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_killed_pulls(registry, store, puller):
    prepared(registry)
    for seed in range(50):
        killed_pull(registry, store, seed)
        if seed % 5 == 4:
            registry.pace = None
            puller()
            store.delete(f"{registry.host}/a/b")
            registry.pace = lambda _: 0.02
    assert store.verify() == []

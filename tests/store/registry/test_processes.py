"""Pulls in processes of their own: two at once, and some that are killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from arriero.errors import NotFound
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


SPAWNER = """
import os, sys, threading
from pathlib import Path
from arriero.store.names import Name
from arriero.store.registry.key import Key
from arriero.store.registry.pull import pull
from arriero.store.store import Store
from tests.store.registry.conftest import QUICK

root, name = Path(sys.argv[1]), Name.parse(sys.argv[2])
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        pull(Store(root), name, lambda status: None, threading.Event(), key=Key(root), limits=QUICK, insecure=True)
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("over", flush=True)
"""


class Killer:
    """Begins pulls and kills them: forks of a process that has imported everything, so that all its time is pulling."""

    def __init__(self, store, registry):
        self.store = store
        self.process = subprocess.Popen(
            [sys.executable, "-c", SPAWNER, str(store.root), f"{registry.host}/a/b"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pull_and_kill(self, seed):
        """Kill after a time that the seed says; whatever was there by then is sound."""
        go(self.process)
        child = int(self.process.stdout.readline())
        time.sleep(random.Random(seed).uniform(0.0, 0.4))
        with suppress(ProcessLookupError):  # it has come to its end before
            os.kill(child, signal.SIGKILL)
        assert self.process.stdout.readline() == "over\n"
        # No blob has a name that is not its hash, and no model lacks a blob.
        assert Store(self.store.root).verify() == []


@pytest.fixture
def killer(store, registry):
    running = Killer(store, registry)
    yield running
    running.process.communicate(timeout=30)


def prepared(registry, pace=0.02):
    registry.add("a/b:latest", {"model": BIG}, tensors=TENSORS)
    registry.pace = lambda _: pace


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_pull_leaves_a_sound_store_and_is_resumed(registry, store, puller, killer, seed):
    prepared(registry)
    killer.pull_and_kill(seed)
    registry.pace = None
    model = puller()
    assert model.path(model.manifest.layers[0]).read_bytes() == BIG
    assert store.verify() == []
    assert not [entry.name for entry in store.blobs.files() if "-partial" in entry.name]


def test_a_pull_killed_again_and_again_still_comes_to_its_end(registry, store, puller, killer):
    prepared(registry, 0.03)
    for seed in range(4):
        killer.pull_and_kill(seed + 100)
    had = registry.sent[digest_of(BIG)]
    registry.pace = None
    puller()
    assert store.verify() == []
    # What the killed ones had recorded was not fetched again.
    assert registry.sent[digest_of(BIG)] - had < len(BIG)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_killed_pulls(registry, store, puller, killer):
    prepared(registry)
    for seed in range(50):
        killer.pull_and_kill(seed)
        if seed % 5 == 4:
            registry.pace = None
            puller()
            registry.pace = lambda _: 0.02
        # Each begins with whatever the ones before have left of blobs, and never with the whole model.
        with suppress(NotFound):
            store.delete(f"{registry.host}/a/b")
    assert store.verify() == []

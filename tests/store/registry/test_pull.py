"""Pulling from a registry that works, and from one that is only slow or broken now and then."""

import dataclasses
import errno
import os
import random
import socket
import threading
import time

import httpx
import pytest

from arriero.errors import Cancelled, RegistryError, StoreError
from arriero.store.store import Store
from tests.helpers.registry import digest_of, verified

BIG = random.Random(1).randbytes(1_000_000)


def leftovers(store):
    return [entry.name for entry in store.blobs.files() if "partial" in entry.name or "tmp" in entry.name]


def test_a_model_arrives_byte_for_byte_in_parts(registry, store, puller):
    manifest = registry.add("a/b:latest", {"model": BIG, "system": b"Be brief.", "license#1": b"MIT"})
    model = puller()
    assert model.manifest.raw == manifest.raw
    assert model.path(model.manifest.layers[0]).read_bytes() == BIG
    assert model.system == "Be brief."
    assert store.verify() == []
    assert leftovers(store) == []
    assert registry.count("GET", digest_of(BIG)) == 10
    assert registry.sent[digest_of(BIG)] == len(BIG)


def test_statuses_are_those_of_the_protocol(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    puller()
    words = [status["status"] for status in puller.statuses]
    assert words[0] == "pulling manifest"
    assert words[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    mine = [status for status in puller.statuses if status.get("digest") == digest_of(BIG)]
    assert mine[-1] == {
        "status": f"pulling {digest_of(BIG)[7:19]}",
        "digest": digest_of(BIG),
        "total": len(BIG),
        "completed": len(BIG),
    }
    done = [status["completed"] for status in mine]
    assert done == sorted(done)


def test_tensors_are_reported_as_one_model(registry, puller):
    tensors = {f"model.layers.{n}.weight": random.Random(n).randbytes(1000) for n in range(20)}
    tensors["model.tied"] = tensors["model.layers.0.weight"]
    registry.add("a/b:latest", {}, tensors=tensors, config={"model_format": "safetensors"})
    puller()
    shown = [status for status in puller.statuses if "digest" in status]
    assert {status["digest"] for status in shown} == {"sha256:model"}
    assert {status["status"] for status in shown} == {"pulling model"}
    assert shown[-1]["completed"] == shown[-1]["total"]
    # Two layers of one content are one blob, fetched once.
    assert registry.count("GET", digest_of(tensors["model.tied"])) == 1


def test_blobs_that_are_there_are_not_fetched_again(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    puller()
    registry.add("a/b:two", {"model": BIG, "system": b"new"})
    before = registry.count("GET", digest_of(BIG))
    puller("a/b:two")
    assert registry.count("GET", digest_of(BIG)) == before


@pytest.mark.parametrize("damage", [b"", b"short", BIG + b"x"])
def test_a_blob_of_another_size_is_fetched_again(registry, store, puller, damage):
    registry.add("a/b:latest", {"model": BIG})
    puller()
    store.blobs.path(digest_of(BIG)).write_bytes(damage)
    puller()
    assert store.verify() == []


def test_a_model_of_another_store_is_not_fetched_again(registry, store, puller, tmp_path):
    registry.add("a/b:latest", {"model": BIG})
    puller()
    puller.store = Store(tmp_path / "ours", [store.root])
    before = registry.count("GET", digest_of(BIG))
    puller()
    assert registry.count("GET", digest_of(BIG)) == before
    assert puller.store.verify() == []


def test_what_a_replaced_model_alone_used_goes(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG, "system": b"old"})
    puller()
    registry.add("a/b:latest", {"model": BIG, "system": b"new"})
    puller()
    assert "removing unused layers" in [status["status"] for status in puller.statuses]
    assert not store.blobs.has(digest_of(b"old"))


def test_a_model_that_is_not_there_says_so(puller):
    with pytest.raises(RegistryError, match="pull model manifest: file does not exist"):
        puller("a/none")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_cut_connection_goes_on_where_it_broke(registry, store, puller, share):
    registry.add("a/b:latest", {"model": BIG})
    registry.cuts = [int(100_000 * share)] * 5
    puller()
    assert store.verify() == []
    assert registry.sent[digest_of(BIG)] == len(BIG)


def test_a_pull_that_broke_off_is_resumed_by_the_next(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.pace = lambda _: 0.02
    puller.limits = dataclasses.replace(puller.limits, streams=1)

    def report(status):
        if status.get("completed", 0) > 400_000:
            puller.stop.set()

    with pytest.raises(Cancelled):
        puller(report=report)
    assert f"{puller.registry.host}/a/b" not in store
    registry.pace = None
    had = registry.sent[digest_of(BIG)]
    assert had >= 400_000
    puller.stop.clear()
    puller()
    # What was on the wire when the first was given up may have left twice.
    assert registry.sent[digest_of(BIG)] - len(BIG) <= 2 * 65536
    assert store.verify() == []
    assert leftovers(store) == []


def test_a_server_without_ranges_sends_the_whole(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.ranges = False
    puller()
    assert store.verify() == []


def test_a_cut_connection_of_a_server_without_ranges_starts_over(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG[:150_000]})
    registry.ranges = False
    registry.cuts = [70_000, 120_000, 1_000]
    puller()
    assert store.verify() == []


def test_wrong_bytes_in_one_part_are_found_named_and_fetched_again(registry, store, puller, caplog):
    registry.add("a/b:latest", {"model": BIG})
    registry.wrong = {350_000: 1}
    puller()
    assert store.verify() == []
    assert "bytes 300000 to 400000" in caplog.text
    # Parts before it were compared with what is there; those behind it were left alone.
    assert registry.sent[digest_of(BIG)] == len(BIG) + 400_000


def test_a_part_put_together_by_two_connections_is_looked_at_first(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    puller.limits = dataclasses.replace(puller.limits, streams=1)
    registry.cuts = [100_000, 100_000, 100_000, 50_000]
    registry.wrong = {320_000: 1}
    puller()
    assert store.verify() == []
    assert registry.sent[digest_of(BIG)] == len(BIG) + 100_000


def test_a_registry_that_always_sends_wrong_bytes_is_an_error_and_leaves_nothing(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.wrong = {350_000: 1000}
    with pytest.raises(RegistryError, match="digest mismatch, file must be downloaded again: want"):
        puller()
    assert not store.blobs.has(digest_of(BIG))
    # The other blobs, which the error has cut off, may have left what had arrived of them.
    hexes = digest_of(BIG).partition(":")[2]
    assert not [name for name in leftovers(store) if hexes in name]


def test_failures_of_the_server_are_tried_again(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.failures = [503, 500]
    registry.manifest_failures = [503, 429]
    puller()
    assert store.verify() == []


def test_a_server_that_keeps_failing_is_given_up_with_its_own_words(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.failures = [503] * 1000
    with pytest.raises(RegistryError, match="answers 503: it failed; given up after 3 tries"):
        puller()


def test_a_host_that_is_not_there_is_told_at_once(puller):
    puller.limits = dataclasses.replace(puller.limits, tries=6, backoff=10.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        began = time.monotonic()
        with pytest.raises(RegistryError, match=r"127\.0\.0\.1 cannot be reached: .*refused"):
            puller(host=f"127.0.0.1:{taken.getsockname()[1]}")
    assert time.monotonic() - began < 5


def test_a_name_that_means_no_host_is_told_at_once(puller, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    puller.limits = dataclasses.replace(puller.limits, tries=6, backoff=10.0)
    began = time.monotonic()
    with pytest.raises(RegistryError, match=r"nowhere\.invalid cannot be reached: .*not known"):
        puller(host="nowhere.invalid")
    assert time.monotonic() - began < 5


def test_a_host_that_answered_once_is_waited_for(registry, store, puller, monkeypatch):
    registry.add("a/b:latest", {"model": BIG})
    real, refused = httpx.HTTPTransport.handle_request, []

    def handled(self, request):
        if "blobs" in request.url.path and len(refused) < 2:
            refused.append(request.url)
            raise httpx.ConnectError("refused", request=request)
        return real(self, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handled)
    puller()
    assert len(refused) == 2
    assert store.verify() == []


def test_a_slow_connection_is_replaced(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    puller.limits = dataclasses.replace(puller.limits, telling=50_000)
    registry.pace = lambda number: 1.0 if number == 6 else 0.0
    puller()
    # The slow one had sent the first half of its part; another brought the rest.
    assert registry.count("GET", digest_of(BIG)) == 11
    assert store.verify() == []


def test_a_stalled_connection_is_replaced(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    puller.limits = dataclasses.replace(puller.limits, stall=0.3)
    registry.pace = lambda number: 3.0 if number == 6 else 0.0
    began = time.monotonic()
    puller()
    assert time.monotonic() - began < 2.5
    assert store.verify() == []


def test_a_given_up_pull_ends_at_once_though_the_server_is_silent(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.pace = lambda _: 3.0
    threading.Timer(0.3, puller.stop.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        puller()
    assert time.monotonic() - began < 2.0


def test_redirects_to_another_host_get_no_token(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.login = True
    registry.redirect = lambda digest: f"http://localhost:{registry.port}/cdn/{digest}"
    puller()
    assert store.verify() == []
    cdn = [headers for _, path, headers in registry.requests if path.startswith("/cdn/")]
    assert len(cdn) >= 10
    assert not any("Authorization" in headers for headers in cdn)


def test_a_login_is_answered_with_a_signature_by_our_key(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.login = True
    puller()
    assert len(registry.logins) == 1
    login = registry.logins[0]
    assert login["query"]["service"] == ["s"]
    assert login["query"]["scope"] == ["repository:a/b:pull", "repository:c"]
    nothing = "ZTNiMGM0NDI5OGZjMWMxNDlhZmJmNGM4OTk2ZmI5MjQyN2FlNDFlNDY0OWI5MzRjYTQ5NTk5MWI3ODUyYjg1NQ=="
    assert verified(login["proof"], f"GET,{login['url']},{nothing}".encode())
    key = puller.home / "id_ed25519"
    assert key.stat().st_mode & 0o777 == 0o600
    assert (puller.home / "id_ed25519.pub").read_text().startswith("ssh-ed25519 ")


def test_a_token_that_runs_out_is_renewed(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.login = True

    def report(status):
        if status["status"] == "pulling manifest":
            return
        if registry.token == "t0":
            registry.token = "t1"

    registry.pace = lambda _: 0.01
    puller(report=report)
    assert [login["url"] for login in registry.logins]
    assert store.verify() == []


def test_a_login_that_is_refused_twice_is_unauthorized(registry, puller):
    registry.add("a/b:latest", {"model": BIG})
    registry.login = True
    registry.accepted = "another"
    with pytest.raises(RegistryError, match="unauthorized: access denied"):
        puller()


@pytest.mark.parametrize("token", ["", "t\u00e9", "a b", "a\r\nX: y"])
def test_a_token_that_is_no_token_is_an_error(registry, puller, token):
    registry.add("a/b:latest", {"model": BIG})
    registry.login = True
    registry.token = token
    with pytest.raises(RegistryError, match=r"unauthorized: what 127\.0\.0\.1 gives is no token"):
        puller()


def test_a_full_disk_ends_the_pull_at_once_and_it_can_be_resumed(registry, store, puller, monkeypatch):
    registry.add("a/b:latest", {"model": BIG})
    real, room = os.pwrite, [400_000]

    def pwrite(descriptor, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match="No space left on device"):
        puller()
    assert store.verify() == []
    monkeypatch.undo()
    before = registry.sent[digest_of(BIG)]
    puller()
    assert registry.sent[digest_of(BIG)] - before < len(BIG)
    assert store.verify() == []


def test_what_cannot_fit_the_disk_is_refused_before_it_is_fetched(registry, puller):
    raw = registry.add("a/b:latest", {"model": BIG}).raw
    registry.manifests["a/b/latest"] = raw.replace(b'"size":1000000', b'"size":900000000000000')
    with pytest.raises(StoreError, match=r"bytes free, and 9000000\d+ are still to come"):
        puller()
    assert registry.count("GET", "blobs") == 0


def test_two_pulls_of_one_model_fetch_it_once(registry, store, puller, tmp_path):
    registry.add("a/b:latest", {"model": BIG})
    registry.pace = lambda _: 0.1
    seen = [[], []]
    threads = [
        threading.Thread(
            target=lambda n=n: type(puller)(registry, Store(store.root), puller.home)(report=seen[n].append)
        )
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [statuses[-1] for statuses in seen] == [{"status": "success"}] * 2
    assert registry.sent[digest_of(BIG)] == len(BIG)
    # The one that waits follows the other's progress.
    assert all(len({s["completed"] for s in statuses if s.get("digest") == digest_of(BIG)}) > 3 for statuses in seen)
    assert store.verify() == []


def test_a_model_removed_during_its_pull_is_there_afterwards(registry, store, puller):
    registry.add("a/b:latest", {"model": BIG})
    puller()
    registry.add("a/b:latest", {"model": BIG, "system": b"new"})
    removed = []

    def report(status):
        if status["status"] != "pulling manifest" and not removed:
            removed.append(store.delete(f"{registry.host}/a/b"))
            store.prune()

    model = puller(report=report)
    assert model.system == "new"
    assert store.verify() == []


def test_finished_blobs_of_a_pull_that_broke_off_outlive_a_prune(registry, store, puller):
    manifest = registry.add("a/b:latest", {"model": BIG, "system": b"Be brief."})
    del registry.blobs[digest_of(BIG)]
    with pytest.raises(RegistryError, match="not in the registry, though its manifest names it"):
        puller()
    path = store.blobs.folder / digest_of(b"Be brief.").replace(":", "-")
    if not path.exists():
        store.blobs.put(b"Be brief.")
    os.utime(path, (1, 1))
    store.prune()
    assert path.exists()
    os.utime(store.root / "awaited" / f"{manifest.digest}.json", (1, 1))
    store.prune()
    assert not path.exists()

"""Pushing to a registry that takes uploads in each of the protocol's ways."""

import dataclasses
import random
import threading

import pytest

from arriero.errors import NotFound, RegistryError, StoreError
from arriero.store.names import Name
from arriero.store.registry.key import Key
from arriero.store.registry.push import push
from arriero.store.store import Store
from tests.helpers.registry import digest_of
from tests.helpers.stored import put_model
from tests.store.registry.conftest import QUICK

WEIGHTS = random.Random(2).randbytes(300_000)
LIMITS = dataclasses.replace(QUICK, push_part=100_000)


def send(registry, store, home, name="a/b", **changes):
    statuses = []
    full = Name.parse(f"{registry.host}/{name}")
    push(store, full, statuses.append, threading.Event(), key=Key(home), limits=LIMITS, insecure=True, **changes)
    return statuses


@pytest.mark.parametrize("mode", ["chunks", "redirect", "direct"])
def test_what_was_pushed_can_be_pulled(registry, store, puller, tmp_path, mode):
    registry.mode = mode
    registry.login = True
    model = put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS, "system": b"Be brief."})
    statuses = send(registry, store, tmp_path)
    assert registry.manifests["a/b/latest"] == model.manifest.raw
    assert statuses[0]["status"] == "retrieving manifest"
    assert [status["status"] for status in statuses][-2:] == ["pushing manifest", "success"]
    mine = [status for status in statuses if status.get("digest") == digest_of(WEIGHTS)]
    assert mine[-1]["status"] == f"pushing {digest_of(WEIGHTS)[7:19]}"
    assert mine[-1]["completed"] == mine[-1]["total"] == len(WEIGHTS)
    puller.store = Store(tmp_path / "other")
    assert puller().manifest.raw == model.manifest.raw
    assert puller.store.verify() == []


@pytest.mark.parametrize(("mode", "path"), [("redirect", "/elsewhere/"), ("direct", "/direct/")])
def test_bytes_that_go_elsewhere_carry_no_token(registry, store, tmp_path, mode, path):
    registry.mode = mode
    registry.login = True
    put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    send(registry, store, tmp_path)
    elsewhere = [headers for method, at, headers in registry.requests if method == "PUT" and at.startswith(path)]
    assert elsewhere
    assert not any("Authorization" in headers for headers in elsewhere)
    if mode == "direct":
        assert all(headers.get("x-proof", headers.get("X-Proof")) == "signed" for headers in elsewhere)


def test_blobs_that_are_there_are_not_sent(registry, store, tmp_path):
    registry.blobs[digest_of(WEIGHTS)] = WEIGHTS
    put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    send(registry, store, tmp_path)
    assert registry.count("POST", f"digest={digest_of(WEIGHTS).replace(':', '(:|%3A)')}") == 0


def test_parts_say_where_they_belong(registry, store, tmp_path):
    put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    send(registry, store, tmp_path)
    ranges = [headers["Content-Range"] for method, _, headers in registry.requests if method == "PATCH"]
    assert {"0-99999", "100000-199999", "200000-299999"} <= set(ranges)


def test_a_layer_of_another_model_is_mounted(registry, store, tmp_path):
    model = put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    from msgspec.structs import replace

    from arriero.store.manifests import Manifest

    taken = [replace(layer, from_=f"{registry.host}/c/d:latest") for layer in model.manifest.layers]
    store.put(f"{registry.host}/a/b", Manifest.build(model.manifest.config, taken))
    send(registry, store, tmp_path)
    assert registry.mounted == [digest_of(WEIGHTS)]


def test_an_upload_that_fails_is_begun_anew(registry, store, tmp_path):
    registry.cuts = [1]
    put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    send(registry, store, tmp_path)
    assert registry.blobs[digest_of(WEIGHTS)] == WEIGHTS


def test_an_upload_that_keeps_failing_names_no_model(registry, store, tmp_path):
    registry.cuts = [1] * 100
    put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    with pytest.raises(RegistryError, match="answers 503: busy; given up after 3 tries"):
        send(registry, store, tmp_path)
    assert registry.manifests == {}


def test_a_model_that_is_not_here_cannot_be_pushed(registry, store, tmp_path):
    with pytest.raises(NotFound):
        send(registry, store, tmp_path)


def test_a_damaged_model_is_not_pushed(registry, store, tmp_path):
    model = put_model(store, f"{registry.host}/a/b", {"model": WEIGHTS})
    store.blobs.path(model.manifest.layers[0].digest).write_bytes(b"short")
    with pytest.raises(StoreError, match="is damaged"):
        send(registry, store, tmp_path)
    assert registry.count("POST", "uploads") == 0

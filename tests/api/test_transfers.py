"""Pull, push and verify through a live server, from a registry on loopback."""

from __future__ import annotations

import json
import random
import threading
import time

import httpx
import ollama
import pytest

from tests.helpers.echo_runner import echo_command
from tests.helpers.live_server import live_server
from tests.helpers.registry import digest_of, fake_registry

WEIGHTS = random.Random(5).randbytes(2_000_000)


@pytest.fixture
def registry(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with fake_registry() as running:
        running.add("a/b:latest", {"model": WEIGHTS, "system": b"Be brief."})
        yield running


@pytest.fixture
def live(tmp_path):
    with live_server(tmp_path, echo_command(tmp_path)) as running:
        yield running


@pytest.fixture
def client(live):
    with httpx.Client(base_url=live.url, timeout=20, trust_env=False, verify=False) as client:
        yield client


def body(registry, **more):
    return {"model": f"{registry.host}/a/b", "insecure": True, **more}


def test_the_real_client_pulls_pushes_and_lists(registry, live):
    with ollama.Client(host=live.url, verify=False) as client:
        _pull_list_push(client, registry)


def _pull_list_push(client, registry):
    name = f"{registry.host}/a/b"
    statuses = [item.status for item in client.pull(name, insecure=True, stream=True)]
    assert (statuses[0], statuses[-1]) == ("pulling manifest", "success")
    assert [model.model for model in client.list().models] == [f"{name}:latest"]
    client.copy(name, f"{registry.host}/c/d")
    assert client.push(f"{registry.host}/c/d", insecure=True).status == "success"
    assert registry.manifests["c/d/latest"] == registry.manifests["a/b/latest"]


def test_without_a_stream_only_the_last_status_comes(registry, client):
    assert client.post("/api/pull", json=body(registry, stream=False)).json() == {"status": "success"}


def test_an_unknown_model_is_a_500_that_says_so(registry, client):
    reply = client.post("/api/pull", json={"model": f"{registry.host}/a/none", "insecure": True, "stream": False})
    assert reply.status_code == 500
    assert reply.json() == {"error": "pull model manifest: file does not exist"}


def test_plain_http_must_be_asked_for(registry, client):
    reply = client.post("/api/pull", json={"model": f"http://{registry.host}/a/b", "stream": False})
    assert reply.status_code == 400
    assert "insecure protocol http" in reply.json()["error"]


def test_an_error_inside_a_stream_is_its_last_line(registry, client):
    del registry.blobs[digest_of(WEIGHTS)]
    lines = client.post("/api/pull", json=body(registry)).text.splitlines()
    assert json.loads(lines[0]) == {"status": "pulling manifest"}
    assert "is not in the registry, though its manifest names it" in json.loads(lines[-1])["error"]


def test_two_clients_share_one_pull(registry, live, client):
    registry.pace = lambda _: 0.015
    replies = []
    threads = [
        threading.Thread(
            target=lambda: replies.append(
                httpx.post(f"{live.url}/api/pull", json=body(registry), timeout=20, trust_env=False).text
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert [json.loads(reply.splitlines()[-1]) for reply in replies] == [{"status": "success"}] * 2
    assert registry.count("GET", "manifests") == 1
    assert registry.sent[digest_of(WEIGHTS)] == len(WEIGHTS)


def test_one_of_two_may_leave_and_the_pull_goes_on(registry, live, client):
    registry.pace = lambda _: 0.02
    result = []
    other = threading.Thread(
        target=lambda: result.append(client.post("/api/pull", json=body(registry)).text.splitlines()[-1])
    )
    with httpx.stream("POST", f"{live.url}/api/pull", json=body(registry), timeout=20, trust_env=False) as stream:
        next(stream.iter_lines())
        other.start()
        time.sleep(0.2)
    other.join()
    assert json.loads(result[0]) == {"status": "success"}


def test_a_pull_ends_when_its_last_client_leaves_and_can_be_resumed(registry, live, client):
    registry.pace = lambda _: 0.05
    with httpx.stream("POST", f"{live.url}/api/pull", json=body(registry), timeout=20, trust_env=False) as stream:
        for line in stream.iter_lines():
            if json.loads(line).get("completed", 0) > 300_000:
                break
    deadline = time.monotonic() + 5
    while live.services.transfers._jobs:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    had = registry.sent[digest_of(WEIGHTS)]
    assert had < len(WEIGHTS)
    registry.pace = None
    assert client.post("/api/pull", json=body(registry, stream=False)).json() == {"status": "success"}
    # Nothing was fetched twice but what was on its way when the client left.
    assert registry.sent[digest_of(WEIGHTS)] <= len(WEIGHTS) + 4 * 65536
    assert live.store.verify() == []


def test_a_server_that_stops_ends_its_pulls(registry, tmp_path):
    registry.pace = lambda _: 1.0
    ended = []
    with live_server(tmp_path, echo_command(tmp_path)) as live:

        def pull():
            with httpx.stream(
                "POST", f"{live.url}/api/pull", json=body(registry), timeout=20, trust_env=False
            ) as stream:
                ended.extend(stream.iter_lines())

        thread = threading.Thread(target=pull)
        thread.start()
        deadline = time.monotonic() + 5
        while not registry.count("GET", "sha256") and time.monotonic() < deadline:
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    thread.join()
    assert "given up" in json.loads(ended[-1])["error"]


def test_verify_finds_what_is_damaged_and_a_pull_mends_it(registry, live, client):
    client.post("/api/pull", json=body(registry, stream=False))
    name = f"{registry.host}/a/b"
    config = json.loads(registry.manifests["a/b/latest"])["config"]["digest"]
    assert client.post("/api/verify", json={"model": name, "stream": False}).json() == {"status": "1 problem"}
    path = live.store.blobs.path(digest_of(b"Be brief."))
    path.write_bytes(b"Be bribed")
    lines = [json.loads(line) for line in client.post("/api/verify", json={"repair": True}).text.splitlines()]
    problems = [line["problem"] for line in lines if "problem" in line]
    assert any(digest_of(b"Be brief.") in problem and "not those of its name" in problem for problem in problems)
    assert not any(config in problem for problem in problems)
    assert not path.exists()
    client.post("/api/pull", json=body(registry, stream=False))
    assert path.read_bytes() == b"Be brief."
    assert client.post("/api/verify", json={"model": "none", "stream": False}).status_code == 404

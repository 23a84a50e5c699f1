"""Clients that leave: their rows end, their places in the queue go, and the next request is served (R04, R05)."""

import asyncio
import json
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.echo_runner import Script, echo_command, say
from tests.helpers.live_server import live_server
from tests.helpers.scripted_runner import received
from tests.helpers.stored_model import put_model

BUSY = "server busy, please try again.  maximum pending requests exceeded"


def request_bytes(path: str, body: dict) -> bytes:
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    return head.encode() + b"\r\n\r\n" + payload


def endless(path: str, stream: bool, **manner: object) -> dict:
    asked = say("ab", endless=True, **({"delay": 0.01} | manner))
    body = {"model": "tiny", "stream": stream}
    return body | ({"prompt": asked} if path == "/api/generate" else {"messages": [{"role": "user", "content": asked}]})


def wait_for(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def runners(folder: Path) -> list[int]:
    """Pids of the runners whose script is in a folder."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(part.startswith(str(folder)) for part in child.cmdline()):
                found.append(child.pid)
    return found


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


@pytest.fixture(autouse=True)
def loaded(server, http):
    http.post("/api/generate", json={"model": "tiny"})
    wait_for(lambda: server.rows() == 0)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_the_reply_is_made_ends_its_row(server, path, stream):
    with connect(server) as client:
        client.sendall(request_bytes(path, endless(path, stream)))
        wait_for(lambda: server.rows() == 1)
    wait_for(lambda: server.rows() == 0, 3.0)


def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_its_row(server, http):
    with connect(server) as client:
        client.sendall(request_bytes("/api/chat", endless("/api/chat", True)))
        assert b"200 OK" in client.recv(1024)
        client.recv(64)
    wait_for(lambda: server.rows() == 0, 3.0)
    reply = http.post(
        "/api/chat", json={"model": "tiny", "stream": False, "messages": [{"role": "user", "content": say("next")}]}
    )
    assert reply.json()["message"]["content"] == "next"


def test_a_connection_that_is_reset_ends_its_row(server):
    client = connect(server)
    client.sendall(request_bytes("/api/chat", endless("/api/chat", True)))
    client.recv(64)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    wait_for(lambda: server.rows() == 0, 3.0)


def test_a_client_that_sends_half_a_request_and_leaves_does_no_harm(server, http):
    whole = request_bytes("/api/chat", endless("/api/chat", True))
    for size in (10, len(whole) // 2, len(whole) - 1):
        with connect(server) as client:
            client.sendall(whole[:size])
    assert http.get("/").status_code == 200
    assert server.rows() == 0


def test_a_reader_that_is_slow_does_not_hold_up_the_others(server, http):
    with connect(server) as slow:
        slow.sendall(request_bytes("/api/chat", endless("/api/chat", True, delay=0.0, piece=50)))
        reply = http.post(
            "/api/chat",
            json={"model": "tiny", "stream": False, "messages": [{"role": "user", "content": say("quick")}]},
        )
        assert reply.json()["message"]["content"] == "quick"
    wait_for(lambda: server.rows() == 0)


def test_queued_requests_of_departed_clients_are_never_run(tmp_path):
    script = Script(max_rows=1, log=str(tmp_path / "log"))
    with live_server(tmp_path, echo_command(tmp_path, script)) as server:
        put_model(server.store)
        slow = connect(server)
        slow.sendall(request_bytes("/api/generate", endless("/api/generate", False)))
        wait_for(lambda: server.rows() == 1)
        queued = []
        for number in range(6):
            queued.append(connect(server))
            body = {"model": "tiny", "stream": False, "prompt": say(f"queued {number}")}
            queued[-1].sendall(request_bytes("/api/generate", body))
            wait_for(lambda: server.rows() == 2 + number)  # noqa: B023
        for client in queued[:4]:
            client.close()
        wait_for(lambda: server.rows() == 3)
        slow.close()
        assert [read_json(client)["response"] for client in queued[4:]] == ["queued 4", "queued 5"]
        for client in queued[4:]:
            client.close()
    log = received(tmp_path / "log")
    assert sum(entry["type"] == "cancel" for entry in log) == 5


def test_a_full_queue_is_a_503_at_once(tmp_path):
    with live_server(tmp_path, echo_command(tmp_path, Script(max_rows=1)), max_queue=1) as server:
        put_model(server.store)
        clients = []
        for number in range(2):
            clients.append(connect(server))
            clients[-1].sendall(request_bytes("/api/generate", endless("/api/generate", False)))
            wait_for(lambda: server.rows() == 1 + number)  # noqa: B023
        with connect(server) as refused:
            refused.sendall(request_bytes("/api/generate", endless("/api/generate", False)))
            assert read_json(refused)["error"] == BUSY
        for client in clients:
            client.close()


def test_a_load_goes_on_when_the_one_who_asked_leaves(tmp_path):
    script = Script(load_steps=5, load_delay=0.1)
    with live_server(tmp_path, echo_command(tmp_path, script)) as server:
        put_model(server.store)
        with connect(server) as client:
            client.sendall(request_bytes("/api/generate", {"model": "tiny", "prompt": say("x")}))
            wait_for(lambda: [m.state for m in server.call(server.scheduler.loaded)] == ["loading"], 20.0)
        wait_for(lambda: [m.state for m in server.call(server.scheduler.loaded)] == ["ready"], 20.0)


def test_the_server_stops_with_replies_in_flight_and_leaves_no_process(tmp_path):
    with live_server(tmp_path, echo_command(tmp_path)) as server:
        put_model(server.store)
        client = connect(server)
        client.sendall(request_bytes("/api/chat", endless("/api/chat", True)))
        client.recv(64)
        time.sleep(0.1)
        assert len(runners(tmp_path)) == 1
        began = time.monotonic()
    assert time.monotonic() - began < 3
    text = b""
    while piece := client.recv(65536):
        text += piece
    client.close()
    assert b'{"error":"the runner of tiny:latest was stopped"}' in text
    assert runners(tmp_path) == []


def read_json(client: socket.socket) -> dict:
    data = b""
    while True:
        head, found, body = data.partition(b"\r\n\r\n")
        if found:
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            if len(body) >= length:
                return json.loads(body[:length])
        piece = client.recv(65536)
        assert piece, "the server closed the connection"
        data += piece


async def test_sixteen_clients_never_get_each_others_words(ahttp):
    async def one(number: int) -> None:
        for turn in range(4):
            words = f"client {number} turn {turn} " * 3
            path = random.Random(number * 10 + turn).choice(["/api/chat", "/api/generate"])
            asked = say(words, piece=1 + (number + turn) % 4, delay=0.001)
            body = {"model": "tiny", "prompt": asked, "messages": [{"role": "user", "content": asked}]}
            text = ""
            async with ahttp.stream("POST", path, json=body) as reply:
                async for line in reply.aiter_lines():
                    item = json.loads(line)
                    text += item.get("response", "") + item.get("message", {}).get("content", "")
            assert text == words

    await asyncio.gather(*(one(number) for number in range(16)))


async def test_two_hundred_random_departures_leave_no_row(server):
    random_ = random.Random(7)

    async def one() -> None:
        stream = random_.random() < 0.7
        path = random_.choice(["/api/chat", "/api/generate"])
        data = request_bytes(path, endless(path, stream, delay=random_.choice([0.0, 0.002]), piece=2))
        moment, rude = random_.random(), random_.random() < 0.5
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data if moment > 0.2 else data[: random_.randrange(len(data))])
        await writer.drain()
        if moment > 0.5:
            await asyncio.sleep(random_.random() * 0.05)
        if moment > 0.8 and stream:
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(random_.randrange(1, 400)), 0.2)
        if rude:
            writer.transport.abort()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(20)))
    deadline = time.monotonic() + 10
    while server.rows():
        assert time.monotonic() < deadline, f"{server.rows()} rows are left"
        await asyncio.sleep(0.02)
    assert len(runners(server.settings.home)) == len(server.call(server.scheduler.loaded))


def test_a_stop_string_ends_the_row_and_not_only_its_text(server, http):
    body = endless("/api/chat", stream=False) | {"options": {"stop": ["ba"]}}
    assert http.post("/api/chat", json=body).json()["message"]["content"] == "a"
    wait_for(lambda: server.rows() == 0)

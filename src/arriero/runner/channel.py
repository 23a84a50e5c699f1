"""The runner's end of the channel: a thread that moves messages and touches no array.

It also answers status requests from the last published figures, so that a long prefill never delays them, and ends the
process when the server is gone or asked for it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from arriero.runner.messages import (
    FromRunner,
    Shutdown,
    Status,
    StatusRequest,
    ToRunner,
    decode_to_runner,
    encode,
)
from arriero.runner.parent import orphaned

log = logging.getLogger(__name__)

GRACE_SECONDS = 3.0
"""How long the array thread may take to notice that the channel closed before the process is ended under it."""

_POLL_MILLISECONDS = 1000
_LINGER_MILLISECONDS = 1000


class Channel:
    """Messages from and to the server. `send`, `receive`, `publish` and `close` are for the array thread."""

    def __init__(self, endpoint: str, parent: int) -> None:
        self._endpoint = endpoint
        self._parent = parent
        self._inbox: queue.SimpleQueue[ToRunner] = queue.SimpleQueue()
        self._outbox: deque[list[FromRunner]] = deque()
        self._status = Status(
            id="",
            rows_running=0,
            rows_waiting=0,
            memory_bytes=0,
            peak_bytes=0,
            cache_bytes=0,
            snapshot_bytes=0,
            tokens_generated=0,
            tokens_prefilled=0,
        )
        self._closed = threading.Event()
        """Set when nothing more comes from the server."""
        self._done = threading.Event()
        """Set when the array thread has nothing more to say."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)

    def start(self) -> None:
        """Connect and begin to move messages."""
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether the server is gone or wants this process to end."""
        return self._closed.is_set()

    def interrupt(self) -> None:
        """End as if the server had sent `Shutdown`; safe in a signal handler."""
        self._closed.set()
        self._inbox.put(Shutdown())

    def send(self, messages: Iterable[FromRunner]) -> None:
        """Queue messages for the server, in order; never blocks."""
        batch = list(messages)
        if batch:
            self._outbox.append(batch)
            os.write(self._wake_write, b"\0")

    def receive(self, block: bool) -> list[ToRunner]:
        """The messages that have arrived; with `block`, at least one."""
        messages = [self._inbox.get()] if block else []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def publish(self, status: Status) -> None:
        """Replace the figures that status requests are answered with."""
        self._status = status

    def close(self) -> None:
        """Send what is queued and stop the thread."""
        self._done.set()
        os.write(self._wake_write, b"\0")
        self._thread.join(GRACE_SECONDS)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            socket, monitor = self._connect(context)
            self._move(socket, monitor)
            self._end_grace()
            self._flush(socket)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close()
        except Exception:
            log.exception("the message thread failed")
            self.interrupt()
            self._end_grace()
        finally:
            context.destroy()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The socket to the server, and the one that tells of its end."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(self._endpoint)
        return socket, monitor

    def _move(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Move messages until either side has nothing more to say or is gone."""
        poller = zmq.Poller()
        for source in (socket, monitor, self._wake_read):
            poller.register(source, zmq.POLLIN)
        while not self._done.is_set() and not self.closed:
            ready = dict(poller.poll(_POLL_MILLISECONDS))
            if self._wake_read in ready:
                os.read(self._wake_read, 65536)
            if socket in ready:
                self._take(socket)
            gone = monitor in ready and recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            if gone or (not ready and orphaned(self._parent)):
                self.interrupt()
                return
            self._flush(socket)

    def _end_grace(self) -> None:
        """Wait for the array thread's last words; end the process under it when they don't come."""
        if not self._done.wait(GRACE_SECONDS):
            log.warning("the computation did not stop in %g s; the runner ends under it", GRACE_SECONDS)
            os._exit(1)

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        """Move everything that has arrived to the inbox; answer status requests."""
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_runner(frame)
            except msgspec.MsgspecError as error:
                log.error("a message of the server cannot be read (%s); it is dropped", error)
                continue
            if isinstance(message, StatusRequest):
                socket.send(encode(msgspec.structs.replace(self._status, id=message.id)))
                continue
            if isinstance(message, Shutdown):
                self._closed.set()
            self._inbox.put(message)

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            socket.send_multipart([encode(message) for message in self._outbox.popleft()])

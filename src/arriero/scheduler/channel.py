"""The server's end of the channel to one runner: a socket in a directory that only this user can enter."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from arriero.runner.messages import FromRunner, ToRunner, decode_from_runner, encode

log = logging.getLogger(__name__)

_LONGEST_ADDRESS = 100
"""Bytes of a Unix socket's path that every system takes."""


class SocketDirectory:
    """A private directory (mode 0700) for sockets, made at first use and removed with `close`."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._made = 0

    def endpoint(self) -> str:
        """A new `ipc://` address."""
        if self._path is None or not self._path.is_dir():
            path = tempfile.mkdtemp(prefix="arriero-")
            if len(os.fsencode(path)) > _LONGEST_ADDRESS - 10:
                os.rmdir(path)
                path = tempfile.mkdtemp(prefix="arriero-", dir="/tmp")
            self._path = Path(path)
        self._made += 1
        return f"ipc://{self._path}/{self._made}"

    def close(self) -> None:
        """Remove the directory."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None


class ServerChannel:
    """Messages to and from one runner."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)

    def send(self, message: ToRunner) -> bool:
        """Queue a message without waiting; False when no runner is connected."""
        # With NOBLOCK the future is done at once. The asyncio socket must make the call all the same: sending behind
        # its back can swallow the edge that tells it of a message to receive.
        sent = cast("asyncio.Future[object]", self._socket.send(encode(message), flags=zmq.NOBLOCK))
        error = sent.exception()
        if error is not None and not isinstance(error, zmq.Again):
            raise error
        return error is None

    async def messages(self) -> AsyncIterator[FromRunner]:
        """What the runner says, for ever."""
        while True:
            for frame in await self._socket.recv_multipart():
                try:
                    yield decode_from_runner(frame)
                except msgspec.MsgspecError as error:
                    log.error("a message of a runner cannot be read (%s); it is dropped", error)

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

"""One runner process: started, watched, its log relayed, stopped within seconds or killed."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence

import msgspec

from arriero.errors import LoadError
from arriero.runner.messages import RunnerConfig

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time between a request to end and a kill."""

LOG_SECONDS = 1.0
"""How long the rest of a log may take to arrive after its process has ended."""

LAST_LINE_BYTES = 256
_READ_BYTES = 65536
_LEVELS = {name.encode(): level for name, level in logging.getLevelNamesMapping().items()}
"""First words of a runner's own log lines."""


class RunnerProcess:
    """A started runner. Its standard error goes to our log line by line; the last line is kept for error messages."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._log = logging.getLogger(f"arriero.runner.{name}")
        self._last = b""
        self._partial = b""
        self._exited = asyncio.create_task(self._watch(), name=f"runner {process.pid}")

    @classmethod
    async def start(cls, command: Sequence[str], config: RunnerConfig, name: str) -> RunnerProcess:
        """Run `command -` with the configuration on its standard input.

        Not on the command line: a model of many tensor files has more paths than one argument may hold. The runner gets
        a session of its own, so that a Ctrl-C at the terminal reaches it through the server only. Raises LoadError when
        it cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                "-",
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LoadError(f"the runner of {name} cannot be started: {error}") from error
        runner = cls(process, name)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(config))
            await process.stdin.drain()
            process.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            log.warning("the runner of %s ended before it read its configuration", name)
        except BaseException:
            runner.kill()
            await runner.wait()
            raise
        return runner

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.returncode

    @property
    def last_line(self) -> str:
        """The last line of its standard error that is no mere information, at most 256 bytes of it, or ''."""
        return self._last[:LAST_LINE_BYTES].decode("utf-8", "replace")

    @property
    def ending(self) -> str:
        """Why it ended, for an error message: its last line, else its exit status."""
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            how += ", as systems do when memory runs out"
        return f"{self.last_line} ({how})" if self.last_line else how

    async def wait(self) -> int:
        """The exit status, once it has ended and its log is read; any number of tasks may wait."""
        return await asyncio.shield(self._exited)

    async def stop(self) -> None:
        """Ask it to end, wait, kill; returns when the process is gone."""
        if self._process.returncode is None:
            # Not SIGINT: until the runner has handlers of its own Python would raise it inside whatever import is
            # running, and some swallow it (2 of 150 stops during a start were lost so). SIGTERM ends the process.
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.wait(), STOP_SECONDS)
            except TimeoutError:
                log.warning("the runner %d did not stop in %g s; it is killed", self.pid, STOP_SECONDS)
                self.kill()
        await self.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            log.debug("the runner %d has ended already", self.pid)

    async def _watch(self) -> int:
        log_read, ended = asyncio.create_task(self._read_log()), asyncio.create_task(self._process.wait())
        # A program that the runner started may hold the pipe open for longer than the runner lives, and asyncio's own
        # wait ends with the pipe; the status is there before.
        while self._process.returncode is None:
            await asyncio.wait([ended], timeout=LOG_SECONDS)
        await asyncio.wait([log_read], timeout=LOG_SECONDS)
        log_read.cancel()
        ended.cancel()
        return self._process.returncode

    async def _read_log(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        while data := await stream.read(_READ_BYTES):
            self._relay(data)
        self._relay(b"\n")

    def _relay(self, data: bytes) -> None:
        """Log whole lines; a line longer than one read is logged in pieces, so it never holds the runner up."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) >= _READ_BYTES:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            text = line.strip()
            if text:
                word, _, rest = text.partition(b" ")
                level = _LEVELS.get(word)
                if level is None or level > logging.INFO:
                    self._last = text
                self._log.log(level or logging.INFO, "%s", (rest if level else text).decode("utf-8", "replace"))

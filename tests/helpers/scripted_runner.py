"""A runner that says what a script says: any token ids, delays and faults through the real channel, without a model.

Use: `Scheduler(settings, runner_command=scripted_command(tmp_path, Script(...)))`. The replies go to the requests in
order, the last one for ever. Like the real runner it honours `max_tokens`, `stop_tokens`, `Cancel` and its rows' limit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Literal

import msgspec

from arriero.runner.channel import Channel
from arriero.runner.messages import (
    Cancel,
    Failed,
    Finished,
    LoadFailed,
    Loading,
    PrefillProgress,
    Ready,
    RunnerConfig,
    SpeculationUsed,
    Status,
    Submit,
    TokenLogprob,
    Tokens,
)
from arriero.runner.parent import bind_to_parent


class Reply(msgspec.Struct, kw_only=True):
    """What one request gets."""

    tokens: list[int] = []
    piece: int = 1
    """Tokens in one message."""
    delay: float = 0.0
    """Seconds before each message."""
    reason: Literal["stop", "length"] = "stop"
    """How it ends when nothing else ends it."""
    logprobs: list[TokenLogprob] | None = None
    """One a token; by default, requests that ask get −0.5 and no alternatives."""
    fail_after: int | None = None
    """Tokens after which the row fails with `error` and `message`."""
    error: str = "ArrieroError"
    message: str = "scripted failure"
    crash_after: int | None = None
    """Tokens after which the process ends with status 3, its last words being `crash_line`."""
    crash_line: str = "scripted crash"
    endless: bool = False
    """Repeat the tokens until `max_tokens`."""
    cached_tokens: int = 0
    """Prompt tokens that it says it knew already."""
    rounds: int = 0
    """Rounds of speculation that it says it made, with 3 drafted tokens and 2 that stayed in each; 0 = no drafting."""


class Script(msgspec.Struct, kw_only=True):
    """What one runner process does."""

    replies: list[Reply] = []
    architecture: str = "scripted"
    context_length: int = 4096
    vocab_size: int = 1 << 20
    weight_bytes: int = 1000
    cache_bytes_per_token: int = 0
    round_bytes: int = 0
    max_rows: int = 8
    load_steps: int = 1
    load_delay: float = 0.0
    """Seconds before each step of the load."""
    load_hang: bool = False
    """Never get ready, and say nothing."""
    load_error: str = ""
    """Class name of the error that the load fails with."""
    load_message: str = "scripted load failure"
    load_crash: str = ""
    """Last words of a process that ends while loading."""
    ignore_interrupt: bool = False
    """Neither `Shutdown` nor SIGTERM end it."""
    stderr: str = ""
    """Written to standard error at the start."""
    log: str = ""
    """File that gets one JSON line for each message received, and one `{"type": "start", "pid": …}`."""


class _Row:
    def __init__(self, request: Submit, reply: Reply) -> None:
        self.request, self.reply = request, reply
        self.sent = 0
        self.due = time.monotonic() + reply.delay
        self.began = time.monotonic_ns()
        self.greeted = False


def scripted_command(folder: Path, script: Script, name: str = "script.json") -> list[str]:
    """Write the script and give the command that plays it."""
    path = folder / name
    path.write_bytes(msgspec.json.encode(script))
    return [sys.executable, str(Path(__file__)), str(path)]


def received(path: Path) -> list[dict]:
    """The messages in a script's log."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class ScriptedRunner:
    """Plays a script over a channel."""

    def __init__(self, script: Script, channel: Channel) -> None:
        self.script, self.channel = script, channel
        self.rows: list[_Row] = []
        self.queue: deque[Submit] = deque()
        self.replies = deque(script.replies or [Reply()])

    def load(self) -> bool:
        """Whether the load succeeded."""
        script = self.script
        if script.load_hang:
            while not self.channel.closed:
                time.sleep(0.02)
            return False
        for step in range(script.load_steps):
            self._sleep(script.load_delay)
            if self.channel.closed:
                return False
            self.channel.send([Loading(step + 1, script.load_steps, "weights")])
        if script.load_crash:
            _die(script.load_crash)
        if script.load_error:
            self.channel.send([LoadFailed(script.load_error, script.load_message)])
            return False
        self.channel.publish(self._status())
        self.channel.send(
            [
                Ready(
                    architecture=script.architecture,
                    context_length=script.context_length,
                    vocab_size=script.vocab_size,
                    weight_bytes=script.weight_bytes,
                    cache_bytes_per_token=script.cache_bytes_per_token,
                    round_bytes=script.round_bytes,
                    max_rows=script.max_rows,
                    device="cpu (script)",
                    dtype="float32",
                    load_seconds=0.0,
                )
            ]
        )
        return True

    def serve(self) -> None:
        """Answer until the channel closes."""
        while not self.channel.closed:
            for message in self.channel.receive(block=not self.rows and not self.queue):
                self.note(message)
                if isinstance(message, Submit):
                    self.queue.append(message)
                elif isinstance(message, Cancel):
                    self._cancel(message.id)
            while self.queue and len(self.rows) < self.script.max_rows:
                reply = self.replies.popleft() if len(self.replies) > 1 else self.replies[0]
                self.rows.append(_Row(self.queue.popleft(), reply))
            for row in list(self.rows):
                if time.monotonic() >= row.due:
                    self._step(row)
            self.channel.publish(self._status())
            if self.rows:
                time.sleep(max(0.0, min(0.02, min(row.due for row in self.rows) - time.monotonic())))

    def note(self, message: object) -> None:
        if self.script.log:
            with open(self.script.log, "ab") as log:
                log.write(msgspec.json.encode(message) + b"\n")

    def _step(self, row: _Row) -> None:
        request, reply = row.request, row.reply
        if not row.greeted:
            row.greeted = True
            self.channel.send([PrefillProgress(request.id, len(request.tokens), len(request.tokens))])
        if reply.crash_after is not None and row.sent >= reply.crash_after:
            self._finish_sending()
            _die(reply.crash_line)
        if reply.fail_after is not None and row.sent >= reply.fail_after:
            self._end(row, Failed(request.id, reply.error, reply.message))
            return
        limit = request.max_tokens if request.max_tokens > 0 else self.script.context_length - len(request.tokens)
        piece, reason = [], None
        while len(piece) < reply.piece and reason is None:
            at = row.sent + len(piece)
            if at >= limit:
                reason = "length"
            elif not reply.tokens or (at >= len(reply.tokens) and not reply.endless):
                reason = reply.reason
            elif reply.tokens[at % len(reply.tokens)] in request.stop_tokens:
                reason = "stop"
            else:
                piece.append(reply.tokens[at % len(reply.tokens)])
                for bound in (reply.crash_after, reply.fail_after):
                    if bound is not None and row.sent + len(piece) >= bound:
                        self._send(row, piece)
                        return
        self._send(row, piece)
        if reason is not None or row.sent >= limit:
            self._end(row, self._finished(row, reason or "length"))

    def _send(self, row: _Row, piece: list[int]) -> None:
        row.due = time.monotonic() + row.reply.delay
        if not piece:
            return
        logprobs = None
        if row.request.sampling.logprobs:
            scripted = row.reply.logprobs
            logprobs = [
                scripted[(row.sent + i) % len(scripted)] if scripted else TokenLogprob(-0.5, [])
                for i in range(len(piece))
            ]
        row.sent += len(piece)
        self.channel.send([Tokens(row.request.id, piece, logprobs)])

    def _cancel(self, row_id: str) -> None:
        for row in list(self.rows):
            if row.request.id == row_id:
                self._end(row, self._finished(row, "cancelled"))
        for request in list(self.queue):
            if request.id == row_id:
                self.queue.remove(request)
                self.channel.send([self._finished(_Row(request, Reply()), "cancelled")])

    def _end(self, row: _Row, message: Finished | Failed) -> None:
        self.rows.remove(row)
        self.channel.send([message])

    def _finished(self, row: _Row, reason: Literal["stop", "length", "cancelled"]) -> Finished:
        return Finished(
            id=row.request.id,
            reason=reason,
            prompt_tokens=len(row.request.tokens),
            cached_tokens=row.reply.cached_tokens,
            generated_tokens=row.sent,
            prefill_ns=1000,
            decode_ns=time.monotonic_ns() - row.began,
            speculation=_drafted(row.reply.rounds) if row.reply.rounds else None,
        )

    def _status(self) -> Status:
        return Status(
            id="",
            rows_running=len(self.rows),
            rows_waiting=len(self.queue),
            memory_bytes=self.script.weight_bytes,
            peak_bytes=self.script.weight_bytes,
            cache_bytes=0,
            snapshot_bytes=0,
            tokens_generated=sum(row.sent for row in self.rows),
            tokens_prefilled=0,
        )

    def _finish_sending(self) -> None:
        time.sleep(0.05)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.channel.closed:
            time.sleep(min(0.01, seconds))


def _drafted(rounds: int) -> SpeculationUsed:
    return SpeculationUsed(
        kind="lookup",
        rounds=rounds,
        drafted=3 * rounds,
        accepted=2 * rounds,
        reached_by_position=[],
        accepted_by_position=[],
        plain_steps=0,
        parked_ns=0,
    )


def _die(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    os._exit(3)


class _Start(msgspec.Struct, tag="start"):
    pid: int


def main(arguments: list[str]) -> int:
    """Play the script at `arguments[0]`; the configuration comes on standard input."""
    script = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Script)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=RunnerConfig)
    sys.stderr.write(script.stderr)
    sys.stderr.flush()
    parent = config.parent_pid or os.getppid()
    bind_to_parent(parent)
    if script.ignore_interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        runner = ScriptedRunner(script, Channel(config.endpoint, parent))
        runner.note(_Start(os.getpid()))
        runner.channel.start()
        runner.load()
        while True:
            time.sleep(1)
    channel = Channel(config.endpoint, parent)
    signal.signal(signal.SIGTERM, lambda *_: channel.interrupt())
    runner = ScriptedRunner(script, channel)
    runner.note(_Start(os.getpid()))
    channel.start()
    loaded = runner.load()
    if loaded:
        runner.serve()
    channel.close()
    return 0 if loaded or channel.closed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

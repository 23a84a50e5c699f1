"""A scripted runner whose replies stand in the prompts: the byte tokenizer's ids are read back as text.

A prompt that holds `@@{…}@@text` is answered with `text` in the manner of the JSON object (fields of `Reply`); others
get the script's replies.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tests.helpers import scripted_runner
from tests.helpers.scripted_runner import Reply, Script, ScriptedRunner, scripted_command

MARK = b"@@"


def say(text: str, **manner: object) -> str:
    """A prompt that is answered with `text`."""
    return f"@@{msgspec.json.encode(manner).decode()}@@{text}"


def echo_command(folder: Path, script: Script | None = None) -> list[str]:
    """The command of such a runner."""
    scripted = scripted_command(folder, script or Script())
    return [sys.executable, "-m", "tests.helpers.echo_runner", scripted[-1]]


def reply_to(tokens: list[int]) -> Reply | None:
    """The reply that a prompt asks for: by its last mark, up to the next special token."""
    data = bytes(token if token < 256 else 0 for token in tokens)
    before, mark, text = data.rpartition(MARK)
    _, opening, manner = before.rpartition(MARK)
    if not mark or not opening:
        return None
    reply = msgspec.json.decode(manner, type=Reply)
    reply.tokens = reply.tokens or list(text.partition(b"\0")[0])
    return reply


class _PromptReplies:
    """In the place of the script's list: the reply for the request that is next in the queue."""

    def __init__(self, runner: ScriptedRunner) -> None:
        self._runner = runner
        self._scripted = runner.replies

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> Reply:
        found = reply_to(self._runner.queue[0].tokens)
        if found is not None:
            return found
        return self._scripted.popleft() if len(self._scripted) > 1 else self._scripted[0]


class EchoRunner(ScriptedRunner):
    """Plays what the prompts say."""

    def __init__(self, script: Script, channel: object) -> None:
        super().__init__(script, channel)
        self.replies = _PromptReplies(self)


if __name__ == "__main__":
    scripted_runner.ScriptedRunner = EchoRunner
    sys.exit(scripted_runner.main(sys.argv[1:]))

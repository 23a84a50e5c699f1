"""The real runner process around the tiny test model: everything but the checkpoint is the program's own.

The source is a `FolderSource` whose folder holds `tiny.json`, the arguments of `FaultyModel` and `TinyModel`; `grace`
beside them replaces the channel's.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import mlx.core as mx

import arriero.runner.load as load
from arriero.model.contract import Batch, Hidden
from arriero.runner import channel
from arriero.runner.main import main
from arriero.source import FolderSource
from tests.helpers.tiny_model import TinyModel


class TinyCheckpoint:
    """Just enough of a checkpoint for `load`."""

    nbytes = 0

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    @classmethod
    def open(cls, source: FolderSource) -> Self:
        return cls(json.loads(Path(source.path, "tiny.json").read_text()))

    def unused(self) -> list[str]:
        return []


class FaultyModel(TinyModel):
    """Fails in the prefill of a prompt that holds the token `bad_token`, and takes its time."""

    def __init__(
        self, bad_token: int = -1, error: str = "RuntimeError", poison: bool = False, seconds: float = 0.0, **rest: Any
    ) -> None:
        """`poison`: after the failure the device does not work any more."""
        super().__init__(**rest)
        self.bad_token, self.error, self.poison, self.seconds = bad_token, error, poison, seconds
        self.warm = False

    def forward(self, batch: Batch) -> Hidden:
        assert threading.current_thread() is threading.main_thread(), "array work on another thread"
        if self.warm and batch.tokens.size > 1 and self.bad_token in batch.tokens.tolist():
            if self.poison:
                mx.eval = _broken
            raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError}[self.error]("injected fault")
        if self.warm:
            time.sleep(self.seconds)
        return super().forward(batch)


def _broken(*arrays: Any) -> None:
    raise RuntimeError("the device is lost")


def tiny_command() -> list[str]:
    return [sys.executable, str(Path(__file__))]


def tiny_source(folder: Path, **arguments: Any) -> FolderSource:
    """Write the model's arguments into `folder`."""
    (folder / "tiny.json").write_text(json.dumps(arguments))
    return FolderSource(str(folder))


def _load_model(checkpoint: TinyCheckpoint, dtype: mx.Dtype) -> FaultyModel:
    channel.GRACE_SECONDS = checkpoint.config.pop("grace", channel.GRACE_SECONDS)
    return FaultyModel(**checkpoint.config)


def _warm_up(engine: Any) -> None:
    _real_warm_up(engine)
    engine.model.warm = True


if __name__ == "__main__":
    import arriero.runner.main as runner_main

    _real_warm_up = load.warm_up
    load.Checkpoint = TinyCheckpoint
    load.load_model = _load_model
    runner_main.warm_up = _warm_up
    sys.exit(main(sys.argv[1:]))

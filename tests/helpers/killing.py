"""Changes to a store in processes that end by SIGKILL at a chosen step, with nothing of theirs run afterwards.

A step is a call that changes the file system under the store (`changes`), or a line of the code that stores
(`lines`). So a point names one state of the disk, and the same point is the same state whatever the machine does.

As a program (`python -m tests.helpers.killing ROOT`): for each line `OPERATION MODE POINT` a fork of this process runs
the operation and is killed at the point; POINT 0 kills nothing. The reply is `killed`, or the number of steps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from arriero.create import create as create_module
from arriero.create.create import create
from arriero.create.request import CreateRequest
from arriero.store import store as store_module
from arriero.store.store import Store
from tests.helpers.checkpoint_folder import tensors, upload, write_folder
from tests.helpers.unchecked import unchecked

_CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir", "os.utime"}
_WATCHED = tuple(str(Path(module.__file__).parent) for module in (store_module, create_module))


class Kill:
    """Counts steps, and kills the process at one of them."""

    def __init__(self, root: Path, mode: str, point: int) -> None:
        self._root, self._point = str(root), point
        self._lock = threading.Lock()
        self.steps = 0
        if mode == "changes":
            sys.addaudithook(self._changed)
        else:
            threading.settrace(self._entered)
            sys.settrace(self._entered)

    def _step(self) -> None:
        with self._lock:
            self.steps += 1
            if self.steps == self._point:
                os.kill(os.getpid(), signal.SIGKILL)

    def _changed(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Before a file under the store is made, named, linked, touched or removed."""
        if event not in _CHANGES or not any(str(part).startswith(self._root) for part in arguments):
            return
        if event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._step()

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_WATCHED) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._step()
        return self._line


def folder(root: Path) -> Path:
    """Beside the store: what is imported."""
    return root.with_name("model")


def prepare(root: Path) -> Store:
    """A store of `kept` and `old`, which share nothing, and the files that `import` and `replace` take uploaded."""
    write_folder(folder(root))
    store = Store(root)
    for name, seed in (("kept", 1), ("old", 2)):
        other = write_folder(root.with_name(name), {"model.safetensors": tensors(seed)})
        _create(store, other, name)
    upload(store, folder(root))
    return store


def _create(store: Store, source: Path, name: str, quantize: str = "") -> None:
    request = CreateRequest(model=name, files=upload(store, source), quantize=quantize, system="Be brief.")
    create(store, request, lambda status: None, check=unchecked)


def _inherit(store: Store) -> None:
    create(store, CreateRequest(model="new", from_="old", system="Be long."), lambda status: None)


def _overwrite(store: Store) -> None:
    store.copy("kept", "old")


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "import": lambda store: _create(store, folder(store.root), "new"),
    "quantize": lambda store: _create(store, folder(store.root), "new", "nvfp4"),
    "replace": lambda store: _create(store, folder(store.root), "old", "int4"),
    "inherit": _inherit,
    "cp": lambda store: store.copy("old", "new"),
    "overwrite": _overwrite,
    "rm": lambda store: store.delete("old"),
}
"""`cp` and `overwrite` are copies; the first four are ways of `create`."""


class Killer:
    """Runs operations on a store of its own and kills them."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.killing", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, operation: str, mode: str, point: int) -> str:
        """`killed`, or the steps of an operation that came to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{operation} {mode} {point}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)


@contextmanager
def killing(root: Path) -> Iterator[Killer]:
    """A killer for the time of the block."""
    killer = Killer(root)
    try:
        yield killer
    finally:
        killer.close()


def _child(root: Path, operation: str, mode: str, point: int, report: int) -> None:
    store = Store(root)
    kill = Kill(root, mode, point)
    OPERATIONS[operation](store)
    os.write(report, str(kill.steps).encode())


def main() -> None:
    """The program."""
    root = Path(sys.argv[1])
    for line in sys.stdin:
        operation, mode, point = line.split()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _child(root, operation, mode, int(point), write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        _, status = os.waitpid(child, 0)
        steps = os.read(read, 32).decode()
        os.close(read)
        ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print("killed" if ended else steps or "failed", flush=True)


if __name__ == "__main__":
    main()

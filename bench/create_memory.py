"""What `create --quantize` holds in memory on a synthetic checkpoint, and how fast it is.

    python -m bench.create_memory [--gigabytes 4] [--quantize nvfp4] [--no-scale-search] [--folder DIR]

Prints the source's size, the largest tensor, the growth of anonymous memory (sampled every 10 ms; mapped files are not
counted, since the system takes them back at will) and the speed. Needs room on disk for the source and the result.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

from arriero.create.inventory import take_inventory
from arriero.create.plan import make_plan
from arriero.create.recode import Recoding
from arriero.create.write import write_tensor
from arriero.store.store import Store
from bench.machine import facts
from tests.helpers.synthetic import write_synthetic

HIDDEN, ROWS = 8192, 8192


def anonymous() -> int:
    """Bytes of this process that are backed by no file."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak:
    """Samples memory on a thread while a block runs."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def ignore(*_: object) -> None:
    """Progress and errors are not shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--quantize", default="nvfp4")
    parser.add_argument("--no-scale-search", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the files go (default: a temporary folder)")
    asked = parser.parse_args()
    tensor = 2 * HIDDEN * ROWS
    layers = max(1, round(asked.gigabytes * 1e9 / (2 * tensor)))
    print(facts())
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        folder = Path(place) / "model"
        total = write_synthetic(folder, layers, HIDDEN, ROWS)
        inventory = take_inventory({path.name: path for path in folder.iterdir()})
        plan = make_plan(inventory, Recoding.to(asked.quantize, inventory.config, search=not asked.no_scale_search))
        started = time.monotonic()
        with Peak() as peak, Store(Path(place) / "store").building() as build:
            for blob in plan.blobs:
                write_tensor(build, blob, ignore, ignore)
        seconds = time.monotonic() - started
    print(
        f"{total / 1e9:.2f} GB in {len(plan.blobs)} tensors of {tensor / 1e6:.0f} MB to {asked.quantize}: "
        f"{(peak.most - peak.before) / 1e6:.0f} MB more memory, {seconds:.1f} s, {total / seconds / 1e6:.0f} MB/s"
    )


if __name__ == "__main__":
    main()

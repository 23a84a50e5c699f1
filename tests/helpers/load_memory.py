"""A process of its own that loads a model and prints what that took: `python -m tests.helpers.load_memory SMALL LARGE`.

SMALL is loaded first, so that code and the runtime's own memory don't count. Bytes, as JSON: growth of resident memory
(`resident`), of what MLX holds (`active`) and the most that it held at once (`peak`) over the load; what the model's
arrays have (`arrays`); resident pages of the table's file (`table`); and what a forward adds (`after`).
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import mlx.core as mx

from arriero.model.contract import Model
from arriero.runner.load import load
from arriero.source import FolderSource
from tests.helpers.forward import whole

IDS = list(range(3, 40))


def resident(inside: str = "") -> int:
    """Bytes of this process in memory, or of one file mapped into it."""
    total, counts = 0, not inside
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counts = line.endswith(inside)
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def loaded(folder: str) -> Model:
    """As a runner loads it."""
    return load(FolderSource(folder), "bfloat16", lambda _: None).model


def main() -> None:
    """Load both, print the figures of the second."""
    small, large = sys.argv[1:]
    whole(loaded(small), IDS)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, active = resident(), mx.get_active_memory()
    model = loaded(large)
    gc.collect()
    mx.clear_cache()
    figures = {
        "resident": resident() - before,
        "active": mx.get_active_memory() - active,
        "peak": mx.get_peak_memory() - active,
        "arrays": sum(array.nbytes for array in model.parameters()),
        "table": resident("model-table.safetensors"),
    }
    whole(model, IDS)
    mx.clear_cache()
    print(json.dumps({**figures, "after": resident() - before}))


if __name__ == "__main__":
    main()

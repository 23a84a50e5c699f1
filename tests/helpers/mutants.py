"""Damaged files of every kind that we read, opened one after the other within limits of memory and time.

As a program (`python -m tests.helpers.mutants FOLDER FIRST COUNT`): mutants FIRST … FIRST + COUNT - 1 in a process that
may not grow by more than `GROWTH` bytes of address space. Prints one JSON object; a mutant that is neither opened nor
refused with an error of ours is a failure, and so is one that takes too long or too much.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import signal
import struct
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from arriero.errors import ArrieroError
from arriero.formats.gguf import GGUFFile
from arriero.formats.safetensors import SafetensorsFile, write
from arriero.formats.safetensors_folder import INDEX, open_folder
from arriero.modelfile import Modelfile, parse
from arriero.modelfile import format as format_modelfile
from arriero.store.manifests import ConfigBlob, Manifest
from arriero.store.store import Store
from tests.helpers.gguf_files import encode, gguf_bytes
from tests.helpers.mutator import bytes_damaged, document_damaged
from tests.helpers.stored import manifest_path, put_model

CONSTANT = 2 << 20
"""Bytes that opening may allocate beside the file's size: JSON becomes objects, some of them for two bytes of text."""
GROWTH = 512 << 20
LONGEST = 2.0
"""Seconds of the processor for one mutant."""

MODELFILE = '''# A model
FROM ./model.gguf
PARAMETER temperature 0.7
PARAMETER stop "<|im_end|>"
TEMPLATE """{{ .System }}
{{ .Prompt }}"""
SYSTEM You are "brief".
MESSAGE user Hello
MESSAGE assistant """Good
day"""
LICENSE MIT
ADAPTER ./lora
DRAFT ./draft
RENDERER qwen3
PARSER qwen3
REQUIRES 0.5.0
'''
_SNIPPETS = (
    '"""',
    '"',
    "\\",
    "\0",
    "\ufeff",
    "\r",
    "FROM ",
    "PARAMETER stop ",
    "MESSAGE ",
    "“",
    "\u200b",
    "x" * 5000,
    "{{" * 500,
)
_VALUES = np.arange(128, dtype=np.float32).reshape(4, 32)


def spoken(modelfile: Modelfile) -> list[tuple[str, str, str]]:
    """What a Modelfile says, wherever it says it."""
    return [(one.name, one.key, one.value) for one in modelfile]


class TooSlow(BaseException):
    """Raised by the clock, through everything."""


class Targets:
    """For each kind of file: how a mutant is made, and how all of it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "mutant"
        write(
            folder / "seed",
            {"a": _VALUES, "b": _VALUES.astype(np.float16), "c.scale": np.arange(6, dtype=np.uint8)},
            {"format": "pt"},
        )
        self.tensors = (folder / "seed").read_bytes()
        keys = {
            "general.architecture": "llama",
            "general.alignment": 32,
            "llama.block_count": 1,
            "tokenizer.ggml.tokens": ["a", "b", "é"],
            "tokenizer.ggml.scores": [0.5, -1.0],
            "nested": [[1], [2, 3]],
            "flag": True,
        }
        self.gguf = gguf_bytes(keys, {"a": encode("F32", _VALUES), "b": encode("Q4_0", _VALUES)})
        self.store = Store(folder / "store")
        put_model(self.store, "kept", {"model": b"weights", "template": b"{{ .Prompt }}", "params": b'{"stop":["a"]}'})
        self.model = put_model(self.store, "m", {"model": b"others"}, named={"config.json": ("json", b"{}")})
        self.sharded = folder / "sharded"
        self.sharded.mkdir()
        for name in ("a", "b"):
            write(self.sharded / f"model-{name}.safetensors", {name: _VALUES})
        self.kinds: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], None]]] = {
            "safetensors": (self._safetensors, self._open_safetensors),
            "gguf": (lambda draw: bytes_damaged(self.gguf, draw), self._open_gguf),
            "manifest": (lambda draw: self._document(self.model.manifest.raw, draw), self._open_manifest),
            "config": (lambda draw: self._document(self.model.config.encode(), draw), self._open_config),
            "modelfile": (self._modelfile, self._open_modelfile),
            "index": (self._index, self._open_index),
        }

    def _document(self, raw: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return bytes_damaged(raw, draw)
        return document_damaged(json.loads(raw), draw).encode("utf-8", "surrogatepass")

    def _safetensors(self, draw: random.Random) -> bytes:
        if draw.random() < 0.35:
            return bytes_damaged(self.tensors, draw)
        length = struct.unpack("<Q", self.tensors[:8])[0]
        text = self._document(self.tensors[8 : 8 + length], draw)
        said = len(text) if draw.random() < 0.9 else draw.choice((0, len(text) + 1, 1 << 40, (1 << 64) - 1))
        return struct.pack("<Q", said) + text + self.tensors[8 + length :]

    def _open_safetensors(self, data: bytes) -> None:
        self.path.write_bytes(data)
        file = SafetensorsFile(self.path)
        assert sum(span.nbytes for span in file.tensors.values()) <= len(data)
        for name in file.tensors:
            file.raw(name)

    def _open_gguf(self, data: bytes) -> None:
        self.path.write_bytes(data)
        file = GGUFFile(self.path)
        dict(file.metadata)
        assert sum(tensor.raw().nbytes for tensor in file.tensors.values()) <= len(data)

    def _open_manifest(self, data: bytes) -> None:
        path = manifest_path(self.store.root, "m")
        path.write_bytes(data)
        assert "kept" in {model.name.model for model in self.store.list()}
        assert self.store.get("kept").source()
        self.store.unreadable()
        manifest = Manifest.decode(data)
        assert manifest.size >= 0
        assert len(manifest.digests()) <= len(manifest.layers) + 1
        self.store.get("m").source()

    def _open_config(self, data: bytes) -> None:
        config = ConfigBlob.decode(data)
        assert ConfigBlob.decode(config.encode()) == config
        model = msgspec.structs.replace(config, extra={})
        assert isinstance(model.model_format, str)

    def _modelfile(self, draw: random.Random) -> bytes:
        lines = MODELFILE.split("\n")
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(lines))
            chance = draw.random()
            if chance < 0.3:
                cut = draw.randint(0, len(lines[at]))
                lines[at] = lines[at][:cut] + draw.choice(_SNIPPETS) + lines[at][cut:]
            elif chance < 0.5:
                lines[at:at] = lines[at : at + draw.randint(1, 3)]
            elif chance < 0.7:
                del lines[at : at + 2]
                lines.append("")
            else:
                draw.shuffle(lines)
        raw = "\n".join(lines).encode(draw.choice(("utf-8", "utf-8", "utf-16", "utf-16-le")), "surrogatepass")
        return bytes_damaged(raw, draw) if draw.random() < 0.4 else raw

    def _open_modelfile(self, data: bytes) -> None:
        found = parse(data)
        assert spoken(parse(format_modelfile(found))) == spoken(found)

    def _index(self, draw: random.Random) -> bytes:
        document = {"metadata": {"total_size": 1024}, "weight_map": {n: f"model-{n}.safetensors" for n in "ab"}}
        return self._document(json.dumps(document).encode(), draw)

    def _open_index(self, data: bytes) -> None:
        (self.sharded / INDEX).write_bytes(data)
        assert set(open_folder(self.sharded)) <= {"a", "b"}


def sweep(folder: Path, first: int, count: int) -> dict[str, Any]:
    """Open all mutants; what was found, as JSON has it."""
    targets = Targets(folder)
    names = list(targets.kinds)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    most, slowest = 0, 0.0
    tracemalloc.start()
    for seed in range(first, first + count):
        kind = names[seed % len(names)]
        make, read = targets.kinds[kind]
        data = make(random.Random(seed))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        try:
            read(data)
            outcomes[f"{kind} opened"] += 1
        except ArrieroError as error:
            outcomes[f"{kind} refused"] += 1
            if not str(error) or len(str(error)) > 2000:
                failures.append(f"{seed} ({kind}): a message of {len(str(error))} characters")
        except (Exception, TooSlow) as error:  # noqa: BLE001 - whatever it is, it is the finding
            failures.append(f"{seed} ({kind}): {type(error).__name__}: {error!s:.200}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - started)
        grown = tracemalloc.get_traced_memory()[1] - before - len(data)
        most = max(most, grown)
        if grown > CONSTANT:
            failures.append(f"{seed} ({kind}): {grown} bytes more than the file's {len(data)} were allocated")
    return {"outcomes": outcomes, "failures": failures, "most": most, "slowest": slowest}


def _late(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {LONGEST} seconds")


def main() -> None:
    """The program."""
    logging.disable()
    signal.signal(signal.SIGPROF, _late)
    held = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + GROWTH, held + GROWTH))
    print(json.dumps(sweep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))


if __name__ == "__main__":
    main()

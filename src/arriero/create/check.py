"""Whether a planned model can be loaded, asked of a process of its own before the first weight is written."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from arriero.create.accept import REAL_BYTES, Verdict
from arriero.create.plan import BlobPlan, Plan
from arriero.create.write import header_of
from arriero.errors import CheckpointError, LoadError
from arriero.formats.mapped import REPAIR
from arriero.source import GGUFSource, LayersSource, ModelSource

log = logging.getLogger(__name__)
_LABEL = re.compile(r"the stored (?:model|draft) of \S+: ")
LONGEST = 900.0
"""Seconds that building may take; a hundred thousand tensors take about a minute."""


def ask_process(source: ModelSource) -> Verdict:
    """What `accept.py` says in a process of its own; raises LoadError when that fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "arriero.create.accept"],
            input=msgspec.json.encode(source),
            capture_output=True,
            timeout=LONGEST,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"the model could not be checked: {error}") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise LoadError(
            f"building the model to check it ended with status {done.returncode}: {said[-1] if said else 'no word'}"
        )
    return msgspec.json.decode(done.stdout, type=Verdict)


def check_plan(
    plan: Plan, documents: Mapping[str, Path], *, ask: Callable[[ModelSource], Verdict] = ask_process
) -> None:
    """Raise CheckpointError with the sentence of a load for a model that would not load, naming the tensor.

    The files that are shown have the headers that will be written, and holes in the place of large tensors.
    """
    with tempfile.TemporaryDirectory(prefix="arriero-check-") as folder:
        written = {blob.name: str(_hollow(Path(folder) / str(n), blob)) for n, blob in enumerate(plan.blobs)}
        layers = LayersSource(
            tensors={name: str(path) for name, path in plan.kept.items()} | written,
            files={name: str(path) for name, path in documents.items()},
        )
        verdict = ask(GGUFSource(tuple(map(str, plan.gguf)), layers) if plan.gguf else layers)
    if verdict.error:
        text = _LABEL.sub("", verdict.error).replace(f"{folder}/", "layer ").replace(f"; {REPAIR}", "")
        raise CheckpointError(f"the model would not load, so it is not created: {text}; convert or download it again")
    if verdict.unused:
        some = ", ".join(verdict.unused[:8])
        log.info("%d tensors are stored that the model does not use: %s", len(verdict.unused), some)


def _hollow(path: Path, blob: BlobPlan) -> Path:
    """A file of a blob's size with its header, and with the data of small tensors that are copied."""
    header = header_of(blob)
    with path.open("wb") as file:
        file.write(header)
        for tensor in blob.tensors:
            if tensor.made is not None:
                file.seek(tensor.stored_bytes, 1)
            for part in tensor.parts.values():
                if part.span.nbytes <= REAL_BYTES:
                    file.write(part.file.raw(part.span.name).data)
                else:
                    file.seek(part.span.nbytes, 1)
        file.truncate(len(header) + blob.stored_bytes)
    return path

"""What an import would make, as rows of a table: groups of tensors that differ by numbers in their names only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from arriero.create.adapter import open_adapter
from arriero.create.draft import plan_draft
from arriero.create.inventory import take_inventory
from arriero.create.plan import BlobPlan, make_plan
from arriero.create.precisions import parse_precision
from arriero.create.recode import Recoding
from arriero.errors import InvalidRequest
from arriero.model.architectures import check_config

_NUMBER = re.compile(r"(?<=[._])\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one kind of layer, treated alike."""

    name: str
    """With `*` for each number."""
    count: int
    source: str
    target: str
    source_bytes: int
    target_bytes: int


def dry_run(
    files: Mapping[str, Path],
    precision: str,
    *,
    adapters: Mapping[str, Path] | None = None,
    draft: Mapping[str, Path] | None = None,
    draft_precision: str = "",
) -> list[Group]:
    """The groups of an import's plan in order of names; reads headers, and an adapter whole.

    Raises what `create` would raise of its plan, and InvalidRequest for GGUF files.
    """
    if any(name.endswith(".gguf") for name in files):
        raise InvalidRequest("a dry run shows the plan of a safetensors model; GGUF files are taken as they are")
    inventory = take_inventory(files)
    check_config(inventory.config)
    adapter = open_adapter(adapters) if adapters else None
    recoding = None
    if precision or adapter is not None:
        asked = parse_precision(precision) if precision else ""
        recoding = Recoding.to(asked, inventory.config, adapter=adapter)
    blobs = make_plan(inventory, recoding).blobs
    if adapter is not None:
        adapter.check_taken()
    beside = plan_draft(take_inventory(draft), draft_precision).plan.blobs if draft else []
    return groups([*blobs, *beside])


def groups(blobs: list[BlobPlan]) -> list[Group]:
    """Planned blobs with the same name but for numbers, the same source and the same target."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for blob in (tensor for layer in blobs for tensor in layer.tensors):
        source = blob.source if blob.made is not None else blob.stored_as
        sums = found.setdefault((_NUMBER.sub("*", blob.name), source, blob.stored_as), [0, 0, 0])
        for i, number in enumerate((1, blob.nbytes, blob.stored_bytes)):
            sums[i] += number
    return [
        Group(name, count, source, target, read, written)
        for (name, source, target), (count, read, written) in sorted(found.items())
    ]

"""What an import would make, as rows of a table: groups of tensors that differ by numbers in their names only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from arriero.create.adapter import Adapter, open_adapter
from arriero.create.draft import plan_draft, refuse_alone
from arriero.create.from_gguf import plan_gguf
from arriero.create.gguf import GGUFModel, read_gguf
from arriero.create.inventory import take_inventory
from arriero.create.kinds import sniff
from arriero.create.plan import Plan, make_plan
from arriero.create.request import CreateRequest
from arriero.create.stored import stored_draft, stored_tensors
from arriero.create.target import check_made, recoding_of, unchanged
from arriero.model.architectures import check_config
from arriero.source import GGUFSource
from arriero.store.model import StoredModel
from arriero.store.tensors import NUMBER

Source = Mapping[str, Path] | StoredModel
"""Files by the names that `create` would send them under, or a model of the store."""


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
    source: Source,
    precision: str,
    *,
    adapters: Mapping[str, Path] | None = None,
    draft: Source | None = None,
    draft_precision: str = "",
) -> list[Group]:
    """The groups of an import's plan in order of names; reads headers, and an adapter whole.

    Raises what `create` would raise of its plan.
    """
    adapter = open_adapter(adapters) if adapters else None
    rows = _rows(source, CreateRequest(quantize=precision), adapter)
    if adapter is not None:
        adapter.check_taken()
    if draft is not None:
        inventory = stored_draft(draft).inventory if isinstance(draft, StoredModel) else take_inventory(draft)
        rows += _planned(plan_draft(inventory, draft_precision).plan)
    elif isinstance(source, StoredModel) and source.draft is not None and source.draft.format == "safetensors":
        rows += _planned(make_plan(stored_tensors(source, draft=True).inventory))
    return _groups(rows)


def _rows(source: Source, request: CreateRequest, adapter: Adapter | None) -> list[Group]:
    """The tensors of the model itself, each by itself."""
    gguf = _gguf(source)
    if gguf is not None:
        recoding = recoding_of(request, gguf.config, adapter)
        if recoding is None:
            tensors = (tensor for part in gguf.parts for tensor in part.tensors.values())
            return [Group(t.name, 1, t.type.name, t.type.name, t.nbytes, t.nbytes) for t in tensors]
        plan, changed = plan_gguf(gguf.parts, gguf.config, recoding)
        if recoding.asked and not changed:
            raise unchanged(recoding, plan)
        return _planned(plan)
    inventory = stored_tensors(source).inventory if isinstance(source, StoredModel) else take_inventory(source)
    refuse_alone(inventory.config)
    check_config(inventory.config)
    recoding = recoding_of(request, inventory.config, adapter)
    plan = make_plan(inventory, recoding)
    if recoding is not None:
        check_made(recoding, plan)
    return _planned(plan)


def _gguf(source: Source) -> GGUFModel | None:
    """The GGUF model that a source is, if it is one."""
    if not isinstance(source, StoredModel):
        return read_gguf(source) if any(sniff(path) == "gguf" for path in source.values()) else None
    found = source.source()
    if not isinstance(found, GGUFSource):
        return None
    return read_gguf({f"part {n} of {source.name}": Path(path) for n, path in enumerate(found.paths, 1)})


def _planned(plan: Plan) -> list[Group]:
    """The tensors of a plan, each by itself."""
    found = []
    for tensor in (tensor for layer in plan.blobs for tensor in layer.tensors):
        source = tensor.source if tensor.made is not None else tensor.stored_as
        found.append(Group(tensor.name, 1, source, tensor.stored_as, tensor.nbytes, tensor.stored_bytes))
    return found


def _groups(rows: Iterable[Group]) -> list[Group]:
    """Rows with the same name but for numbers, the same source and the same target, added up."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        sums = found.setdefault((NUMBER.sub("*", row.name), row.source, row.target), [0, 0, 0])
        for i, number in enumerate((row.count, row.source_bytes, row.target_bytes)):
            sums[i] += number
    return [
        Group(name, count, source, target, read, written)
        for (name, source, target), (count, read, written) in sorted(found.items())
    ]

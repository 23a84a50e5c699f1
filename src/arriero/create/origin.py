"""Where the weights of a new model come from: uploaded files or another model, an adapter, a draft.

All of it is planned and checked before the first tensor is written.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import msgspec

from arriero.chat.model_text import ModelText
from arriero.create.adapter import open_adapter
from arriero.create.draft import DraftPlan, plan_draft
from arriero.create.inventory import take_inventory
from arriero.create.kinds import sniff
from arriero.create.plan import BlobPlan, Plan
from arriero.create.stored import stored_draft
from arriero.create.target import labelled, target_of_files, target_of_model
from arriero.create.work import Work
from arriero.create.write import add_layer, write_tensor
from arriero.errors import UnsupportedFeature
from arriero.store import manifests
from arriero.store.manifests import ConfigBlob, Layer, is_draft
from arriero.store.model import StoredModel

_REPORT_EVERY = 0.1


@dataclass(frozen=True)
class Origin:
    """Layers that are in the store, their description, the text side."""

    layers: list[Layer]
    config: ConfigBlob
    text: ModelText | None
    """None for a base whose tokenizer and template are taken over as they are."""


def origin_of(work: Work, base: StoredModel | None) -> Origin:
    """Plan, check and write the weights; raises what `create` raises."""
    request = work.request
    adapter = open_adapter(work.uploaded(request.adapters)) if request.adapters else None
    target = target_of_files(work, adapter) if base is None else target_of_model(work, base, adapter)
    if adapter is not None:
        adapter.check_taken()
        work.progress({"status": f"merging an adapter of rank {adapter.rank} into {len(adapter.taken)} tensors"})
    draft, kept_draft = _draft(work, base)
    blobs = [*(target.plan.blobs if target.plan else []), *(draft.plan.blobs if draft else [])]
    documents = target.documents | (draft.documents if draft else {})
    if blobs or (base is None and target.gguf):
        work.progress({"status": "checking that the model can be loaded"})
        stays = [layer for layer in target.kept if layer.media_type == manifests.TENSOR]
        kept = {} if base is None else {layer.name: base.path(layer) for layer in stays}
        work.check(Plan(blobs, kept, target.gguf), documents)
    layers = list(target.kept)
    if target.plan is not None:
        made, count = target.plan.made, len(target.plan.blobs)
        how = f", {made} of them {'quantised' if request.precision else 'changed'}" if made else " as they are"
        work.progress({"status": f"importing {count} tensors{how} ({target.config.file_type})"})
        layers += _write_tensors(work, target.plan)
    layers += [add_layer(work.build, path.read_bytes(), kind, work.progress, name) for name, path, kind in target.files]
    config = target.config
    if draft is not None:
        work.progress({"status": f"importing draft ({len(draft.plan.blobs)} tensors, {draft.facts['file_type']})"})
        layers += _write_tensors(work, draft.plan)
        layers += [
            add_layer(work.build, path.read_bytes(), manifests.JSON, work.progress, name)
            for name, path in draft.documents.items()
        ]
        work.build.replaced |= set(request.draft_files.values())
        config = msgspec.structs.replace(config, draft=draft.facts)
    work.build.replaced |= target.replaced | set(request.adapters.values())
    return Origin(layers + kept_draft, config, target.text)


def _draft(work: Work, base: StoredModel | None) -> tuple[DraftPlan | None, list[Layer]]:
    """The draft to write, and the layers of one that stays."""
    request = work.request
    if request.draft_files:
        files = work.uploaded(request.draft_files)
        gguf = next((name for name, path in files.items() if sniff(path) == "gguf"), None)
        if gguf is not None:
            raise UnsupportedFeature(f"the draft {gguf} is a GGUF file; drafts are safetensors folders here")
        inventory = take_inventory(files)
    elif request.draft:
        inventory = stored_draft(work.store.get(request.draft)).inventory
    elif base is None:
        return None, []
    else:
        return None, labelled(base, [layer for layer in base.manifest.layers if is_draft(layer)])
    return plan_draft(inventory, request.draft_quantize, search=request.scale_search), []


def _write_tensors(work: Work, plan: Plan) -> list[Layer]:
    total, done, reported = plan.nbytes, 0, 0.0

    def copied(count: int) -> None:
        nonlocal done, reported
        done += count
        now = time.monotonic()
        if now - reported >= _REPORT_EVERY or done == total:
            reported = now
            work.progress({"status": "importing tensors", "total": total, "completed": done})

    errors: dict[tuple[str, str], list[float]] = {}

    def missed(blob: BlobPlan, error: float) -> None:
        errors.setdefault((blob.source, blob.stored_as), []).append(error)

    layers = []
    for blob in plan.blobs:
        stored = write_tensor(work.build, blob, copied, missed)
        layers.append(Layer(media_type=manifests.TENSOR, digest=stored.digest, size=stored.size, name=blob.name))
    for (source, kind), found in errors.items():
        if source == kind:
            continue
        lost = f"weight error {math.sqrt(sum(e * e for e in found) / len(found)):.2%}" if any(found) else "exact"
        work.progress({"status": f"{len(found)} tensors from {source} to {kind}: {lost}"})
    return layers

"""The draft of a new model: its files or the draft of another stored model, under the names that a store has for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arriero.create.inventory import Inventory
from arriero.create.made import Made, Piece, Sink, Told
from arriero.create.plan import BlobPlan, Plan, make_plan
from arriero.create.policies import draft as policy
from arriero.create.policies.tensor import Tensor
from arriero.create.precisions import parse_precision
from arriero.create.recode import Recoding
from arriero.errors import InvalidRequest, UnsupportedFeature
from arriero.model.drafts import check_config, is_draft
from arriero.store.describe import human_count
from arriero.store.manifests import DRAFT_FOLDER, DRAFT_PREFIX

FILES = ("config.json", "generation_config.json")
"""Those that are kept: it has no tokenizer of its own."""


@dataclass(frozen=True)
class DraftPlan:
    """A draft that is written with its model."""

    plan: Plan
    documents: dict[str, Path]
    """Its files by their names in the store."""
    facts: dict[str, Any]
    """The `draft` object of the configuration blob; the last two fields are ours."""


def refuse_alone(config: Mapping[str, Any]) -> None:
    """UnsupportedFeature for a draft that was given as a model."""
    if is_draft(config):
        raise UnsupportedFeature(
            f"{check_config(config)} is a draft, which runs beside the model that it was made for: FROM that model, "
            "DRAFT this one"
        )


def plan_draft(inventory: Inventory, precision: str, *, search: bool = True) -> DraftPlan:
    """What becomes of a draft's tensors, whose names may have the prefix already.

    Raises UnsupportedArchitecture with the known drafts, InvalidRequest for a precision that changes nothing, and what
    `make_plan` raises.
    """
    architecture = check_config(inventory.config)
    recoding = None
    if precision:
        asked = parse_precision(precision)

        def decide(tensor: Tensor, kind: str) -> str:
            return policy.decide(Tensor(tensor.name.removeprefix(DRAFT_PREFIX), tensor.shape), kind)

        recoding = Recoding(asked, decide, search)
    plan = make_plan(inventory, recoding)
    if recoding is not None and not plan.made:
        raise InvalidRequest(
            f"no tensor of the draft becomes {recoding.asked}: it is {plan.file_type} already, or too small for the "
            "groups; leave 'draft_quantize' out"
        )
    plan = Plan([_prefixed(blob) for blob in plan.blobs])
    documents = {f"{DRAFT_FOLDER}{name}": inventory.documents[name] for name in FILES if name in inventory.documents}
    facts = {
        "model_format": "safetensors",
        "architecture": architecture,
        "tensor_prefix": DRAFT_PREFIX,
        "config": f"{DRAFT_FOLDER}config.json",
        "file_type": plan.file_type,
        "model_type": human_count(plan.parameters),
    }
    return DraftPlan(plan, documents, facts)


@dataclass(frozen=True)
class _Renamed:
    """A tensor that is made, under the names of a draft's."""

    made: Made

    @property
    def pieces(self) -> dict[str, Piece]:
        return {f"{DRAFT_PREFIX}{name}": piece for name, piece in self.made.pieces.items()}

    @property
    def source_bytes(self) -> int:
        return self.made.source_bytes

    @property
    def lossless(self) -> bool:
        return self.made.lossless

    def write(self, sink: Sink, told: Told) -> float:
        return self.made.write(sink, told)


def _prefixed(blob: BlobPlan) -> BlobPlan:
    if blob.name.startswith(DRAFT_PREFIX):
        return blob
    return replace(
        blob,
        name=f"{DRAFT_PREFIX}{blob.name}",
        parts={f"{DRAFT_PREFIX}{name}": part for name, part in blob.parts.items()},
        metadata=_metadata(blob.metadata),
        made=None if blob.made is None else _Renamed(blob.made),
        members=tuple(map(_prefixed, blob.members)),
    )


def _metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Labels of single tensors carry the tensor's name; those of the whole file don't."""
    return {f"{DRAFT_PREFIX}{key}" if "." in key else key: value for key, value in metadata.items()}
